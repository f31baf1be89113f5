// Enqueues a forward pass: from a step's staging buffer on the GPU to sampled tokens.
//
// All activations and workspaces lie in the worker's workspace memory and are placed once
// (forward_context.h). A layer is LayerProducts around LayerAttention; this class keeps their
// order. Enqueue allocates nothing and may be captured into a graph when the step has decodes only.
// Threads: one engine thread; beside it another one may capture, if the model has one rank.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_FORWARD_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_FORWARD_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/compute/cuda/attention.h"
#include "worker/compute/cuda/forward_context.h"
#include "worker/compute/cuda/gemm.h"
#include "worker/compute/cuda/layer_attention.h"
#include "worker/compute/cuda/layer_latent_attention.h"
#include "worker/compute/cuda/layer_products.h"
#include "worker/compute/cuda/rotating_layers.h"
#include "worker/compute/cuda/step_packer.h"
#include "worker/core/model_runner.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest::cuda {

// Called while a pass is enqueued, on its thread and at its place in the stream. An error ends
// Enqueue with it.
class ForwardHooks {
 public:
  virtual ~ForwardHooks() = default;

  // Before the first kernel that reads a stage's parameters; maybe twice, if it does not rotate.
  virtual absl::Status BeginStage(int /*stage*/) { return absl::OkStatus(); }
  // Behind the last one.
  virtual absl::Status EndStage(int /*stage*/) { return absl::OkStatus(); }
  // Whether a stage begins only where the one before it has ended.
  virtual bool Rotates(int /*stage*/) const { return false; }
  virtual absl::Status BeginSampling() { return absl::OkStatus(); }
};

class Forward {
 public:
  // `workspace` is aligned to 256 bytes and holds ForwardPlaces::end bytes. Chooses the algorithms
  // of all products, which overwrites the workspace, and runs every kernel of a decode step once.
  // `parameters` is not read: the workspace's slabs are mapped again to stand in for them. Steps
  // will be those of `packer`, with up to `tiles` decode tiles.
  static absl::StatusOr<std::unique_ptr<Forward>> Create(
      const ModelConfig& config, const ImageLayout& layout, const ModelMemory& memory,
      std::byte* workspace, const StepPacker& packer, int32_t tiles, const ForwardOptions& options,
      cudaStream_t stream);

  // `prefill` describes the prefills on the host; ignored if the step has none. `pinned` is the
  // step's own buffer of kPrefillIntBytes.
  absl::Status Enqueue(const PackedStep& step, const PrefillShape& prefill, void* pinned,
                       ForwardHooks& hooks, cudaStream_t stream);

  const float* head_sample() const { return context_.At<float>(context_.places.head_sample); }
  std::byte* staging() const { return context_.At<std::byte>(context_.places.staging); }
  const std::byte* results() const { return context_.At<std::byte>(context_.places.results); }
  // Its total goes with the results.
  WaitClock wait_clock() const;
  const float* logits() const { return context_.At<float>(context_.places.logits); }
  const std::vector<DecodeKernel>& decode_kernels() const {
    return context_.options.decode_kernels;
  }
  const GemmLibrary& gemms() const { return products_->gemms(); }

 private:
  explicit Forward(ForwardContext context);

  // Needs the stand-in, and leaves work in the stream that reads it.
  absl::Status Prepare(const StepPacker& packer, cudaStream_t stream);
  absl::Status WarmUp(const StepPacker& packer, cudaStream_t stream);
  absl::Status EmbedTokens(const PackedStep& step, cudaStream_t stream);
  absl::Status FinishEmbeddings(const PackedStep& step, cudaStream_t stream);
  absl::Status Layer(int32_t layer, const PackedStep& step, const PrefillShape& prefill,
                     ForwardHooks& hooks, cudaStream_t stream);
  absl::StatusOr<ActivationRows> RowsAfterAttention(int32_t layer, const PackedStep& step,
                                                    cudaStream_t stream);
  absl::Status Head(const PackedStep& step, ForwardHooks& hooks, cudaStream_t stream);
  absl::Status SampleTokens(const PackedStep& step, cudaStream_t stream);
  // Whether only the rows that are sampled go through the last layer's MLP.
  bool Compacts(const PackedStep& step) const {
    return step.counts.prefills > 0 && step.counts.samples < step.counts.rows;
  }

  ForwardContext context_;
  LayerAttention attention_;
  std::unique_ptr<LayerProducts> products_;
  std::unique_ptr<LayerLatentAttention> latent_attention_;  // null without latent attention
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_FORWARD_H_
