// The small kernel of latent attention, between its products; as in kernels.h.
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

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_LATENT_KERNELS_H_
