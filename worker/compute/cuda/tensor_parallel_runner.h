// Runs step plans of one model on several GPUs: a runner for each rank, in lockstep. Every rank
// gets every plan and samples the same tokens, as the ranks' logits are put together before
// (collective.h); rank 0's are the result.
//
// The engine's thread blocks while the ranks' threads submit a step side by side, and again while
// they wait for it.
//
// Failure: parameters that do not come fail a step on all ranks alike, and the step may be
// submitted again. Any other error of a rank is final: it ends what the others do.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_TENSOR_PARALLEL_RUNNER_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_TENSOR_PARALLEL_RUNNER_H_

#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/compute/cuda/collective.h"
#include "worker/compute/cuda/lockstep_gate.h"
#include "worker/compute/cuda/rank_meeting.h"
#include "worker/compute/cuda/rank_team.h"
#include "worker/core/model_runner.h"
#include "worker/core/step_plan.h"

namespace palimpsest::cuda {

class TensorParallelRunner final : public ModelRunner {
 public:
  // Where the ranks meet; made first, since collectives and gate need it.
  using MeetingPtr = std::unique_ptr<RankMeeting>;

  // Makes the runner of a rank, on the thread on which it will be used. `gate` is null if there is
  // none. A runner that fails, other than by its gate, calls Abort of its collective.
  using MakeRank = absl::FunctionRef<absl::StatusOr<std::unique_ptr<ModelRunner>>(
      Collective& collective, ParameterGate* gate)>;

  // `group` aborts `meeting` with itself. `gate` may be null, and outlives the object.
  static absl::StatusOr<std::unique_ptr<TensorParallelRunner>> Create(
      MeetingPtr meeting, std::unique_ptr<CollectiveGroup> group, ParameterGate* gate,
      MakeRank make);
  // Waits for the steps in flight.
  ~TensorParallelRunner() override;

  int pipeline_depth() const override { return runners_.front()->pipeline_depth(); }
  absl::Status Submit(const StepPlan& plan) override;
  absl::StatusOr<StepResult> Wait() override;
  // On all ranks or, if all refuse it, on none.
  absl::Status SetRotation(const Rotation& rotation) override;

  int ranks() const { return team_.ranks(); }

 private:
  TensorParallelRunner(MeetingPtr meeting, std::unique_ptr<CollectiveGroup> group,
                       ParameterGate* gate);

  absl::Status MakeRunners(MakeRank make);
  // Calls every rank's runner, on its thread. OK, or the error if all failed, as they do alike; if
  // only some did, no rank goes on.
  absl::Status OnAll(absl::FunctionRef<absl::Status(ModelRunner& runner)> call,
                     absl::string_view what);
  // What ended all ranks, or else the first error of one.
  absl::Status FirstError(const std::vector<absl::Status>& statuses) const;

  const MeetingPtr meeting_;
  const std::unique_ptr<CollectiveGroup> group_;
  ParameterGate* const gate_;
  LockstepGate lockstep_;
  RankTeam team_;
  std::vector<std::unique_ptr<ModelRunner>> runners_;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_TENSOR_PARALLEL_RUNNER_H_
