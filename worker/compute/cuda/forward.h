// Enqueues a Llama-family forward pass: from a step's staging buffer on the GPU to sampled tokens.
//
// All activations and workspaces lie in the worker's workspace memory and are placed once.
// Enqueue allocates nothing and may be captured into a graph when the step has decodes only.
// Threads: one engine thread.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_FORWARD_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_FORWARD_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "worker/compute/cuda/attention.h"
#include "worker/compute/cuda/gemm.h"
#include "worker/compute/cuda/step_packer.h"
#include "worker/core/model_runner.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest::cuda {

// What a step leaves for the host, in one piece; sizes are those of the largest step.
struct ResultLayout {
  size_t tokens = 0;        // int32 [samples]
  size_t logprobs = 0;      // float [samples]
  size_t top_tokens = 0;    // int32 [samples, kMaxTop]
  size_t top_logprobs = 0;  // float [samples, kMaxTop]
  size_t bytes = 0;

  static ResultLayout For(int32_t samples);
};

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
  // Steps of up to this many rows use the fused products of skinny_gemm.h; needs `hopper`.
  int32_t max_fused_rows = 0;
  bool overlap_launches = true;
};

class Forward {
 public:
  // Where everything lies in the workspace, as offsets from its first usable byte.
  struct Places {
    size_t staging, input_tokens, rotations, frequencies, counting, zeros, residual, normalized,
        wide, compact, sampled_hidden, logits, results, partial_output, partial_lse, prefill_ints,
        prefill_floats, gemm, end;
  };
  static Places Place(const ModelConfig& config, const ForwardOptions& options, int32_t tiles);

  // `workspace` is aligned to 256 bytes and holds Place().end bytes. Chooses the algorithms of all
  // products, which overwrites the workspace, and runs every kernel of a decode step once.
  // `parameters` is not read.
  static absl::StatusOr<std::unique_ptr<Forward>> Create(
      const ModelConfig& config, const ImageLayout& layout, const ModelMemory& memory,
      std::byte* workspace, int32_t tiles, const ForwardOptions& options, cudaStream_t stream);

  // Called before the first kernel that reads a stage is enqueued; an error ends Enqueue with it.
  using StageGate = absl::FunctionRef<absl::Status(int stage)>;

  // `prefill` describes the prefills on the host; ignored if the step has none. `pinned` is the
  // step's own buffer of kPrefillIntBytes.
  absl::Status Enqueue(const PackedStep& step, const PrefillShape& prefill, void* pinned,
                       StageGate gate, cudaStream_t stream);

  std::byte* staging() const { return At<std::byte>(places_.staging); }
  const std::byte* results() const { return At<std::byte>(places_.results); }
  const float* logits() const { return At<float>(places_.logits); }
  const GemmLibrary& gemms() const { return *library_; }

  static constexpr size_t kPrefillIntBytes = size_t{8} << 20;

 private:
  struct Products {
    std::unique_ptr<Gemm> qkv, o, gate_up, down, head;
  };

  Forward(const ModelConfig& config, const ImageLayout& layout, const ModelMemory& memory,
          std::byte* workspace, const Places& places, const ForwardOptions& options);

  absl::Status MakeProducts(cudaStream_t stream);
  absl::Status UploadConstants(cudaStream_t stream);
  absl::Status WarmUp(int32_t tiles, cudaStream_t stream);

  // The rows that what follows attention works on, as offsets in the workspace.
  struct Rows {
    size_t attention;
    size_t residual;
    int32_t count;
  };

  absl::Status Layer(int32_t layer, const PackedStep& step, const PrefillShape& prefill,
                     cudaStream_t stream);
  absl::Status Qkv(const LayerPlacement& at, int32_t rows, cudaStream_t stream);
  absl::StatusOr<Rows> RowsAfterAttention(int32_t layer, const PackedStep& step,
                                          cudaStream_t stream);
  absl::Status Mlp(const LayerPlacement& at, const Rows& rows, cudaStream_t stream);
  absl::Status Attention(int32_t layer, const PackedStep& step, const PrefillShape& prefill,
                         cudaStream_t stream);
  absl::Status Head(const PackedStep& step, StageGate gate, cudaStream_t stream);
  absl::Status Normalize(const VectorPlacement& weight, size_t input, const int32_t* rows,
                         int32_t count, size_t output, cudaStream_t stream);
  absl::Status Multiply(Gemm& product, const MatrixPlacement& weights, const VectorPlacement& bias,
                        size_t input, size_t output, int32_t rows, cudaStream_t stream);
  struct Fusion {
    const VectorPlacement* norm = nullptr;
    bool gated = false;
    bool residual = false;
    bool float_output = false;
  };
  bool Fused(int32_t rows) const { return rows <= options_.max_fused_rows; }
  absl::Status MultiplyFused(const Fusion& fusion, const MatrixPlacement& weights,
                             const VectorPlacement& bias, size_t input, size_t output, int32_t rows,
                             cudaStream_t stream);
  // Whether only the rows that are sampled go through the last layer's MLP.
  bool Compacts(const PackedStep& step) const {
    return step.counts.prefills > 0 && step.counts.samples < step.counts.rows;
  }
  PrefillBuffers BuffersOfPrefill(void* pinned) const;

  template <typename T>
  T* At(size_t offset) const {
    return reinterpret_cast<T*>(workspace_ + offset);
  }
  template <typename T>
  T* Staged(size_t offset) const {
    return reinterpret_cast<T*>(workspace_ + places_.staging + offset);
  }
  const void* Tensor(Bytes offset) const;

  const ModelConfig config_;
  const ImageLayout layout_;
  const ModelMemory memory_;
  std::byte* const workspace_;
  const Places places_;
  const ForwardOptions options_;
  const int32_t qkv_size_;
  const int32_t attention_size_;
  // Parameters are not there yet: every tensor lies in the workspace.
  bool warming_ = false;
  PrefillPlan prefill_plan_;
  std::unique_ptr<GemmLibrary> library_;
  Products products_;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_FORWARD_H_
