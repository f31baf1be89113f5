// The gate between a runner and parameters that come and go, stage by stage. GrpcMemoryClient moves
// the stages; the runner waits.
//
// Threads: thread-safe. AwaitStage blocks, nothing else does.
#ifndef PALIMPSEST_WORKER_MEMORY_PARAMETER_GATE_H_
#define PALIMPSEST_WORKER_MEMORY_PARAMETER_GATE_H_

#include <functional>
#include <set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/mutex.h"
#include "worker/core/model_runner.h"

namespace palimpsest {

// Where steps wait for stages that rotate. Thread-safe.
class RotatingStages {
 public:
  virtual ~RotatingStages() = default;
  // As ParameterGate's.
  virtual absl::Status Await(int stage) = 0;
  virtual void Release(int stage) = 0;
  // The step in progress is abandoned, and reads nothing any more.
  virtual void Restart() = 0;
  // Await fails from now on. The first status counts.
  virtual void Fail(absl::Status status) = 0;
};

class ParameterGateImpl : public ParameterGate {
 public:
  enum class Stage : uint8_t {
    kAbsent,    // its slabs are not here and none are promised, or they are to be given back
    kComing,    // promised: being mapped or restored
    kQueued,    // every slab holds the image's bytes once the stage's event has passed
    kReady,     // every slab holds the image's bytes
    kRotating,  // RotatingStages, or the runner, brings the bytes in time
  };

  // All stages start absent. A step waits for a coming stage no longer than `patience`. `waited`,
  // if given, is told how long each wait took.
  // `event` gives the event of a stage that is queued on a rank's GPU; without it none ever is.
  // `rotating` outlives the gate; without it rotating stages are the runner's.
  ParameterGateImpl(int stages, absl::Duration patience,
                    std::function<void(absl::Duration)> waited = nullptr,
                    std::function<void*(int, int)> event = nullptr,
                    RotatingStages* rotating = nullptr)
      : patience_(patience),
        waited_(std::move(waited)),
        event_(std::move(event)),
        rotating_(rotating),
        stages_(stages, Stage::kAbsent),
        unproved_(stages, false) {}

  // Unavailable: the stage is absent, or became so while waiting. DeadlineExceeded: it did not come
  // in time. The status given to Fail, once that was called.
  absl::Status AwaitStage(int stage) override;
  absl::Status StageEvents(int stage, absl::Span<void*> events) override;
  absl::Status CheckPassed() override;
  void ReleaseStage(int stage) override;

  // `unproved`: bytes of the stage are on their way or wait for their checksum, whatever will
  // become of the stage.
  void Set(int stage, Stage state, bool unproved = false);
  Stage Get(int stage) const;

  // From now on no stage is ever passed. The first status counts.
  void Fail(absl::Status status);

 private:
  // The state in which the stage is passed, at least `wanted`.
  absl::StatusOr<Stage> Await(int stage, Stage wanted);

  const absl::Duration patience_;
  const std::function<void(absl::Duration)> waited_;
  const std::function<void*(int, int)> event_;
  RotatingStages* const rotating_;

  mutable Mutex mu_;
  CondVar changed_;
  std::vector<Stage> stages_ ABSL_GUARDED_BY(mu_);
  std::vector<bool> unproved_ ABSL_GUARDED_BY(mu_);
  // Stages that were passed on the strength of an event.
  std::set<int> passed_ ABSL_GUARDED_BY(mu_);
  absl::Status failure_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_PARAMETER_GATE_H_
