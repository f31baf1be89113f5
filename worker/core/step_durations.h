// How long steps take by phase: with prompt chunks (prefill) and without (decode), smoothed over
// the last few dozen of each, without what they waited for rotating layers. Pure; one thread.
#ifndef PALIMPSEST_WORKER_CORE_STEP_DURATIONS_H_
#define PALIMPSEST_WORKER_CORE_STEP_DURATIONS_H_

#include <cstddef>
#include <deque>

#include "absl/time/time.h"
#include "worker/core/step_plan.h"

namespace palimpsest {

class StepDurations {
 public:
  // A step was submitted; it is over at the next Ended or Failed that is not an earlier step's.
  void Submitted(const StepPlan& plan, absl::Time now);
  void Ended(const StepTimes& times, absl::Time now);
  void Failed(absl::Time now);

  // 0: none yet.
  double decode_seconds() const { return decode_.value; }
  double prefill_seconds() const { return prefill_.value; }
  // Of a prefill step, by the tokens in it.
  double prompt_token_seconds() const { return prompt_token_.value; }
  // Of recent steps, those with prompt chunks: 0 to 1.
  double prefill_share() const { return share_.value; }
  // Sum since the start.
  absl::Duration rotation_stall() const { return stall_; }

 private:
  struct Step {
    bool prefill = false;
    size_t tokens = 0;
    absl::Time submitted;
  };
  struct Average {
    double value = 0;
    double weight = 0;  // of what was seen, up to 1

    void Add(double sample);
  };

  std::deque<Step> steps_;
  absl::Time last_end_ = absl::InfinitePast();
  Average decode_, prefill_, prompt_token_, share_;
  absl::Duration stall_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_STEP_DURATIONS_H_
