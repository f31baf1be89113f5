// Attention of a layer: from the product's queries, keys and values to the attention output.
// Rotates, stores keys and values in the KV blocks, and runs the kernel that suits the step.
//
// Functions only enqueue; a step without prefills may be captured into a graph. Threads: one engine
// thread.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_LAYER_ATTENTION_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_LAYER_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "absl/status/status.h"
#include "worker/compute/cuda/attention.h"
#include "worker/compute/cuda/forward_context.h"
#include "worker/compute/cuda/fused_decode.h"
#include "worker/compute/cuda/step_packer.h"

namespace palimpsest::cuda {

class LayerAttention {
 public:
  // `context` must outlive the object.
  explicit LayerAttention(const ForwardContext& context) : context_(context) {}

  // Before the first step: prepares kernels and copies what does not change from step to step into
  // the workspace; blocks.
  absl::Status Prepare(cudaStream_t stream);

  // Once before the layers of a step with prefills. `pinned` is the step's own buffer of
  // kPrefillIntBytes.
  absl::Status Plan(const PackedStep& step, const PrefillShape& prefill, void* pinned,
                    cudaStream_t stream);

  // Reads qkv from `wide`, writes to `places.attention`. `prefill` is the one that was planned.
  absl::Status Run(int32_t layer, const PackedStep& step, const PrefillShape& prefill,
                   cudaStream_t stream);

 private:
  absl::Status UploadConstants(cudaStream_t stream);
  PagedKv KvOf(int32_t layer, const PackedStep& step) const;
  absl::Status RotateAndStore(int32_t layer, const PagedKv& kv, const PackedStep& step,
                              cudaStream_t stream);
  bool FusedDecodes(const PackedStep& step) const {
    return context_.options.fused_decode && step.kernel == DecodeKernel::kCudaCores;
  }
  // Rotates and stores too if `append`.
  absl::Status DecodeFused(int32_t layer, bool append, const Queries& queries,
                           const PackedStep& step, cudaStream_t stream);
  absl::Status Decode(int32_t layer, PagedKv kv, const Queries& queries, const PackedStep& step,
                      cudaStream_t stream);
  absl::Status Prefill(int32_t layer, PagedKv kv, Queries queries, const PackedStep& step,
                       const PrefillShape& prefill, cudaStream_t stream);
  // The layer's heads, over the token that the step says.
  absl::Status SampleHeads(int32_t layer, const PagedKv& kv, const Queries& queries,
                           const PackedStep& step, cudaStream_t stream);
  // A layer's window, or 0.
  int32_t WindowOf(int32_t layer) const;
  PrefillBuffers BuffersOfPrefill(void* pinned, bool windowed) const;

  const ForwardContext& context_;
  // For layers that see everything, and for those with a window.
  PrefillPlan prefill_plans_[2];
  // Of the step that was planned: layers that see everything read keys and values from its rows.
  bool whole_prefill_ = false;
  KvCacheShape cache_;
  KvCacheMap cache_map_;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_LAYER_ATTENTION_H_
