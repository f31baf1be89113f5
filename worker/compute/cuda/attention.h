// Attention over paged KV by FlashInfer's kernels, behind plain structs: no FlashInfer header, no
// exception and no template leaves these units.
//
// Blocks are page-major, [layer][K, V][token][kv_head][dim]: `PagedKv` points at one layer inside
// block 0, and blocks are `page_stride` elements apart. Every pointer is to device memory unless
// it says otherwise. Functions only enqueue on `stream`; they may be captured into a graph.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_ATTENTION_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

#include "worker/compute/cuda/decode_kernel.h"

namespace palimpsest::cuda {

// What went wrong; the text is valid until the thread's next call.
struct AttentionError {
  cudaError_t code = cudaSuccess;
  const char* message = nullptr;  // set if FlashInfer refused the call

  bool ok() const { return code == cudaSuccess && message == nullptr; }
};

// One layer's keys and values of `sequences` sequences. Sequence i has the blocks
// indices[indptr[i] .. indptr[i + 1]), of which the last holds last_block_len[i] tokens.
struct PagedKv {
  void* keys = nullptr;  // bf16 or e4m3
  void* values = nullptr;
  bool e4m3 = false;
  int64_t page_stride = 0;
  int32_t block_tokens = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t sequences = 0;
  int32_t* indices = nullptr;
  int32_t* indptr = nullptr;
  int32_t* last_block_len = nullptr;
};

struct Queries {
  void* query = nullptr;  // bf16, row r at query + r * query_stride elements, heads adjacent
  int64_t query_stride = 0;
  void* output = nullptr;  // bf16 [rows, heads * head_dim]
  int32_t heads = 0;
  float scale = 0;
  float soft_cap = 0;  // c > 0: scaled scores become c tanh(score / c)
};

// One query row per sequence, which sees all of its tokens. The work was cut by PlanDecode
// (decode_plan.h): `tiles` thread blocks per KV head are launched, those without valid_tiles do
// nothing.
struct DecodeWork {
  int32_t tiles = 0;
  int32_t* tile_sequence = nullptr;
  int32_t* tile_chunk = nullptr;
  int32_t* first_tile = nullptr;  // [sequences + 1]
  int32_t* chunk_tokens = nullptr;
  bool* valid_tiles = nullptr;
  // Partial results [tiles, heads, head_dim] and [tiles, heads]; null if no sequence is split.
  void* partial_output = nullptr;
  float* partial_lse = nullptr;
  // For kTensorCores: 0, 1, 2 ... [sequences + 1], and zeros [tiles].
  int32_t* counting = nullptr;
  int32_t* zeros = nullptr;
  int32_t window = 0;  // kMasked: as in PrefillShape
};

// Whether DecodeAttention has a kernel for bf16. Head_dim 64 or 128, kMasked also 256; kCudaCores:
// 1, 2, 3, 4, 6, 8 or 16 heads per KV head, the others: up to 16.
bool HasDecodeKernel(DecodeKernel kernel, int32_t head_dim, int32_t heads_per_kv_head);

// With keys and values in e4m3: kMasked alone, head_dim 64 or 128, no soft cap.
AttentionError DecodeAttention(DecodeKernel kernel, const Queries& queries, const PagedKv& kv,
                               const DecodeWork& work, bool overlap_launch, cudaStream_t stream);

// Buffers of a prefill plan: `pinned` (host) and `ints` hold `int_bytes` each, `floats` holds
// `float_bytes`. `pinned` must stay unchanged until the copy that PlanPrefill enqueues is done.
struct PrefillBuffers {
  void* pinned = nullptr;
  void* ints = nullptr;
  size_t int_bytes = 0;
  void* floats = nullptr;
  size_t float_bytes = 0;
};

// Host arrays that describe the sequences of a prefill; [sequences + 1], [sequences + 1] and
// [sequences].
struct PrefillShape {
  int32_t* row_indptr = nullptr;
  int32_t* block_indptr = nullptr;
  int32_t* kv_tokens = nullptr;
  int32_t rows = 0;
  int32_t sequences = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_tokens = 0;
  int32_t window = 0;  // a token sees itself and the window - 1 before it; 0: all
};

// A plan, to be passed to RunPrefill for each layer of the step.
struct PrefillPlan {
  static constexpr size_t kBytes = 256;
  alignas(16) unsigned char bytes[kBytes];
  bool hopper = false;
};

// Any number of query rows per sequence, causal: row j of n is at position kv_tokens - n + j.
// `hopper` selects the kernels written for sm_90a, which take neither window nor soft cap. Head_dim
// 64 or 128; without `hopper` also 256. A soft cap needs head_dim 128 or 256. With keys and values
// in e4m3: without `hopper`, head_dim 64 or 128, no soft cap.
AttentionError PlanPrefill(const PrefillShape& shape, bool hopper, const PrefillBuffers& buffers,
                           PrefillPlan& plan, cudaStream_t stream);
AttentionError RunPrefill(const PrefillPlan& plan, const PrefillShape& shape,
                          const Queries& queries, const PagedKv& kv, int32_t* row_indptr,
                          const PrefillBuffers& buffers, cudaStream_t stream);

namespace internal {

// One per unit; attention.cc picks.
template <int kHeadDim>
AttentionError Decode(const Queries& queries, const PagedKv& kv, const DecodeWork& work,
                      bool overlap_launch, cudaStream_t stream);
template <int kHeadDim>
AttentionError DecodeFa2(const Queries& queries, const PagedKv& kv, const DecodeWork& work,
                         bool overlap_launch, cudaStream_t stream);
template <int kHeadDim>
AttentionError DecodeMasked(const Queries& queries, const PagedKv& kv, const DecodeWork& work,
                            bool overlap_launch, cudaStream_t stream);
template <int kHeadDim>
AttentionError PlanFa2(const PrefillShape& shape, const PrefillBuffers& buffers, PrefillPlan& plan,
                       cudaStream_t stream);
template <int kHeadDim>
AttentionError RunFa2(const PrefillPlan& plan, const PrefillShape& shape, const Queries& queries,
                      const PagedKv& kv, int32_t* row_indptr, const PrefillBuffers& buffers,
                      cudaStream_t stream);
template <int kHeadDim>
AttentionError RunCapped(const PrefillPlan& plan, const PrefillShape& shape, const Queries& queries,
                         const PagedKv& kv, int32_t* row_indptr, const PrefillBuffers& buffers,
                         cudaStream_t stream);
template <int kHeadDim>
AttentionError RunFp8(const PrefillPlan& plan, const PrefillShape& shape, const Queries& queries,
                      const PagedKv& kv, int32_t* row_indptr, const PrefillBuffers& buffers,
                      cudaStream_t stream);
template <int kHeadDim>
AttentionError DecodeFp8(const Queries& queries, const PagedKv& kv, const DecodeWork& work,
                         bool overlap_launch, cudaStream_t stream);
template <int kHeadDim>
AttentionError PlanFa3(const PrefillShape& shape, const PrefillBuffers& buffers, PrefillPlan& plan,
                       cudaStream_t stream);
template <int kHeadDim>
AttentionError RunFa3(const PrefillPlan& plan, const PrefillShape& shape, const Queries& queries,
                      const PagedKv& kv, int32_t* row_indptr, const PrefillBuffers& buffers,
                      cudaStream_t stream);

}  // namespace internal
}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_ATTENTION_H_
