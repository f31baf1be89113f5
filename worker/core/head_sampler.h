// When a runner samples the attention mass of KV heads (head_mass.h), and over which query: every
// so many steps, over the last token of one sequence. So a sample costs at most what the scores of
// one decoding sequence cost, whatever the batch.
//
// Not thread-safe.
#ifndef PALIMPSEST_WORKER_CORE_HEAD_SAMPLER_H_
#define PALIMPSEST_WORKER_CORE_HEAD_SAMPLER_H_

#include <cstdint>
#include <optional>

#include "worker/core/step_plan.h"

namespace palimpsest {

struct HeadSampling {
  int32_t every = 0;  // steps; 0: never
  int32_t recent_tokens = 256;
};

class HeadSampler {
 public:
  explicit HeadSampler(const HeadSampling& sampling) : sampling_(sampling) {}

  // To be called once for each step that is submitted: the chunk whose last token is to be sampled,
  // if this step is one that takes a sample. Sequences without far keys say nothing about heads;
  // the others take turns.
  std::optional<int32_t> Choose(const StepPlan& plan);

 private:
  const HeadSampling sampling_;
  int64_t steps_ = 0;
  int64_t samples_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_HEAD_SAMPLER_H_
