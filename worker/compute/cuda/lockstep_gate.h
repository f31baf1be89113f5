// Takes the question whether a stage's parameters are there to the gate once for all ranks, which
// so go on or give up together.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_LOCKSTEP_GATE_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_LOCKSTEP_GATE_H_

#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "worker/compute/cuda/rank_meeting.h"
#include "worker/core/model_runner.h"

namespace palimpsest::cuda {

class LockstepGate {
 public:
  // `gate` knows all ranks' GPUs. Both must outlive the object.
  LockstepGate(ParameterGate* gate, RankMeeting* meeting, int ranks);

  // What a rank's runner asks, on its thread: every rank for the same stages in the same order. It
  // knows one GPU. CheckPassed is left to the one who waits for all ranks.
  ParameterGate* rank(int rank) { return &ranks_[static_cast<size_t>(rank)]; }

 private:
  class RankGate final : public ParameterGate {
   public:
    RankGate(LockstepGate* all, int rank) : all_(all), rank_(static_cast<size_t>(rank)) {}
    absl::Status AwaitStage(int stage) override;
    absl::Status StageEvents(int stage, absl::Span<void*> events) override;

   private:
    LockstepGate* const all_;
    const size_t rank_;
  };

  ParameterGate* const gate_;
  RankMeeting* const meeting_;
  std::vector<void*> events_;
  std::vector<RankGate> ranks_;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_LOCKSTEP_GATE_H_
