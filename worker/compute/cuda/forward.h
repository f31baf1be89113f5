// Enqueues a forward pass: from a step's staging buffer on the GPU to sampled tokens.
//
// All activations and workspaces lie in the worker's workspace memory and are placed once
// (forward_context.h). A layer is LayerProducts around LayerAttention; this class keeps their
// order. Enqueue allocates nothing and may be captured into a graph when the step has decodes only.
// Threads: one engine thread.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_FORWARD_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_FORWARD_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/compute/cuda/attention.h"
#include "worker/compute/cuda/forward_context.h"
#include "worker/compute/cuda/gemm.h"
#include "worker/compute/cuda/layer_attention.h"
#include "worker/compute/cuda/layer_latent_attention.h"
#include "worker/compute/cuda/layer_products.h"
#include "worker/compute/cuda/step_packer.h"
#include "worker/core/model_runner.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest::cuda {

class Forward {
 public:
  // `workspace` is aligned to 256 bytes and holds ForwardPlaces::end bytes. Chooses the algorithms
  // of all products, which overwrites the workspace, and runs every kernel of a decode step once.
  // `parameters` is not read. Steps will be those of `packer`, with up to `tiles` decode tiles.
  static absl::StatusOr<std::unique_ptr<Forward>> Create(
      const ModelConfig& config, const ImageLayout& layout, const ModelMemory& memory,
      std::byte* workspace, const StepPacker& packer, int32_t tiles, const ForwardOptions& options,
      cudaStream_t stream);

  // Called before the first kernel that reads a stage is enqueued; an error ends Enqueue with it.
  using StageGate = absl::FunctionRef<absl::Status(int stage)>;

  // `prefill` describes the prefills on the host; ignored if the step has none. `pinned` is the
  // step's own buffer of kPrefillIntBytes.
  absl::Status Enqueue(const PackedStep& step, const PrefillShape& prefill, void* pinned,
                       StageGate gate, cudaStream_t stream);

  // Of the next Enqueue: recorded before the sampling. Null: nothing is.
  void TimeSampling(cudaEvent_t begins) { sampling_begins_ = begins; }

  std::byte* staging() const { return context_.At<std::byte>(context_.places.staging); }
  const std::byte* results() const { return context_.At<std::byte>(context_.places.results); }
  const float* logits() const { return context_.At<float>(context_.places.logits); }
  const std::vector<DecodeKernel>& decode_kernels() const {
    return context_.options.decode_kernels;
  }
  const GemmLibrary& gemms() const { return products_->gemms(); }

 private:
  explicit Forward(ForwardContext context);

  absl::Status WarmUp(const StepPacker& packer, cudaStream_t stream);
  absl::Status EmbedTokens(const PackedStep& step, cudaStream_t stream);
  absl::Status FinishEmbeddings(const PackedStep& step, cudaStream_t stream);
  absl::Status Layer(int32_t layer, const PackedStep& step, const PrefillShape& prefill,
                     StageGate gate, cudaStream_t stream);
  absl::StatusOr<ActivationRows> RowsAfterAttention(int32_t layer, const PackedStep& step,
                                                    cudaStream_t stream);
  absl::Status Head(const PackedStep& step, StageGate gate, cudaStream_t stream);
  absl::Status SampleTokens(const PackedStep& step, cudaStream_t stream);
  // Whether only the rows that are sampled go through the last layer's MLP.
  bool Compacts(const PackedStep& step) const {
    return step.counts.prefills > 0 && step.counts.samples < step.counts.rows;
  }

  ForwardContext context_;
  LayerAttention attention_;
  std::unique_ptr<LayerProducts> products_;
  std::unique_ptr<LayerLatentAttention> latent_attention_;  // null without latent attention
  cudaEvent_t sampling_begins_ = nullptr;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_FORWARD_H_
