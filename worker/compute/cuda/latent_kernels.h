// The small kernels of latent attention; as in kernels.h.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_LATENT_KERNELS_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_LATENT_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace palimpsest::cuda {

// Of each row: RMS norm of the latent, rotation of the key that all heads share, both to the KV
// block; rotation of the queries in place. Pairs are halves (i, i + half_dim).
struct LatentAppendArgs {
  const void* down = nullptr;         // row r at down + r * down_stride: latent, then the key
  int64_t down_stride = 0;            // a multiple of 8, as is query_stride
  const void* norm_weight = nullptr;  // [rank]
  float epsilon = 0;
  // Row r, head h at queries + r * query_stride + h * head_dim, of which the last 2 * half_dim
  // numbers are rotated.
  void* queries = nullptr;
  int64_t query_stride = 0;
  const float2* rotations = nullptr;  // [rows, half_dim]
  const int64_t* kv_slots = nullptr;  // [rows]: elements from `latents` to the token
  void* latents = nullptr;            // of one layer, in block 0
  int32_t rows = 0;
  int32_t heads = 0;
  int32_t head_dim = 0;
  int32_t rank = 0;      // a multiple of 8, at most 1024
  int32_t half_dim = 0;  // a multiple of 8
};
cudaError_t LatentAppend(const LatentAppendArgs& args, cudaStream_t stream);

// A product with a matrix for each head, for few rows: output[r, h] = weights[h] input[r, h]. Reads
// the weights before the kernel before has ended. A row's numbers do not depend on the others. With
// rows in `append` does LatentAppend's work in the same launch; its queries are written elsewhere
// than where `input` is read.
struct HeadProductArgs {
  const void* weights = nullptr;  // [heads, outputs, inputs]
  const void* input = nullptr;    // row r, head h at input + r * input_stride + h * input_step
  int64_t input_stride = 0;       // multiples of 8
  int64_t input_step = 0;
  void* output = nullptr;  // likewise
  int64_t output_stride = 0;
  int64_t output_step = 0;
  int32_t rows = 0;  // at most kHeadProductRows
  int32_t heads = 0;
  int32_t outputs = 0;
  int32_t inputs = 0;
};
inline constexpr int32_t kHeadProductRows = 16;
// Whether there is a kernel for matrices of this size.
bool HasHeadProduct(int32_t outputs, int32_t inputs);
cudaError_t HeadProduct(const HeadProductArgs& args, const LatentAppendArgs& append,
                        cudaStream_t stream);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_LATENT_KERNELS_H_
