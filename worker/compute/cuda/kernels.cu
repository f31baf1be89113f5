#include <cuda_fp8.h>

#include <algorithm>
#include <type_traits>

#include "worker/compute/cuda/device_util.cuh"
#include "worker/compute/cuda/kernels.h"

namespace palimpsest::cuda {
namespace {

constexpr int kVector = 8;
constexpr int kMaxThreads = 1024;
constexpr int kNormVectors = 4;  // of each thread, at most
constexpr int kSiluVectors = 2;  // of each thread

int ThreadsFor(int vectors) { return std::clamp((vectors + 31) / 32 * 32, 32, kMaxThreads); }

__global__ void CopyFromHostKernel(const uint4* from, uint4* to, size_t vectors) {
  const size_t stride = static_cast<size_t>(gridDim.x) * blockDim.x;
  for (size_t i = static_cast<size_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < vectors;
       i += stride) {
    to[i] = from[i];
  }
}

__device__ inline uint64_t Nanoseconds() {
  uint64_t now;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now)::"memory");
  return now;
}

__global__ void BeginWaitKernel(uint64_t* since) { *since = Nanoseconds(); }

__global__ void EndWaitKernel(const uint64_t* since, uint64_t* total) {
  const uint64_t now = Nanoseconds();
  if (now > *since) *total += now - *since;
}

__global__ void EmbedKernel(EmbedArgs args) {
  AwaitPrevious();
  const int row = blockIdx.x;
  int token = args.tokens[row];
  if (token < 0) token = args.sampled[-1 - token];
  const auto* from = static_cast<const Vector8*>(args.table) +
                     static_cast<int64_t>(token) * (args.hidden / kVector);
  auto* to = static_cast<Vector8*>(args.hidden_states) +
             static_cast<int64_t>(row) * (args.hidden / kVector);
  for (int i = threadIdx.x; i < args.hidden / kVector; i += blockDim.x) to[i] = from[i];
  const auto position = static_cast<float>(args.positions[row]);
  for (int i = threadIdx.x; i < args.half_dim; i += blockDim.x) {
    float2 rotation;
    sincosf(position * args.frequencies[i], &rotation.y, &rotation.x);
    args.rotations[static_cast<int64_t>(row) * args.half_dim + i] = rotation;
  }
  if (threadIdx.x == 0) args.input_tokens[row] = token;
  LetNextLaunch();
}

__global__ void __launch_bounds__(kMaxThreads) RmsNormKernel(RmsNormArgs args) {
  __shared__ float sums[32];
  const int vectors = args.size / kVector;
  const auto* weight = static_cast<const Vector8*>(args.weight);
  Vector8 weights_held[kNormVectors];
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at < vectors) weights_held[i] = weight[at];
  }
  AwaitPrevious();
  LetNextLaunch();
  const int64_t row = args.row_indexes == nullptr ? blockIdx.x : args.row_indexes[blockIdx.x];
  const int64_t stride = args.input_stride > 0 ? args.input_stride / kVector : vectors;
  const auto* input = static_cast<const Vector8*>(args.input) + row * stride;
  auto* output = static_cast<Vector8*>(args.output) + static_cast<int64_t>(blockIdx.x) * vectors;
  Vector8 held[kNormVectors];
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) break;
    held[i] = input[at];
    float values[8];
    held[i].Unpack(values);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += values[j] * values[j];
  }
  sum = WarpSum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  const int warps = blockDim.x / 32;
  const float total = WarpSum(threadIdx.x % 32 < warps ? sums[threadIdx.x % 32] : 0.0f);
  const float scale = rsqrtf(total / static_cast<float>(args.size) + args.epsilon);
#pragma unroll
  for (int i = 0; i < kNormVectors; ++i) {
    const int at = threadIdx.x + i * blockDim.x;
    if (at >= vectors) break;
    float values[8], weights[8];
    held[i].Unpack(values);
    weights_held[i].Unpack(weights);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] *= scale * weights[j];
    output[at] = Vector8::Pack(values);
  }
}

// Eight numbers of e4m3.
struct alignas(8) E4m3x8 {
  __nv_fp8x4_e4m3 quads[2];

  __device__ static E4m3x8 Pack(const float (&in)[8]) {
    E4m3x8 out;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      out.quads[i] =
          __nv_fp8x4_e4m3(make_float4(in[4 * i], in[4 * i + 1], in[4 * i + 2], in[4 * i + 3]));
    }
    return out;
  }
};

// RMS norm of a head of which `threads` neighbours hold eight pairs each.
__device__ void NormalizeHead(const Vector8* weight, int part, int threads, float epsilon,
                              float offset, float (&low)[8], float (&high)[8]) {
  float sum = 0;
#pragma unroll
  for (int j = 0; j < 8; ++j) sum += low[j] * low[j] + high[j] * high[j];
  const unsigned first = threadIdx.x % 32 & ~(threads - 1);
  const unsigned members = (0xffffffffu >> (32 - threads)) << first;
  for (int distance = threads / 2; distance > 0; distance /= 2) {
    sum += __shfl_xor_sync(members, sum, distance);
  }
  const float scale = rsqrtf(sum / static_cast<float>(threads * 16) + epsilon);
  float low_weights[8], high_weights[8];
  weight[part].Unpack(low_weights);
  weight[threads + part].Unpack(high_weights);
#pragma unroll
  for (int j = 0; j < 8; ++j) {
    low[j] *= scale * (offset + low_weights[j]);
    high[j] *= scale * (offset + high_weights[j]);
  }
}

// One block per row; a thread takes eight pairs of one head, or eight elements of a value. `Kv`
// holds eight numbers as they are stored.
template <bool kNormed, typename Kv>
__global__ void RopeAppendKernel(RopeAppendArgs args) {
  AwaitPrevious();
  LetNextLaunch();
  const int64_t row = blockIdx.x;
  const int per_head = args.half_dim / kVector;
  const int rotated = (args.heads + args.kv_heads) * per_head;
  const int copied = args.kv_heads * 2 * per_head;
  auto* qkv =
      static_cast<Vector8*>(args.qkv) + row * (args.heads + 2 * args.kv_heads) * 2 * per_head;
  const int64_t slot = args.kv_slots[row] / kVector;
  auto* keys = static_cast<Kv*>(args.keys) + slot;
  auto* values = static_cast<Kv*>(args.values) + slot;
  for (int i = threadIdx.x; i < rotated + copied; i += blockDim.x) {
    if (i >= rotated) {
      const int at = i - rotated;
      const Vector8 value = qkv[(args.heads + args.kv_heads) * 2 * per_head + at];
      if constexpr (std::is_same_v<Kv, Vector8>) {
        values[at] = value;
      } else {
        float numbers[8];
        value.Unpack(numbers);
        values[at] = Kv::Pack(numbers);
      }
      continue;
    }
    const int head = i / per_head;
    const int part = i % per_head;
    Vector8* const from = qkv + head * 2 * per_head + part;
    float low[8], high[8];
    from[0].Unpack(low);
    from[per_head].Unpack(high);
    if constexpr (kNormed) {
      const void* weight = head < args.heads ? args.query_norm : args.key_norm;
      NormalizeHead(static_cast<const Vector8*>(weight), part, per_head, args.norm_epsilon,
                    args.norm_offset, low, high);
    }
    const float2* rotation = args.rotations + row * args.half_dim + part * kVector;
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      const float2 r = rotation[j];
      const float rotated_low = low[j] * r.x - high[j] * r.y;
      high[j] = high[j] * r.x + low[j] * r.y;
      low[j] = rotated_low;
    }
    if (head < args.heads || args.keep_keys) {
      from[0] = Vector8::Pack(low);
      from[per_head] = Vector8::Pack(high);
    }
    if (head >= args.heads) {
      Kv* const to = keys + (head - args.heads) * 2 * per_head + part;
      to[0] = Kv::Pack(low);
      to[per_head] = Kv::Pack(high);
    }
  }
}

__global__ void SiluMultiplyKernel(const Vector8* input, Vector8* output, int vectors) {
  AwaitPrevious();
  LetNextLaunch();
  const int64_t row = blockIdx.y;
  const Vector8* const from = input + row * 2 * vectors;
  const int first = blockIdx.x * kSiluVectors * blockDim.x + threadIdx.x;
  Vector8 gates[kSiluVectors], ups[kSiluVectors];
#pragma unroll
  for (int i = 0; i < kSiluVectors; ++i) {
    const int at = first + i * blockDim.x;
    if (at >= vectors) break;
    gates[i] = from[at];
    ups[i] = from[vectors + at];
  }
#pragma unroll
  for (int i = 0; i < kSiluVectors; ++i) {
    const int at = first + i * blockDim.x;
    if (at >= vectors) break;
    float gate[8], up[8];
    gates[i].Unpack(gate);
    ups[i].Unpack(up);
#pragma unroll
    for (int j = 0; j < 8; ++j) gate[j] = gate[j] / (1.0f + __expf(-gate[j])) * up[j];
    output[row * vectors + at] = Vector8::Pack(gate);
  }
}

__global__ void GatherRowsKernel(const Vector8* input, const int32_t* rows, Vector8* output,
                                 int vectors) {
  AwaitPrevious();
  LetNextLaunch();
  const int64_t from = static_cast<int64_t>(rows[blockIdx.x]) * vectors;
  const int64_t to = static_cast<int64_t>(blockIdx.x) * vectors;
  for (int i = threadIdx.x; i < vectors; i += blockDim.x) output[to + i] = input[from + i];
}

// The finaliser of SplitMix64.
__device__ inline uint64_t Mix(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
  return x ^ (x >> 31);
}

template <typename Number>
__global__ void FillUniformKernel(Number* output, int64_t count, float middle, float spread,
                                  uint64_t seed) {
  const int64_t stride = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count;
       i += stride) {
    const uint64_t bits = Mix(seed + 0x9e3779b97f4a7c15ull * static_cast<uint64_t>(i + 1));
    const float unit = static_cast<float>(bits >> 40) * 0x1p-23f - 1.0f;
    output[i] = Number(middle + spread * unit);
  }
}

template <typename Number>
cudaError_t Fill(Number* output, int64_t count, float middle, float spread, uint64_t seed,
                 cudaStream_t stream) {
  const auto blocks = static_cast<unsigned>(std::clamp<int64_t>(count / 1024, 1, 4096));
  FillUniformKernel<<<blocks, 256, 0, stream>>>(output, count, middle, spread, seed);
  return cudaGetLastError();
}

}  // namespace

void SetLaunchOverlap(bool overlap) { launch_overlap = overlap; }

cudaError_t CopyFromHost(const void* from, void* to, size_t bytes, cudaStream_t stream) {
  constexpr size_t kThreads = 256;
  constexpr size_t kMaxBlocks = 16;
  const size_t vectors = (bytes + sizeof(uint4) - 1) / sizeof(uint4);
  const size_t blocks = std::clamp<size_t>((vectors + kThreads - 1) / kThreads, 1, kMaxBlocks);
  CopyFromHostKernel<<<static_cast<unsigned>(blocks), kThreads, 0, stream>>>(
      static_cast<const uint4*>(from), static_cast<uint4*>(to), vectors);
  return cudaGetLastError();
}

cudaError_t BeginWait(uint64_t* since, cudaStream_t stream) {
  BeginWaitKernel<<<1, 1, 0, stream>>>(since);
  return cudaGetLastError();
}

cudaError_t EndWait(const uint64_t* since, uint64_t* total, cudaStream_t stream) {
  EndWaitKernel<<<1, 1, 0, stream>>>(since, total);
  return cudaGetLastError();
}

cudaError_t Embed(const EmbedArgs& args, cudaStream_t stream) {
  return LaunchOverlapped(EmbedKernel, args.rows, ThreadsFor(args.hidden / kVector / 2), 0, stream,
                          args);
}

cudaError_t RmsNorm(const RmsNormArgs& args, cudaStream_t stream) {
  const int threads = args.threads > 0 ? args.threads : ThreadsFor(args.size / kVector);
  return LaunchOverlapped(RmsNormKernel, args.rows, threads, 0, stream, args);
}

cudaError_t RopeAppend(const RopeAppendArgs& args, cudaStream_t stream) {
  const int items = (args.heads + 3 * args.kv_heads) * args.half_dim / kVector;
  const bool normed = args.query_norm != nullptr;
  auto kernel = normed ? RopeAppendKernel<true, Vector8> : RopeAppendKernel<false, Vector8>;
  if (args.e4m3) {
    kernel = normed ? RopeAppendKernel<true, E4m3x8> : RopeAppendKernel<false, E4m3x8>;
  }
  return LaunchOverlapped(kernel, args.rows, std::min(ThreadsFor(items), 512), 0, stream, args);
}

cudaError_t SiluMultiply(const void* input, void* output, int32_t rows, int32_t size,
                         cudaStream_t stream) {
  const int vectors = size / kVector;
  const int threads = std::min(ThreadsFor((vectors + kSiluVectors - 1) / kSiluVectors), 256);
  const int each = threads * kSiluVectors;
  return LaunchOverlapped(SiluMultiplyKernel, dim3((vectors + each - 1) / each, rows), threads, 0,
                          stream, static_cast<const Vector8*>(input), static_cast<Vector8*>(output),
                          vectors);
}

cudaError_t GatherRows(const void* input, const int32_t* rows, void* output, int32_t count,
                       int32_t size, cudaStream_t stream) {
  const int vectors = size / kVector;
  return LaunchOverlapped(GatherRowsKernel, count, ThreadsFor(vectors), 0, stream,
                          static_cast<const Vector8*>(input), rows, static_cast<Vector8*>(output),
                          vectors);
}

cudaError_t FillUniform(void* output, int64_t count, float middle, float spread, uint64_t seed,
                        cudaStream_t stream) {
  return Fill(static_cast<__nv_bfloat16*>(output), count, middle, spread, seed, stream);
}

cudaError_t FillUniformE4m3(void* output, int64_t count, float middle, float spread, uint64_t seed,
                            cudaStream_t stream) {
  return Fill(static_cast<__nv_fp8_e4m3*>(output), count, middle, spread, seed, stream);
}

}  // namespace palimpsest::cuda
