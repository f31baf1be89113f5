// How long steps take by phase: with prompt chunks (prefill) and without (decode), smoothed over
// the last few dozen of each, without what they waited for rotating layers. Pure; one thread.
#ifndef PALIMPSEST_WORKER_CORE_STEP_DURATIONS_H_
#define PALIMPSEST_WORKER_CORE_STEP_DURATIONS_H_

#include <cstddef>
#include <cstdint>
#include <deque>

#include "absl/time/time.h"
#include "worker/core/step_plan.h"

namespace palimpsest {

class StepDurations {
 public:
  // `window`: tokens that a token sees, itself included; 0 for all.
  explicit StepDurations(int32_t window = 0) : window_(window) {}

  // A step was submitted; it is over at the next Ended or Failed that is not an earlier step's.
  void Submitted(const StepPlan& plan, absl::Time now);
  void Ended(const StepTimes& times, absl::Time now);
  void Failed(absl::Time now);

  // 0: none yet.
  double decode_seconds() const { return decode_.value; }
  double prefill_seconds() const { return prefill_.value; }
  // Of a prefill step, by the tokens in it.
  double prompt_token_seconds() const { return prompt_token_.value; }
  // The least squares fit of prefill steps' seconds to tokens * token_seconds + (sum of what the
  // tokens see, attention_span.h) * position_seconds, neither below 0.
  struct PrefillFit {
    double token_seconds = 0;
    double position_seconds = 0;
  };
  PrefillFit prefill_fit() const;
  // Of recent steps, those with prompt chunks: 0 to 1.
  double prefill_share() const { return share_.value; }
  // Sum since the start.
  absl::Duration rotation_stall() const { return stall_; }

 private:
  struct Step {
    bool prefill = false;
    size_t tokens = 0;
    double positions = 0;  // their sum
    absl::Time submitted;
  };
  struct Average {
    double value = 0;
    double weight = 0;  // of what was seen, up to 1

    void Add(double sample);
  };

  // Decaying sums of products of tokens (n), positions (p) and seconds (t) of prefill steps.
  struct Products {
    double nn = 0, np = 0, pp = 0, nt = 0, pt = 0;
  };

  void AddPrefill(double tokens, double positions, double seconds);

  const int32_t window_;
  std::deque<Step> steps_;
  Products products_;
  absl::Time last_end_ = absl::InfinitePast();
  Average decode_, prefill_, prompt_token_, share_;
  absl::Duration stall_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_STEP_DURATIONS_H_
