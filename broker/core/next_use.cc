#include "broker/core/next_use.h"

#include <algorithm>

namespace palimpsest {

void NextUse::Observe(bool active, absl::Time now) {
  if (active && !active_ && idle_since_.has_value() && now - *idle_since_ >= kShortestIdle) {
    idle_seconds_[next_] = absl::ToDoubleSeconds(now - *idle_since_);
    next_ = (next_ + 1) % kRemembered;
    count_ = std::min(count_ + 1, kRemembered);
  }
  if (!active && (active_ || !idle_since_.has_value())) idle_since_ = now;
  active_ = active;
}

absl::Duration NextUse::Expected(absl::Time now) const {
  if (active_) return absl::ZeroDuration();
  const double idle =
      idle_since_.has_value() ? std::max(absl::ToDoubleSeconds(now - *idle_since_), 0.0) : 0.0;
  const double assumed = std::max(absl::ToDoubleSeconds(kPriorIdle), 2 * idle);
  double weights = kPriorWeight;
  double seconds = kPriorWeight * (assumed - idle);
  double weight = 1.0;
  for (size_t age = 0; age < count_; ++age, weight *= kDecay) {
    const double gap = idle_seconds_[(next_ + kRemembered - 1 - age) % kRemembered];
    if (gap <= idle) continue;
    weights += weight;
    seconds += weight * (gap - idle);
  }
  return absl::Seconds(seconds / weights);
}

}  // namespace palimpsest
