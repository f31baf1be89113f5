// Attention of a decode step on Hopper as one kernel: rotary positions, the append to the KV cache,
// attention over each sequence's blocks, and the merge of sequences that several warps shared.
//
// All (sequence, KV head, block) triples of a step are one list, which is cut into equal stretches:
// short and long sequences load all multiprocessors alike, without a plan of the host. The caller
// owns all memory, which must stay valid until the launched work has run. A launch neither blocks
// nor allocates and may be captured into a graph; the lengths of the sequences are read from
// memory, so one graph serves all steps of as many sequences.
//
// Determinism: no sum depends on timing. How a sequence is cut, and so the low bits of its numbers,
// depends on the lengths of all sequences of the step.
//
// Overlap: with `overlap`, blocks start while the kernel before still runs, and read keys and
// values of earlier steps before they wait for it; what this step's kernels write is read after the
// wait.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_FUSED_DECODE_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_FUSED_DECODE_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace palimpsest::cuda {

// The KV cache: blocks of [layer][K, V][token][kv_head][dim] in bf16, `block_bytes` apart.
struct KvCacheShape {
  void* kv = nullptr;
  int64_t block_bytes = 0;
  int32_t blocks = 0;  // ids below this may be read; block 0 must be mapped, whatever is read
  int32_t layers = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t head_dim = 0;
  int32_t block_tokens = 0;
};

// What the copy engine is told about the cache; a CUtensorMap.
struct KvCacheMap {
  alignas(64) unsigned char bytes[128];
};

// Head_dim 64 or 128, up to 8 heads per KV head, blocks of 16 tokens, some hundreds of sequences.
bool HasFusedDecode(int32_t head_dim, int32_t heads_per_kv_head, int32_t block_tokens,
                    int32_t max_sequences);

// Bytes of partial results that a launch on a GPU of this many multiprocessors may need.
size_t FusedDecodePartialBytes(int32_t head_dim, int32_t multiprocessors);

// Once for each runner, with its device current.
cudaError_t PrepareFusedDecode(const KvCacheShape& shape, int32_t max_sequences, KvCacheMap* map);

struct FusedDecode {
  const KvCacheShape* cache = nullptr;
  const KvCacheMap* map = nullptr;
  int32_t layer = 0;
  int32_t sequences = 0;
  int32_t max_sequences = 0;  // as prepared
  int32_t multiprocessors = 0;
  // bf16 [sequences, heads + 2 kv_heads, head_dim]: of each sequence's newest token.
  const void* qkv = nullptr;
  // [sequences, head_dim / 2] cosine and sine; null: queries are rotated and keys and values of the
  // newest tokens lie in the cache.
  const float2* rotations = nullptr;
  const int64_t* kv_slots = nullptr;  // [sequences]: elements from a layer's keys to the token
  // Sequence i has blocks indices[indptr[i] .. indptr[i + 1]), the last with last_block_len[i]
  // tokens, the newest included; indptr[0] is 0.
  const int32_t* indices = nullptr;
  const int32_t* indptr = nullptr;
  const int32_t* last_block_len = nullptr;
  void* output = nullptr;  // bf16 [sequences, heads, head_dim]
  float scale = 0;
  void* partials = nullptr;     // FusedDecodePartialBytes
  int32_t* arrivals = nullptr;  // [max_sequences, kv_heads]; zeros, and left as zeros
  bool overlap = false;
};

cudaError_t LaunchFusedDecode(const FusedDecode& decode, cudaStream_t stream);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_FUSED_DECODE_H_
