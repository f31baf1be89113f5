// Lets steps of a runner that has one in flight be in flight two at a time, for tests: a thread
// executes them one after the other, while the engine's thread goes on.
#ifndef PALIMPSEST_WORKER_CORE_THREADED_RUNNER_H_
#define PALIMPSEST_WORKER_CORE_THREADED_RUNNER_H_

#include <deque>
#include <optional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "common/mutex.h"
#include "worker/core/model_runner.h"
#include "worker/core/plan_copy.h"

namespace palimpsest {

class ThreadedRunner : public ModelRunner {
 public:
  // `inner` must outlive the object, and is called by its thread only.
  explicit ThreadedRunner(ModelRunner* inner);
  // Requires that no step is in flight.
  ~ThreadedRunner() override;

  int pipeline_depth() const override { return kMaxPipelineDepth; }
  absl::Status Submit(const StepPlan& plan) override;
  absl::StatusOr<StepResult> Wait() override;
  absl::Status SetRotation(const Rotation& rotation) override;

 private:
  struct Flight {
    PlanCopy plan;
    std::optional<absl::StatusOr<StepResult>> result;
  };

  // The oldest step without a result; null if there is none.
  Flight* Next() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Run();

  ModelRunner* const inner_;
  Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::deque<Flight> flights_ ABSL_GUARDED_BY(mutex_);
  std::thread thread_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_THREADED_RUNNER_H_
