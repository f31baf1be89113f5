// Executes step plans. One implementation per compute back-end (worker/compute/cpu, later cuda).
//
// Threads: all methods are called from the engine thread. Submit starts a step, Wait ends it; at
// most one step is in flight. Between Wait and the next Submit nothing touches parameter or KV
// memory: that is the step boundary at which slabs may be unmapped.
#ifndef PALIMPSEST_WORKER_CORE_MODEL_RUNNER_H_
#define PALIMPSEST_WORKER_CORE_MODEL_RUNNER_H_

#include <cstddef>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "worker/core/step_plan.h"

namespace palimpsest {

// Tells a runner when a stage's parameters may be read. Thread-safe.
class ParameterGate {
 public:
  virtual ~ParameterGate() = default;

  // Blocks until every slab of stage `stage` (index into ImageManifest.stages) holds the image's
  // bytes. Returns an error when that will not happen (activation refused, session lost, deadline):
  // the step is abandoned and may be submitted again later.
  virtual absl::Status AwaitStage(int stage) = 0;
};

// Where a model's memory lies in this process. The addresses never change; what is mapped does.
struct ModelMemory {
  // The parameter region: byte x of it is byte x of the image once restored.
  const std::byte* parameters = nullptr;
  // The KV region: block b starts at kv + b * kv_block_bytes.
  std::byte* kv = nullptr;
  Bytes kv_block_bytes;
};

class ModelRunner {
 public:
  virtual ~ModelRunner() = default;

  // Starts a step. Fails only on a plan that breaks step_plan.h's contract.
  virtual absl::Status Submit(const StepPlan& plan) = 0;

  // Blocks until the submitted step is done. On error no token of the step counts, and KV written
  // by it must be written again before it is read.
  virtual absl::StatusOr<StepResult> Wait() = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_MODEL_RUNNER_H_
