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

// A block's first warp takes the latent, then a thread takes eight pairs of the key or of a query
// head.
__device__ void AppendRow(const LatentAppendArgs& args, int64_t row) {
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

__global__ void LatentAppendKernel(LatentAppendArgs args) {
  AwaitPrevious();
  LetNextLaunch();
  AppendRow(args, blockIdx.x);
}

constexpr int kTileOutputs = 16;  // of a warp
constexpr int kWarps = 4;
constexpr int kWarpInputs = 128;  // at most
constexpr int kGroupInputs = 32;  // eight adjacent ones of each of four threads
constexpr int kGroups = kWarpInputs / kGroupInputs;

// sums += A B of 16 outputs, 16 inputs and 8 rows. Which inputs a thread's numbers belong to is the
// same in A and B, so it does not matter.
__device__ inline void Multiply(const uint32_t (&a)[4], const uint32_t (&b)[2], float (&sums)[4]) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The first blocks append a row each. Another block has four tiles of 16 outputs of a head, or with
// kSplit one, of which each warp sums a quarter of the inputs.
template <bool kSplit>
__global__ void __launch_bounds__(kWarps * 32)
    HeadProductKernel(HeadProductArgs args, LatentAppendArgs append) {
  const int block = static_cast<int>(blockIdx.x) - append.rows;
  if (block < 0) {
    AwaitPrevious();
    LetNextLaunch();
    return AppendRow(append, blockIdx.x);
  }
  __shared__ float parts[kSplit ? kWarps : 1][kHeadProductRows][kTileOutputs];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int member = lane / 4, part = lane % 4;
  const int tiles = args.outputs / kTileOutputs;
  const int tile = kSplit ? block : block * kWarps + warp;
  const int head = tile / tiles;
  const int first_output = tile % tiles * kTileOutputs;
  const int warp_inputs = kSplit ? args.inputs / kWarps : args.inputs;
  const int first_input = (kSplit ? warp * warp_inputs : 0) + part * kVector;
  const bool there = head < args.heads;
  uint4 low[kGroups], high[kGroups];
  const auto* weights =
      static_cast<const __nv_bfloat16*>(args.weights) +
      (static_cast<int64_t>(head) * args.outputs + first_output + member) * args.inputs +
      first_input;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (!there || i * kGroupInputs >= warp_inputs) break;
    low[i] = __ldcs(reinterpret_cast<const uint4*>(weights + i * kGroupInputs));
    high[i] = __ldcs(reinterpret_cast<const uint4*>(weights + i * kGroupInputs + 8 * args.inputs));
  }
  AwaitPrevious();
  LetNextLaunch();
  float sums[2][4] = {};
  const auto* input =
      static_cast<const __nv_bfloat16*>(args.input) + head * args.input_step + first_input;
#pragma unroll
  for (int i = 0; i < kGroups; ++i) {
    if (!there || i * kGroupInputs >= warp_inputs) break;
#pragma unroll
    for (int eight = 0; eight < 2; ++eight) {
      const int row = eight * 8 + member;
      uint4 x = {};
      if (row < args.rows) {
        x = *reinterpret_cast<const uint4*>(input + row * args.input_stride + i * kGroupInputs);
      }
      Multiply({low[i].x, high[i].x, low[i].y, high[i].y}, {x.x, x.y}, sums[eight]);
      Multiply({low[i].z, high[i].z, low[i].w, high[i].w}, {x.z, x.w}, sums[eight]);
    }
  }
  auto* output = static_cast<__nv_bfloat16*>(args.output) + head * args.output_step + first_output;
  // sums[eight][2 j + k]: output member + 8 j of row 8 eight + 2 part + k.
#pragma unroll
  for (int s = 0; s < 8; ++s) {
    const int row = s / 4 * 8 + part * 2 + s % 2;
    const int at = member + s % 4 / 2 * 8;
    if constexpr (kSplit) {
      parts[warp][row][at] = sums[s / 4][s % 4];
    } else if (there && row < args.rows) {
      output[row * args.output_stride + at] = __float2bfloat16(sums[s / 4][s % 4]);
    }
  }
  if constexpr (kSplit) {
    __syncthreads();
    for (int i = threadIdx.x; i < args.rows * kTileOutputs; i += kWarps * 32) {
      const int row = i / kTileOutputs, at = i % kTileOutputs;
      float sum = 0;
#pragma unroll
      for (int w = 0; w < kWarps; ++w) sum += parts[w][row][at];
      output[row * args.output_stride + at] = __float2bfloat16(sum);
    }
  }
}

}  // namespace

bool HasHeadProduct(int32_t outputs, int32_t inputs) {
  const int32_t warp_inputs = inputs > kWarpInputs ? inputs / kWarps : inputs;
  return outputs % kTileOutputs == 0 && warp_inputs % kGroupInputs == 0 &&
         warp_inputs <= kWarpInputs && inputs % warp_inputs == 0;
}

cudaError_t HeadProduct(const HeadProductArgs& args, const LatentAppendArgs& append,
                        cudaStream_t stream) {
  const int tiles = args.heads * (args.outputs / kTileOutputs);
  const bool split = args.inputs > kWarpInputs;
  const int blocks = append.rows + (split ? tiles : (tiles + kWarps - 1) / kWarps);
  return LaunchOverlapped(split ? HeadProductKernel<true> : HeadProductKernel<false>, blocks,
                          kWarps * 32, 0, stream, args, append);
}

cudaError_t LatentAppend(const LatentAppendArgs& args, cudaStream_t stream) {
  const int items = 32 + (args.heads + 1) * args.half_dim / kVector;
  return LaunchOverlapped(LatentAppendKernel, args.rows,
                          std::clamp((items + 31) / 32 * 32, 64, kMaxThreads), 0, stream, args);
}

}  // namespace palimpsest::cuda
