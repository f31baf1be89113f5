// What the parts of a forward pass share: the model, where its tensors and activations lie, and the
// options. Places in the workspace are offsets, so that they can be told before there is memory.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_FORWARD_CONTEXT_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_FORWARD_CONTEXT_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "common/bytes.h"
#include "worker/compute/cuda/attention.h"
#include "worker/compute/cuda/collective.h"
#include "worker/core/model_runner.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest::cuda {

// What cuBLASLt recommends for Hopper.
inline constexpr size_t kGemmWorkspaceBytes = size_t{32} << 20;
inline constexpr size_t kPrefillIntBytes = size_t{8} << 20;
inline constexpr size_t kPrefillFloatBytes = size_t{64} << 20;

struct ForwardOptions {
  int32_t block_tokens = 0;
  int32_t max_rows = 0;
  int32_t max_sequences = 0;
  size_t staging_bytes = 0;
  bool hopper = false;
  int32_t null_block = 0;            // what the warm-up writes to
  std::vector<int32_t> decode_rows;  // sizes of the decode graphs, ascending
  std::string gemm_cache_file;
  // Kernels for decodes that are loaded.
  std::vector<DecodeKernel> decode_kernels;
  // Of a token that heads are sampled over; steps say which one that is.
  int32_t sampled_recent_tokens = 0;
  // DecodeKernel::kCudaCores stands for the kernel of fused_decode.h; needs `hopper`.
  bool fused_decode = false;
  int32_t multiprocessors = 0;
  // With latent attention: LatentPartialRows of the GPU.
  int64_t latent_partial_rows = 0;
  // Steps of up to this many rows use the fused products of skinny_gemm.h; needs `hopper`.
  int32_t max_fused_rows = 0;
  bool overlap_launches = true;
  // Of a rank of a tensor-parallel model; null: the model is whole.
  Collective* collective = nullptr;
};

// What a step leaves for the host, in one piece; sizes are those of the largest step.
struct ResultLayout {
  size_t waited = 0;        // uint64: nanoseconds that steps so far waited for rotating layers
  size_t tokens = 0;        // int32 [samples]
  size_t logprobs = 0;      // float [samples]
  size_t top_tokens = 0;    // int32 [samples, kMaxTop]
  size_t top_logprobs = 0;  // float [samples, kMaxTop]
  size_t bytes = 0;

  static ResultLayout For(int32_t samples);
};

// Where everything lies in the workspace, as offsets from its first usable byte.
struct ForwardPlaces {
  size_t staging, waiting, input_tokens, rotations, frequencies, counting, zeros, arrivals,
      residual, normalized, wide, compact, sampled_hidden, logits, logit_parts, results,
      partial_output, partial_lse, fused_partials, prefill_ints, prefill_floats, gemm, branch,
      head_sample, end;
  // Inside `wide`: attention's output behind qkv, the activation's behind gate and up. With latent
  // attention what is between: queries, unless they are in qkv, and queries in the latents' space.
  size_t queries, absorbed, attention, activated;

  static ForwardPlaces For(const ModelConfig& config, const ForwardOptions& options, int32_t tiles);
};

Bytes LargestMatrix(const ModelConfig& config);

// Numbers of a row of LayerPlacement::qkv's product.
int32_t QkvSize(const ModelConfig& config);

absl::Status AttentionStatus(const AttentionError& error, const char* what);

// The rows of a step that a part works on, as offsets in the workspace.
struct ActivationRows {
  size_t attention;
  size_t residual;
  int32_t count;
};

struct ForwardContext {
  ModelConfig config;
  ImageLayout layout;
  ModelMemory memory;
  std::byte* workspace = nullptr;
  ForwardPlaces places = {};
  ForwardOptions options;
  // While parameters are not there yet: addresses of the largest matrix, which stand in for every
  // tensor. Behind them is the workspace's memory, over and over: they are only read.
  const std::byte* stand_in = nullptr;

  int32_t qkv_size() const { return QkvSize(config); }
  int32_t attention_size() const { return config.num_heads * config.value_dim(); }
  // From one row of ForwardPlaces::queries to the next.
  int32_t query_stride() const {
    return places.queries == places.wide ? qkv_size() : config.num_heads * config.head_dim;
  }
  // Whether products add to the residual stream here; other ranks' results are summed with it.
  bool keeps_residual() const {
    return options.collective == nullptr || options.collective->rank() == 0;
  }

  template <typename T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(workspace + offset);
  }
  template <typename T>
  T* Staged(size_t offset) const {
    return reinterpret_cast<T*>(workspace + places.staging + offset);
  }
  const void* Tensor(Bytes offset) const {
    return stand_in != nullptr ? stand_in : memory.parameters + offset.count();
  }
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_FORWARD_CONTEXT_H_
