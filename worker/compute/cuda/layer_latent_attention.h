// Attention of a layer over cached latents (DeepSeek-V2, arXiv:2405.04434), absorbed: a head's
// query meets the latents through its part of k_up, and what it sums up of them becomes its output
// through its part of v_up. The same for decodes and prompt chunks; nothing is ever unfolded into
// keys and values of heads.
//
// Functions only enqueue and may be captured into a graph. Threads: one engine thread.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_LAYER_LATENT_ATTENTION_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_LAYER_LATENT_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/compute/cuda/forward_context.h"
#include "worker/compute/cuda/gemm.h"
#include "worker/compute/cuda/latent_kernels.h"
#include "worker/compute/cuda/step_packer.h"

namespace palimpsest::cuda {

class LayerLatentAttention {
 public:
  // Chooses the algorithms of the products, as LayerProducts::Create. `context` and `library` must
  // outlive the object.
  static absl::StatusOr<std::unique_ptr<LayerLatentAttention>> Create(const ForwardContext& context,
                                                                      GemmLibrary& library);

  // Reads what LayerProducts::Qkv left, writes to `places.attention`. Stores the latents of
  // the step's tokens.
  absl::Status Run(int32_t layer, const PackedStep& step, cudaStream_t stream);

 private:
  explicit LayerLatentAttention(const ForwardContext& context) : context_(context) {}

  // One product for all heads: of few rows by HeadProduct, else by cuBLASLt.
  struct Product {
    int32_t fused_rows = 0;
    std::unique_ptr<Gemm> gemm;
  };
  absl::StatusOr<Product> MakeProduct(GemmLibrary& library, const GemmShape& shape) const;
  GemmCall CallOf(const MatrixPlacement& weights, size_t input, size_t output, int32_t rows) const;
  HeadProductArgs FusedArgs(const Product& product, const GemmCall& call) const;

  std::byte* LatentsOf(int32_t layer) const;
  LatentAppendArgs AppendArgs(int32_t layer, const PackedStep& step) const;
  // Stores latents, rotates queries, brings what is not rotated into the latents' space.
  absl::Status AbsorbAndStore(int32_t layer, const PackedStep& step, cudaStream_t stream);
  absl::Status Attend(int32_t layer, const PackedStep& step, cudaStream_t stream);
  absl::Status Expand(int32_t layer, int32_t rows, cudaStream_t stream);

  const ForwardContext& context_;
  Product k_up_, v_up_;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_LAYER_LATENT_ATTENTION_H_
