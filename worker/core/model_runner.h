// Executes step plans. One implementation per compute back-end (worker/compute).
//
// Pipeline: Submit starts a step behind those in flight, Wait ends the oldest one. At most
// pipeline_depth() steps are in flight. Steps take effect in the order of their submission: a step
// sees the KV that earlier ones write, and may be given blocks that earlier ones still read. With a
// depth above 1 a plan may continue sequences whose last token is not known yet
// (SequenceChunk::token_from), and Submit does not wait for the steps in flight.
//
// Memory: a runner touches parameter and KV memory only for steps in flight, and of KV memory only
// the blocks in their plans. When none is in flight nothing touches it: that is the boundary at
// which slabs may be unmapped and blocks copied by others. Slabs may be mapped at any time. One
// exception: copies of rotating layers for the next step, which SetRotation ends.
//
// Failure: if Wait returns an error, the steps submitted after that one are void: whatever Wait
// returns for them does not count, and each is waited for before the next Submit. No token of a
// failed or void step counts, and the KV it was to write must be written again before it is read.
//
// Threads: all methods are called from one thread at a time, the engine's.
#ifndef PALIMPSEST_WORKER_CORE_MODEL_RUNNER_H_
#define PALIMPSEST_WORKER_CORE_MODEL_RUNNER_H_

#include <cstddef>
#include <functional>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "common/rotation.h"
#include "worker/core/step_plan.h"

namespace palimpsest {

// Tells a runner when a stage's parameters may be read. Thread-safe.
class ParameterGate {
 public:
  virtual ~ParameterGate() = default;

  // Blocks until every slab of stage `stage` (index into ImageManifest.stages) holds the image's
  // bytes. Returns an error when that will not happen (activation refused, session lost, deadline):
  // the step is abandoned and may be submitted again later; no stage that it let through is read
  // any more then.
  virtual absl::Status AwaitStage(int stage) = 0;

  // The form for runners whose kernels run later than they are submitted: blocks only until every
  // copy into the stage was enqueued, on all GPUs, and gives for each GPU (`events` has one for
  // each rank) the cudaEvent_t that ends the last of its copies, or null if the bytes are there
  // already. The events live until the stage is taken away.
  //
  // Ranks that compute together must go on or give up together, and a stage may close at any time:
  // one thread asks, once for all ranks, before any of them enqueues work of the stage. A rotating
  // stage passes without an event: its bytes are copied by the runner.
  virtual absl::Status StageEvents(int stage, absl::Span<void*> events) {
    for (void*& event : events) event = nullptr;
    return AwaitStage(stage);
  }

  // For those runners, once a step's work has ended on all GPUs and before its tokens are believed,
  // by one thread: whether the stages that StageEvents has let through hold the image's bytes.
  // Their checksums are there by then, so that it waits for microseconds at most. DataLoss: they do
  // not; the process must end.
  virtual absl::Status CheckPassed() { return absl::OkStatus(); }

  // For runners whose kernels have run when they return from them: nothing of the step reads this
  // stage any more. Called behind each stage that AwaitStage let through; a rotating stage's slot
  // is overwritten from then on, with the next stage that it is for.
  virtual void ReleaseStage(int stage) { (void)stage; }
};

// Bytes of the parameter image that follow those of the piece before. A copy reads one piece alone.
struct ImagePiece {
  const std::byte* data = nullptr;
  Bytes size;
};

// Where a model's memory lies in this process: on the host, on its GPU, or on one GPU of several,
// each of which has its own (in the order of the pool's GPUs, which is that of the ranks), with the
// same places mapped at the same time. The addresses never change; what is mapped does.
struct ModelMemory {
  // The parameter region: byte x of it is byte x of the image, or of the rank's part of it, once
  // restored.
  const std::byte* parameters = nullptr;
  // The KV region: block b starts at kv + b * kv_block_bytes.
  std::byte* kv = nullptr;
  Bytes kv_block_bytes;
  // GPU only: memory that is always mapped, behind the KV region in the same address range, so that
  // a block id can name a block in it (the null block).
  std::byte* workspace = nullptr;
  Bytes workspace_bytes;
  // What the workspace is whole pieces of, each an allocation of its own: it can be mapped again.
  Bytes slab_bytes;
  // GPU only: the image, or the rank's part of it, from its first byte on, for copies to the GPU:
  // registered host memory, or memory of a GPU. Empty: layers cannot rotate.
  std::vector<ImagePiece> image;
  // If set, says where the image lies instead, whenever layers begin to rotate: it may move until
  // then. Thread-safe.
  std::function<std::vector<ImagePiece>()> image_now;
};

class ModelRunner {
 public:
  virtual ~ModelRunner() = default;

  // Steps that may be in flight: from 1 to kMaxPipelineDepth; never changes.
  virtual int pipeline_depth() const { return 1; }

  // Starts a step. Fails only on a plan that breaks step_plan.h's contract or if pipeline_depth()
  // steps are in flight; no step has been started then, and those in flight are unharmed. What goes
  // wrong otherwise (a stage that does not come) is reported by Wait.
  virtual absl::Status Submit(const StepPlan& plan) = 0;

  // Blocks until the oldest step in flight is done. Requires that there is one.
  virtual absl::StatusOr<StepResult> Wait() = 0;

  // These stages rotate from the next Submit on: their addresses are mapped for it already. Called
  // while no step is in flight. A runner with kernels that run later copies rotating layers itself,
  // from ModelMemory::image, also between steps; others leave that to the gate. On error every step
  // fails until a later call succeeds.
  //
  // Before the memory of a rotating stage is unmapped, or the runner's memory goes, it is told that
  // none rotates: when it returns, nothing is copied any more.
  virtual absl::Status SetRotation(const Rotation& rotation) {
    (void)rotation;
    return absl::OkStatus();
  }
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_MODEL_RUNNER_H_
