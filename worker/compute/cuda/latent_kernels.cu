#include <algorithm>

#include "worker/compute/cuda/device_util.cuh"
#include "worker/compute/cuda/latent_kernels.h"

namespace palimpsest::cuda {
namespace {

constexpr int kVector = 8;
constexpr int kMaxThreads = 512;
constexpr int kNormVectors = 4;  // of each lane, at most

// One warp.
__device__ void NormalizeLatent(const LatentAppendArgs& args, const Vector8* from, Vector8* to) {
  const int vectors = args.rank / kVector;
  Vector8 held[kNormVectors];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int at = threadIdx.x + i * 32;
    if (at >= vectors) break;
    held[i] = from[at];
    float values[8];
    held[i].Unpack(values);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += values[j] * values[j];
  }
  const float scale = rsqrtf(WarpSum(sum) / static_cast<float>(args.rank) + args.epsilon);
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int at = threadIdx.x + i * 32;
    if (at >= vectors) break;
    float values[8], weights[8];
    held[i].Unpack(values);
    static_cast<const Vector8*>(args.norm_weight)[at].Unpack(weights);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] *= scale * weights[j];
    to[at] = Vector8::Pack(values);
  }
}

// One block per row: its first warp takes the latent, then a thread takes eight pairs of the key or
// of a query head.
__global__ void LatentAppendKernel(LatentAppendArgs args) {
  AwaitPrevious();
  LetNextLaunch();
  const int64_t row = blockIdx.x;
  const auto* down = static_cast<const Vector8*>(args.down) + row * (args.down_stride / kVector);
  auto* queries = static_cast<Vector8*>(args.queries) + row * (args.query_stride / kVector);
  auto* latent = static_cast<Vector8*>(args.latents) + args.kv_slots[row] / kVector;
  const int rank = args.rank / kVector;
  const int per_head = args.half_dim / kVector;
  if (threadIdx.x < 32) NormalizeLatent(args, down, latent);
  // From the last thread on: the first warp has had its share.
  for (int i = blockDim.x - 1 - threadIdx.x; i < (args.heads + 1) * per_head; i += blockDim.x) {
    const int head = i / per_head;
    const int part = i % per_head;
    const bool key = head == args.heads;
    Vector8* const query = queries + (head + 1) * (args.head_dim / kVector) - 2 * per_head + part;
    const Vector8* const from = key ? down + rank + part : query;
    float low[8], high[8];
    from[0].Unpack(low);
    from[per_head].Unpack(high);
    const float2* rotation = args.rotations + row * args.half_dim + part * kVector;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 r = rotation[j];
      const float rotated_low = low[j] * r.x - high[j] * r.y;
      high[j] = high[j] * r.x + low[j] * r.y;
      low[j] = rotated_low;
    }
    Vector8* const to = key ? latent + rank + part : query;
    to[0] = Vector8::Pack(low);
    to[per_head] = Vector8::Pack(high);
  }
}

}  // namespace

cudaError_t LatentAppend(const LatentAppendArgs& args, cudaStream_t stream) {
  const int items = 32 + (args.heads + 1) * args.half_dim / kVector;
  return LaunchOverlapped(LatentAppendKernel, args.rows,
                          std::clamp((items + 31) / 32 * 32, 64, kMaxThreads), 0, stream, args);
}

}  // namespace palimpsest::cuda
