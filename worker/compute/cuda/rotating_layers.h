// The rotating layers of a model on one GPU (common/rotation.h): copies each from the parameter
// image into its slot before it runs, on a stream of its own.
//
// Uses are cyclic, over the end of a step: when a layer has run, the next one that its slot is for
// is copied. At the start of every step the first layer of each slot is there or on its way, after
// steps that were replayed as graphs, enqueued kernel by kernel, or abandoned.
//
// A graph holds the copies of its own step. Those for the next step are enqueued behind it, on the
// copy stream: they wait for an event inside the graph, not for its end, and neither the step's
// tokens nor the next step's first layers wait for them.
//
// A kernel of a rotating layer cannot start before its bytes are there, however early it is
// launched: in front of the layer two kernels of one thread, the second of which waits for the copy
// and for all work before it, measure how long that took.
//
// Threads: one, but for Capture, which has streams and events of its own.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_ROTATING_LAYERS_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_ROTATING_LAYERS_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/rotation.h"
#include "worker/compute/cuda/layer_copies.h"
#include "worker/core/model_runner.h"
#include "worker/model/image_layout.h"

namespace palimpsest::cuda {

// On the GPU, in nanoseconds.
struct WaitClock {
  uint64_t* since = nullptr;  // when the present wait began
  uint64_t* total = nullptr;  // what all waits took
};

class RotatingLayers {
 public:
  // With the GPU current, as in every call. Nothing rotates.
  static absl::StatusOr<std::unique_ptr<RotatingLayers>> Create(const ImageLayout& layout,
                                                                const ModelMemory& memory,
                                                                const WaitClock& clock);
  // Waits for copies, as does Set.
  ~RotatingLayers();

  // What rotates from now on; begins to copy the first layers. No step may be in flight and no
  // Capture in use. Errors are CheckRotation's,
  // and nothing rotates then.
  absl::Status Set(const Rotation& rotation);
  const Rotation& rotation() const { return rotation_; }

  bool Rotates(int stage) const { return IndexOf(stage) >= 0; }
  // Copied in a step.
  Bytes step_bytes() const;

  // A step that is enqueued on `stream` kernel by kernel: around the kernels of each rotating
  // stage, all of them and in order. Nothing happens for other stages.
  absl::Status Begin(int stage, cudaStream_t stream);
  absl::Status End(int stage, cudaStream_t stream);
  // Instead of the rest of a step.
  absl::Status Abandon(cudaStream_t stream);

  // A graph that was captured with a Capture of this rotation has been launched.
  absl::Status GraphLaunched();

  // The same around the kernels of a step that is captured.
  class Capture {
   public:
    ~Capture();
    absl::Status Begin(int stage, cudaStream_t stream);
    absl::Status End(int stage, cudaStream_t stream);

   private:
    friend class RotatingLayers;
    explicit Capture(const RotatingLayers& layers) : layers_(layers) {}

    const RotatingLayers& layers_;
    cudaStream_t copies_ = nullptr;
    cudaEvent_t used_ = nullptr;
    std::array<cudaEvent_t, kMaxSlots> copied_ = {};
  };
  // The object must outlive it.
  absl::StatusOr<std::unique_ptr<Capture>> NewCapture() const;

 private:
  RotatingLayers(const ImageLayout& layout, const ModelMemory& memory, const WaitClock& clock)
      : layout_(layout), memory_(memory), clock_(clock) {}

  int32_t count() const { return static_cast<int32_t>(rotation_.stages.size()); }
  // Number of a stage among the rotating ones; negative: it does not rotate.
  int32_t IndexOf(int stage) const;
  int32_t SlotOf(int32_t index) const { return index % rotation_.slots; }
  // Who has the slot next, maybe in the next step.
  int32_t Next(int32_t index) const;
  // Whether that is in the next step.
  bool IsLast(int32_t index) const { return index + rotation_.slots >= count(); }
  absl::Status Copy(int32_t index, cudaStream_t stream) const;
  // Enqueues the copy on the copy stream, unless its bytes are in the slot already.
  absl::Status CopyToSlot(int32_t index);
  // Has `stream` wait for a copy, and times it.
  absl::Status Await(cudaEvent_t copied, unsigned flags, cudaStream_t stream) const;

  const ImageLayout layout_;
  const ModelMemory memory_;
  const WaitClock clock_;
  Rotation rotation_;
  std::vector<std::vector<LayerCopy>> layer_copies_;  // by index
  cudaStream_t copies_ = nullptr;
  cudaEvent_t used_ = nullptr;
  // By slot. The layer that a step runs first is there; the last one has run, recorded by graphs.
  std::array<cudaEvent_t, kMaxSlots> copied_ = {};
  std::array<cudaEvent_t, kMaxSlots> last_used_ = {};
  // By slot: who was copied there last.
  std::array<int32_t, kMaxSlots> holds_ = {};
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_ROTATING_LAYERS_H_
