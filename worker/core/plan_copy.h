// A step plan that outlives Submit: for runners of tests, which execute plans later.
#ifndef PALIMPSEST_WORKER_CORE_PLAN_COPY_H_
#define PALIMPSEST_WORKER_CORE_PLAN_COPY_H_

#include <vector>

#include "worker/core/step_plan.h"

namespace palimpsest {

class PlanCopy {
 public:
  explicit PlanCopy(const StepPlan& plan);
  PlanCopy(PlanCopy&&) = default;
  PlanCopy& operator=(PlanCopy&&) = default;

  // Puts in the tokens that the plan before this one sampled; a token that it lacks, as it failed,
  // becomes 0.
  void Resolve(const StepResult& previous);

  // With its own copy of everything. Valid as long as this object, also after it was moved.
  const StepPlan& plan() const { return plan_; }

 private:
  struct Chunk {
    std::vector<TokenId> tokens;
    std::vector<BlockId> blocks;
    SamplingRequest sampling;
    std::vector<TokenId> history;
  };

  std::vector<Chunk> chunks_;
  StepPlan plan_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_PLAN_COPY_H_
