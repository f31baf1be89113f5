// Decides when a tier that fails or slows is left alone. Closed, everything passes. Open, nothing
// does, and after a back-off one probe may run (half-open), whose success closes it and whose
// failure doubles the back-off.
//
// Begins open with a probe due: nothing is asked of a tier before it has proved itself.
//
// Pure logic; the caller serializes.
#ifndef PALIMPSEST_BROKER_TIER_CIRCUIT_BREAKER_H_
#define PALIMPSEST_BROKER_TIER_CIRCUIT_BREAKER_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace palimpsest {

class CircuitBreaker {
 public:
  struct Options {
    // In a row.
    int failures_to_open = 3;
    // An operation that takes longer counts as failed when it ends, and opens at once while it has
    // not ended.
    absl::Duration slow = absl::Seconds(2);
    absl::Duration first_back_off = absl::Seconds(1);
    absl::Duration longest_back_off = absl::Seconds(60);

    absl::Status Validate() const;
  };

  enum class State { kClosed, kOpen, kHalfOpen };

  // Requires options.Validate().ok().
  CircuitBreaker(const Options& options, absl::Time now)
      : options_(options), back_off_(options.first_back_off), next_probe_(now) {}

  State state() const { return state_; }
  bool allows() const { return state_ == State::kClosed; }
  uint64_t times_opened() const { return times_opened_; }
  absl::Duration slow() const { return options_.slow; }

  // An operation ended, in `elapsed`. What ends while it is not closed is ignored.
  void Record(bool ok, absl::Duration elapsed, absl::Time now);
  // An operation has been under way for longer than `slow`.
  void Stalled(absl::Time now);

  // InfiniteFuture unless open.
  absl::Time next_probe() const {
    return state_ == State::kOpen ? next_probe_ : absl::InfiniteFuture();
  }
  // Requires next_probe() <= now.
  void BeginProbe();
  // Requires kHalfOpen.
  void EndProbe(bool ok, absl::Time now);

 private:
  void Open(absl::Time now);

  const Options options_;
  State state_ = State::kOpen;
  int failures_ = 0;
  absl::Duration back_off_;
  absl::Time next_probe_;
  uint64_t times_opened_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_CIRCUIT_BREAKER_H_
