#include "broker/tier/circuit_breaker.h"

#include <algorithm>
#include <cassert>

#include "absl/strings/str_cat.h"

namespace palimpsest {

absl::Status CircuitBreaker::Options::Validate() const {
  if (failures_to_open >= 1 && slow > absl::ZeroDuration() &&
      first_back_off > absl::ZeroDuration() && longest_back_off >= first_back_off &&
      longest_back_off < absl::InfiniteDuration()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "a circuit breaker that opens after ", failures_to_open, " failures or ",
      absl::FormatDuration(slow), " and backs off for ", absl::FormatDuration(first_back_off),
      " to ", absl::FormatDuration(longest_back_off),
      "; expected at least one failure, durations above zero and a finite longest back-off that is "
      "no less than the first"));
}

void CircuitBreaker::Record(bool ok, absl::Duration elapsed, absl::Time now) {
  if (state_ != State::kClosed) return;
  if (ok && elapsed <= options_.slow) {
    failures_ = 0;
  } else if (++failures_ >= options_.failures_to_open) {
    Open(now);
  }
}

void CircuitBreaker::Stalled(absl::Time now) {
  if (state_ == State::kClosed) Open(now);
}

void CircuitBreaker::Open(absl::Time now) {
  state_ = State::kOpen;
  ++times_opened_;
  next_probe_ = now + back_off_;
}

void CircuitBreaker::BeginProbe() {
  assert(state_ == State::kOpen);
  state_ = State::kHalfOpen;
}

void CircuitBreaker::EndProbe(bool ok, absl::Time now) {
  assert(state_ == State::kHalfOpen);
  if (ok) {
    state_ = State::kClosed;
    failures_ = 0;
    back_off_ = options_.first_back_off;
    return;
  }
  state_ = State::kOpen;
  next_probe_ = now + back_off_;
  back_off_ = std::min(back_off_ * 2, options_.longest_back_off);
}

}  // namespace palimpsest
