#include "worker/memory/link_pacer.h"

#include <algorithm>

#include "common/monotonic_time.h"

namespace palimpsest {

void PacedQueue::Pass(absl::Time now) {
  if (rate_ <= 0) {
    passed_ = entered_;
  } else {
    passed_ = std::min(entered_, passed_ + rate_ * absl::ToDoubleSeconds(now - since_));
  }
  since_ = now;
}

void PacedQueue::SetRate(double bytes_per_second, absl::Time now) {
  Pass(now);
  rate_ = bytes_per_second;
  Pass(now);
}

double PacedQueue::Enter(Bytes bytes, absl::Time now) {
  Pass(now);
  const double place = entered_;
  entered_ += static_cast<double>(bytes.count());
  return place;
}

absl::Time PacedQueue::Turn(double place, absl::Time now) {
  Pass(now);
  // Half a byte is what rounding may leave of a wait.
  if (passed_ >= place - 0.5) return now;
  return now + absl::Seconds((place - passed_) / rate_);
}

void LinkPacer::SetLimit(double bytes_per_second) {
  MutexLock lock(&mu_);
  queue_.SetRate(open_ ? 0 : bytes_per_second, MonotonicNow());
  changed_.SignalAll();
}

void LinkPacer::Open() {
  MutexLock lock(&mu_);
  open_ = true;
  queue_.SetRate(0, MonotonicNow());
  changed_.SignalAll();
}

bool LinkPacer::limited() const {
  MutexLock lock(&mu_);
  return queue_.limited();
}

void LinkPacer::AwaitTurn(Kind kind, Bytes bytes) {
  absl::Duration waited;
  {
    MutexLock lock(&mu_);
    Totals& totals = totals_[static_cast<size_t>(kind)];
    const absl::Time begin = MonotonicNow();
    absl::Time now = begin;
    const double place = queue_.Enter(bytes, begin);
    for (absl::Time turn = queue_.Turn(place, now); turn > now; turn = queue_.Turn(place, now)) {
      changed_.WaitWithDeadline(&mu_, turn);
      now = MonotonicNow();
    }
    waited = now - begin;
    totals.copied += bytes;
    totals.waited += waited;
  }
  if (on_waited_ && waited > absl::ZeroDuration()) on_waited_(kind, waited);
}

Bytes LinkPacer::copied(Kind kind) const {
  MutexLock lock(&mu_);
  return totals_[static_cast<size_t>(kind)].copied;
}

absl::Duration LinkPacer::waited(Kind kind) const {
  MutexLock lock(&mu_);
  return totals_[static_cast<size_t>(kind)].waited;
}

}  // namespace palimpsest
