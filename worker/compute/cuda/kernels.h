// The small kernels between matrix products and attention. Pointers are to device memory, numbers
// are bfloat16 unless the name says otherwise, matrices are row-major without padding, and rows
// have a multiple of 8 elements and are aligned to 16 bytes. Functions only enqueue on `stream`;
// they may be captured into a graph. Kernels wait for the one before them on the device
// (programmatic dependent launch), so that their launch overlaps its end.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_KERNELS_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>

namespace palimpsest::cuda {

// Whether kernels of this library may start while the ones before them drain, which is the default;
// tools that serialise kernels may want it off. Of the whole process, before any launch.
void SetLaunchOverlap(bool overlap);

// Copies from pinned host memory, in whole vectors of 16 bytes, without a copy engine: one would
// finish what it copies for other streams first.
cudaError_t CopyFromHost(const void* from, void* to, size_t bytes, cudaStream_t stream);

// Around what a stream waits for: adds the nanoseconds between the end of all work before BeginWait
// and the start of EndWait to *total. Neither overlaps anything.
cudaError_t BeginWait(uint64_t* since, cudaStream_t stream);
cudaError_t EndWait(const uint64_t* since, uint64_t* total, cudaStream_t stream);

struct EmbedArgs {
  const int32_t* tokens = nullptr;  // [rows]; -1 - i: the token in sampled[i]
  const int32_t* positions = nullptr;
  const int32_t* sampled = nullptr;
  const float* frequencies = nullptr;  // [half_dim] radians per position
  const void* table = nullptr;         // [vocabulary, hidden]
  int32_t* input_tokens = nullptr;     // out: [rows], the tokens that were looked up
  void* hidden_states = nullptr;       // out: [rows, hidden]
  float2* rotations = nullptr;         // out: [rows, half_dim] cosine and sine
  int32_t rows = 0;
  int32_t hidden = 0;
  int32_t half_dim = 0;
};
cudaError_t Embed(const EmbedArgs& args, cudaStream_t stream);

struct RmsNormArgs {
  const void* input = nullptr;           // [*, size]
  int64_t input_stride = 0;              // from one row of it to the next; 0: they are adjacent
  const void* weight = nullptr;          // [size]
  const int32_t* row_indexes = nullptr;  // rows of `input` to take; null: the first `rows`
  void* output = nullptr;                // [rows, size]
  int32_t rows = 0;
  int32_t size = 0;  // at most 32,768
  // That sum up a row, which matters to its last bits; 0: chosen by the size.
  int32_t threads = 0;
  float epsilon = 0;
};
cudaError_t RmsNorm(const RmsNormArgs& args, cudaStream_t stream);

// Rotates queries and keys by position, in place for queries; keys and values go to the KV blocks.
// With `query_norm` and `key_norm` each head is normed before, as by RmsNorm with its weight plus
// `norm_offset`; half_dim / 8 is a power of two up to 32 then.
struct RopeAppendArgs {
  void* qkv = nullptr;                // [rows, (heads + 2 kv_heads) * 2 * half_dim]
  const float2* rotations = nullptr;  // [rows, half_dim]
  const int64_t* kv_slots = nullptr;  // [rows]: elements from `keys` (or `values`) to the token
  void* keys = nullptr;               // of one layer, in block 0
  void* values = nullptr;
  bool e4m3 = false;  // keys and values are stored as e4m3, saturating, and not as bfloat16
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t kv_heads = 0;
  int32_t half_dim = 0;              // a multiple of 8
  const void* query_norm = nullptr;  // [2 * half_dim], or null
  const void* key_norm = nullptr;
  float norm_epsilon = 0;
  float norm_offset = 0;
  bool keep_keys = false;  // rotate keys in place as well
};
cudaError_t RopeAppend(const RopeAppendArgs& args, cudaStream_t stream);

// output[r, i] = silu(input[r, i]) * input[r, size + i].
cudaError_t SiluMultiply(const void* input, void* output, int32_t rows, int32_t size,
                         cudaStream_t stream);

// output[r] = input[rows[r]].
cudaError_t GatherRows(const void* input, const int32_t* rows, void* output, int32_t count,
                       int32_t size, cudaStream_t stream);

// Fills with numbers, of bfloat16 or e4m3, of the given middle, uniform within `spread`; element i
// depends on seed and i alone.
cudaError_t FillUniform(void* output, int64_t count, float middle, float spread, uint64_t seed,
                        cudaStream_t stream);
cudaError_t FillUniformE4m3(void* output, int64_t count, float middle, float spread, uint64_t seed,
                            cudaStream_t stream);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_KERNELS_H_
