#include "worker/core/step_durations.h"

#include <algorithm>

#include "worker/core/check.h"

namespace palimpsest {
namespace {

// Of the newest sample.
constexpr double kWeight = 1.0 / 32;

}  // namespace

// The first samples weigh as in a plain mean, so that no start value shows.
void StepDurations::Average::Add(double sample) {
  weight = weight * (1 - kWeight) + kWeight;
  value += (sample - value) * kWeight / weight;
}

void StepDurations::Submitted(const StepPlan& plan, absl::Time now) {
  Step step{.submitted = now};
  for (const SequenceChunk& chunk : plan.chunks) {
    step.prefill |= chunk.tokens.size() > 1 || chunk.sampling == nullptr;
    step.tokens += chunk.tokens.size();
  }
  steps_.push_back(step);
}

void StepDurations::Ended(const StepTimes& times, absl::Time now) {
  PALIMPSEST_CHECK(!steps_.empty());
  const Step step = steps_.front();
  steps_.pop_front();
  // A step that was submitted behind another began when that one ended.
  const absl::Duration whole = times.device > absl::ZeroDuration()
                                   ? times.device
                                   : now - std::max(step.submitted, last_end_);
  last_end_ = now;
  stall_ += times.rotation_stall;
  const absl::Duration busy = std::max(whole - times.rotation_stall, absl::ZeroDuration());
  const double seconds = absl::ToDoubleSeconds(busy);
  (step.prefill ? prefill_ : decode_).Add(seconds);
  if (step.prefill) prompt_token_.Add(seconds / static_cast<double>(step.tokens));
  share_.Add(step.prefill ? 1 : 0);
}

void StepDurations::Failed(absl::Time now) {
  PALIMPSEST_CHECK(!steps_.empty());
  steps_.pop_front();
  last_end_ = now;
}

}  // namespace palimpsest
