#include <algorithm>

#include "worker/compute/cuda/device_util.cuh"
#include "worker/compute/cuda/peer_exchange.h"

namespace palimpsest::cuda {
namespace {

constexpr int kThreads = kSummedNormThreads;
constexpr int kMaxBlocks = 256;
// Of each thread; with more than two ranks fewer, so that an inbox does not grow.
constexpr int kMaxVectors = 8;
constexpr size_t kVectorBytes = 16;

constexpr uint32_t kEmpty = 0xffffffff;
// A word that looks empty is a NaN, or two of them in bfloat16; so is this.
constexpr uint32_t kOtherNan = 0x7fffffff;
// Looks at the host's memory, which takes a microsecond, are this rare.
constexpr uint32_t kLooksBetween = 4096;

__host__ __device__ inline int VectorsPerThread(int ranks) {
  const int vectors = kMaxVectors / (ranks - 1);
  return vectors > 0 ? vectors : 1;
}

__device__ inline uint4 Load(const uint4* from) {
  uint4 v;
  asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(from)
               : "memory");
  return v;
}

__device__ inline void Store(uint4* to, uint4 v) {
  asm volatile("st.volatile.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
               "r"(v.z), "r"(v.w)
               : "memory");
}

__device__ inline uint32_t Sendable(uint32_t word) { return word == kEmpty ? kOtherNan : word; }

// In the inbox of `to`: what rank `from` sends to the thread of the same number there.
__device__ inline uint4* Slot(const PeerExchange& x, int to, int from, uint32_t turn, int i) {
  const int sender = from < to ? from : from - 1;
  const int64_t message = static_cast<int64_t>(turn & 1) * (x.ranks - 1) + sender;
  const int64_t block = message * kMaxBlocks + blockIdx.x;
  return static_cast<uint4*>(x.inboxes[to]) + (block * VectorsPerThread(x.ranks) + i) * kThreads +
         threadIdx.x;
}

// Waits for a message and empties its slot; false after an abort.
__device__ inline bool Receive(uint4* slot, const volatile uint32_t* aborted, uint4& v) {
  for (uint32_t looks = 1;; ++looks) {
    v = Load(slot);
    if (v.x != kEmpty && v.y != kEmpty && v.z != kEmpty && v.w != kEmpty) break;
    if (looks % kLooksBetween == 0 && *aborted != 0) return false;
  }
  Store(slot, make_uint4(kEmpty, kEmpty, kEmpty, kEmpty));
  return true;
}

// Vectors of a message that one thread exchanges: first, first + stride ... below end.
struct Share {
  int64_t first;
  int64_t stride;
  int64_t end;

  // Of a message that all threads of the grid take turns in.
  __device__ static Share OfGrid(int64_t vectors) {
    return {static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x,
            static_cast<int64_t>(gridDim.x) * kThreads, vectors};
  }
  // Of a message with a row for each block.
  __device__ static Share OfRow(int64_t row_vectors) {
    const int64_t begin = blockIdx.x * row_vectors;
    return {begin + threadIdx.x, kThreads, begin + row_vectors};
  }
};

// Sends the thread's share of `own` to all others, then calls take(i, index, rank, vector) for what
// each rank has of each of its vectors, in the order of ranks. False after an abort.
template <typename Take>
__device__ bool Exchange(const PeerExchange& x, const uint4* own, const Share& share, Take take) {
  AwaitPrevious();
  LetNextLaunch();
  const uint32_t turn = x.turns[blockIdx.x];
  uint4 mine[kMaxVectors];
#pragma unroll
  for (int i = 0; i < kMaxVectors; ++i) {
    const int64_t at = share.first + i * share.stride;
    if (at >= share.end) break;
    const uint4 v = own[at];
    mine[i] = make_uint4(Sendable(v.x), Sendable(v.y), Sendable(v.z), Sendable(v.w));
    for (int step = 1; step < x.ranks; ++step) {
      const int to = x.rank + step < x.ranks ? x.rank + step : x.rank + step - x.ranks;
      Store(Slot(x, to, x.rank, turn, i), mine[i]);
    }
  }
#pragma unroll
  for (int i = 0; i < kMaxVectors; ++i) {
    const int64_t at = share.first + i * share.stride;
    if (at >= share.end) break;
    for (int from = 0; from < x.ranks; ++from) {
      uint4 v = mine[i];
      if (from != x.rank && !Receive(Slot(x, x.rank, from, turn, i), x.aborted, v)) return false;
      take(i, at, from, v);
    }
  }
  __syncthreads();
  if (threadIdx.x == 0) x.turns[blockIdx.x] = turn + 1;
  return true;
}

__device__ inline void Add(int from, const uint4& v, float (&sum)[8]) {
  float values[8];
  reinterpret_cast<const Vector8&>(v).Unpack(values);
#pragma unroll
  for (int j = 0; j < 8; ++j) sum[j] = from == 0 ? values[j] : sum[j] + values[j];
}

__global__ void __launch_bounds__(kThreads)
    AllReduceKernel(const __grid_constant__ PeerExchange x, uint4* data, int64_t vectors) {
  float sum[8];
  Exchange(x, data, Share::OfGrid(vectors), [&](int, int64_t at, int from, const uint4& v) {
    Add(from, v, sum);
    if (from + 1 == x.ranks) reinterpret_cast<Vector8*>(data)[at] = Vector8::Pack(sum);
  });
}

// A row for each block.
__global__ void __launch_bounds__(kThreads)
    AllReduceNormKernel(const __grid_constant__ PeerExchange x, uint4* data, SummedNorm norm) {
  __shared__ float squares_of_warps[kThreads / 32];
  Vector8 held[kMaxVectors];
  float sum[8];
  float squares = 0;
  const Share share = Share::OfRow(norm.size / 8);
  const bool done = Exchange(x, data, share, [&](int i, int64_t at, int from, const uint4& v) {
    Add(from, v, sum);
    if (from + 1 < x.ranks) return;
    held[i] = Vector8::Pack(sum);
    reinterpret_cast<Vector8*>(data)[at] = held[i];
    held[i].Unpack(sum);
#pragma unroll
    for (int j = 0; j < 8; ++j) squares += sum[j] * sum[j];
  });
  if (!done) return;
  squares = WarpSum(squares);
  if (threadIdx.x % 32 == 0) squares_of_warps[threadIdx.x / 32] = squares;
  __syncthreads();
  const int lane = threadIdx.x % 32;
  const float total = WarpSum(lane < kThreads / 32 ? squares_of_warps[lane] : 0.0f);
  const float scale = rsqrtf(total / static_cast<float>(norm.size) + norm.epsilon);
  const auto* weights = static_cast<const Vector8*>(norm.weight);
#pragma unroll
  for (int i = 0; i < kMaxVectors; ++i) {
    const int64_t at = share.first + i * share.stride;
    if (at >= share.end) break;
    float values[8], weight[8];
    held[i].Unpack(values);
    weights[threadIdx.x + i * kThreads].Unpack(weight);
#pragma unroll
    for (int j = 0; j < 8; ++j) values[j] *= scale * weight[j];
    static_cast<Vector8*>(norm.output)[at] = Vector8::Pack(values);
  }
}

// Puts word `at` of a rank's matrix, and the three behind it, where they belong.
__device__ inline void Place(const SideBySide& shape, float* whole, int from, uint32_t at,
                             const uint4& v) {
  const auto columns = static_cast<uint32_t>(shape.columns);
  uint32_t row = at / columns;
  uint32_t column = at % columns;
  const int64_t offset = static_cast<int64_t>(from) * columns;
  if (columns % 4 == 0 && shape.width % 4 == 0) {
    if (row < shape.rows && offset + column < shape.width) {
      *reinterpret_cast<uint4*>(whole + static_cast<int64_t>(row) * shape.width + offset + column) =
          v;
    }
    return;
  }
  const uint32_t words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    if (row < shape.rows && offset + column < shape.width) {
      whole[static_cast<int64_t>(row) * shape.width + offset + column] = __uint_as_float(words[j]);
    }
    if (++column == columns) {
      column = 0;
      ++row;
    }
  }
}

__global__ void __launch_bounds__(kThreads)
    AllGatherKernel(const __grid_constant__ PeerExchange x, const uint4* part, int64_t vectors,
                    float* whole, SideBySide shape) {
  Exchange(x, part, Share::OfGrid(vectors), [&](int, int64_t at, int from, const uint4& v) {
    Place(shape, whole, from, static_cast<uint32_t>(at) * 4, v);
  });
}

__global__ void __launch_bounds__(kThreads)
    InterleaveKernel(const float* parts, float* whole, SideBySide shape) {
  AwaitPrevious();
  LetNextLaunch();
  const int64_t row = blockIdx.y;
  for (int32_t column = blockIdx.x * kThreads + threadIdx.x; column < shape.width;
       column += gridDim.x * kThreads) {
    const int64_t from = column / shape.columns;
    whole[row * shape.width + column] =
        parts[(from * shape.rows + row) * shape.columns + column % shape.columns];
  }
}

int BlocksFor(int64_t vectors) {
  return static_cast<int>(std::clamp<int64_t>((vectors + kThreads - 1) / kThreads, 1, kMaxBlocks));
}

}  // namespace

cudaError_t PreparePeerExchange() {
  cudaFuncAttributes attributes;
  cudaError_t error = cudaFuncGetAttributes(&attributes, AllReduceKernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, AllReduceNormKernel);
  if (error == cudaSuccess) error = cudaFuncGetAttributes(&attributes, AllGatherKernel);
  return error == cudaSuccess ? cudaFuncGetAttributes(&attributes, InterleaveKernel) : error;
}

size_t InboxBytes(int ranks) {
  return 2 * static_cast<size_t>(ranks - 1) * MaxExchangeBytes(ranks);
}

size_t TurnBytes() { return kMaxBlocks * sizeof(uint32_t); }

size_t MaxExchangeBytes(int ranks) {
  return static_cast<size_t>(VectorsPerThread(ranks)) * kMaxBlocks * kThreads * kVectorBytes;
}

cudaError_t PeerAllReduce(const PeerExchange& exchange, void* data, size_t bytes,
                          cudaStream_t stream) {
  if (bytes % kVectorBytes != 0 || bytes > MaxExchangeBytes(exchange.ranks)) {
    return cudaErrorInvalidValue;
  }
  const auto vectors = static_cast<int64_t>(bytes / kVectorBytes);
  return LaunchOverlapped(AllReduceKernel, BlocksFor(vectors), kThreads, 0, stream, exchange,
                          static_cast<uint4*>(data), vectors);
}

bool TakesNorm(int ranks, int32_t rows, int32_t size) {
  const int vectors = std::min(VectorsPerThread(ranks), kSummedNormVectors);
  return rows <= kMaxBlocks && size % 8 == 0 && size / 8 <= vectors * kThreads;
}

cudaError_t PeerAllReduceNorm(const PeerExchange& exchange, void* data, const SummedNorm& norm,
                              cudaStream_t stream) {
  if (!TakesNorm(exchange.ranks, norm.rows, norm.size)) return cudaErrorInvalidValue;
  return LaunchOverlapped(AllReduceNormKernel, norm.rows, kThreads, 0, stream, exchange,
                          static_cast<uint4*>(data), norm);
}

cudaError_t PeerAllGather(const PeerExchange& exchange, const float* part, float* whole,
                          const SideBySide& shape, cudaStream_t stream) {
  const size_t bytes = static_cast<size_t>(shape.rows) * shape.columns * sizeof(float);
  if (bytes > MaxExchangeBytes(exchange.ranks)) return cudaErrorInvalidValue;
  const auto vectors = static_cast<int64_t>((bytes + kVectorBytes - 1) / kVectorBytes);
  return LaunchOverlapped(AllGatherKernel, BlocksFor(vectors), kThreads, 0, stream, exchange,
                          reinterpret_cast<const uint4*>(part), vectors, whole, shape);
}

cudaError_t Interleave(const float* parts, float* whole, const SideBySide& shape,
                       cudaStream_t stream) {
  const dim3 grid(std::min(64, (shape.width + kThreads - 1) / kThreads), shape.rows);
  return LaunchOverlapped(InterleaveKernel, grid, kThreads, 0, stream, parts, whole, shape);
}

}  // namespace palimpsest::cuda
