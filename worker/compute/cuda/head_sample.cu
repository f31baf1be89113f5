#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "worker/compute/cuda/device_util.cuh"
#include "worker/compute/cuda/head_sample.h"

namespace palimpsest::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kMostPerLane = kMostSampledHeadDim / 32;

__device__ float ToFloat(__nv_bfloat16 v) { return __bfloat162float(v); }
__device__ float ToFloat(__nv_fp8_e4m3 v) { return static_cast<float>(v); }

// A softmax in the making over some keys, those that are far apart from the others. Numbers of a
// lane are those of its dimensions: lane, lane + 32, ...
struct Parts {
  float largest = -INFINITY;
  float weight[2] = {};  // near, far
  float sum[2][kMostPerLane] = {};

  __device__ void Rescale(float now) {
    const float factor = largest == -INFINITY ? 0.0f : __expf(largest - now);
    for (int far = 0; far < 2; ++far) {
      weight[far] *= factor;
      for (int i = 0; i < kMostPerLane; ++i) sum[far][i] *= factor;
    }
    largest = now;
  }
};

// One KV head. Warps share its keys, and then put together what they have found.
template <typename T>
__global__ void __launch_bounds__(kWarps * 32) HeadSampleKernel(HeadSampleArgs args) {
  __shared__ float largest[kWarps];
  __shared__ float weights[kWarps][2];
  __shared__ float sums[kWarps][2][kMostSampledHeadDim];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = blockIdx.x;
  const int per_lane = args.head_dim / 32;
  const auto* keys = static_cast<const T*>(args.keys);
  const auto* values = static_cast<const T*>(args.values);
  const int64_t token_elements = int64_t{args.kv_heads} * args.head_dim;
  float share = 0, moved = 0, length = 0;
  for (int g = 0; g < args.group; ++g) {
    const auto* query = static_cast<const __nv_bfloat16*>(args.query) +
                        (int64_t{head} * args.group + g) * args.head_dim;
    float q[kMostPerLane] = {};
    for (int i = 0; i < per_lane; ++i) q[i] = ToFloat(query[lane + 32 * i]) * args.scale;
    Parts parts;
    for (int key = warp; key < args.tokens; key += kWarps) {
      const int64_t at = args.blocks[key / args.block_tokens] * args.page_stride +
                         key % args.block_tokens * token_elements + int64_t{head} * args.head_dim;
      float score = 0;
      for (int i = 0; i < per_lane; ++i) score += q[i] * ToFloat(keys[at + lane + 32 * i]);
      score = WarpSum(score);
      if (args.soft_cap > 0) score = args.soft_cap * tanhf(score / args.soft_cap);
      if (score > parts.largest) parts.Rescale(score);
      const float weight = __expf(score - parts.largest);
      const int far = key >= args.far_begin && key < args.far_end;
      parts.weight[far] += weight;
      for (int i = 0; i < per_lane; ++i) {
        parts.sum[far][i] += weight * ToFloat(values[at + lane + 32 * i]);
      }
    }
    if (lane == 0) largest[warp] = parts.largest;
    __syncthreads();
    float most = -INFINITY;
    for (int w = 0; w < kWarps; ++w) most = fmaxf(most, largest[w]);
    parts.Rescale(most);
    if (lane < 2) weights[warp][lane] = parts.weight[lane];
    for (int far = 0; far < 2; ++far) {
      for (int i = 0; i < per_lane; ++i) sums[warp][far][lane + 32 * i] = parts.sum[far][i];
    }
    __syncthreads();
    float weight[2] = {};
    for (int w = 0; w < kWarps; ++w) {
      weight[0] += weights[w][0];
      weight[1] += weights[w][1];
    }
    share += weight[1] / (weight[0] + weight[1]);
    if (warp == 0) {
      for (int i = 0; i < per_lane; ++i) {
        float sum[2] = {};
        for (int w = 0; w < kWarps; ++w) {
          sum[0] += sums[w][0][lane + 32 * i];
          sum[1] += sums[w][1][lane + 32 * i];
        }
        const float with = (sum[0] + sum[1]) / (weight[0] + weight[1]);
        const float without = sum[0] / weight[0];
        moved += (with - without) * (with - without);
        length += with * with;
      }
    }
    __syncthreads();
  }
  if (warp > 0) return;
  moved = WarpSum(moved);
  length = WarpSum(length);
  if (lane > 0) return;
  args.shares[head] = fminf(share / args.group, 1.0f);
  args.effects[head] = moved < length ? sqrtf(moved / length) : moved > 0 ? 1.0f : 0.0f;
}

}  // namespace

cudaError_t SampleHeads(const HeadSampleArgs& args, cudaStream_t stream) {
  if (args.head_dim % 32 != 0 || args.head_dim > kMostSampledHeadDim) return cudaErrorInvalidValue;
  const auto kernel = args.e4m3 ? HeadSampleKernel<__nv_fp8_e4m3> : HeadSampleKernel<__nv_bfloat16>;
  kernel<<<static_cast<unsigned>(args.kv_heads), kWarps * 32, 0, stream>>>(args);
  return cudaGetLastError();
}

}  // namespace palimpsest::cuda
