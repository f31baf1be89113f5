#include <cooperative_groups.h>

#include <utility>

#include "worker/compute/cuda/argmax.h"
#include "worker/compute/cuda/ptx.cuh"

namespace palimpsest {
namespace {

constexpr int kBlocksPerRow = 8;  // one cluster
constexpr int kThreads = 512;
constexpr int kWarps = kThreads / 32;

struct Candidate {
  float value;
  int32_t index;
};

__device__ __forceinline__ Candidate Better(Candidate a, Candidate b) {
  const bool second = b.value > a.value || (b.value == a.value && b.index < a.index);
  return second ? b : a;
}

__device__ __forceinline__ Candidate BestOfWarp(Candidate best) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    best = Better(best, {__shfl_xor_sync(0xffffffff, best.value, offset),
                         __shfl_xor_sync(0xffffffff, best.index, offset)});
  }
  return best;
}

// A cluster takes a row: every block a strided share, then the first block the best of all.
__global__ void __cluster_dims__(kBlocksPerRow, 1, 1) __launch_bounds__(kThreads)
    ArgmaxKernel(const float* logits, int64_t stride, int32_t columns, int32_t* token) {
  __shared__ Candidate of_warp[kWarps];
  __shared__ Candidate of_block[kBlocksPerRow];
  auto cluster = cooperative_groups::this_cluster();
  const int part = static_cast<int>(cluster.block_rank());
  const int row = blockIdx.x / kBlocksPerRow;
  logits += row * stride;

  auto started = cluster.barrier_arrive();
  ptx::LaunchDependents();
  ptx::GridDependencyWait();
  // An index that loses to any real one, unless all are minus infinity.
  Candidate best = {-INFINITY, 0};
  constexpr int kInFlight = 8;
  constexpr int kLanes = kBlocksPerRow * kThreads;
  for (int start = part * kThreads + threadIdx.x; start < columns; start += kInFlight * kLanes) {
    float values[kInFlight];
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      const int column = start + i * kLanes;
      values[i] = column < columns ? logits[column] : -INFINITY;
    }
#pragma unroll
    for (int i = 0; i < kInFlight; ++i) {
      // A thread's columns ascend: the first of equals stays. NaN never compares greater.
      if (values[i] > best.value) best = {values[i], start + i * kLanes};
    }
  }
  best = BestOfWarp(best);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = best;
  __syncthreads();
  cluster.barrier_wait(std::move(started));  // now every block's shared memory may be written
  if (threadIdx.x < 32) {
    best = BestOfWarp(of_warp[threadIdx.x % kWarps]);
    if (threadIdx.x == 0) *cluster.map_shared_rank(&of_block[part], 0) = best;
  }
  cluster.sync();
  if (part == 0 && threadIdx.x < 32) {
    best = BestOfWarp(of_block[threadIdx.x % kBlocksPerRow]);
    if (threadIdx.x == 0) token[row] = best.index;
  }
}

}  // namespace

cudaError_t LaunchArgmax(const float* logits, int64_t stride, int32_t rows, int32_t columns,
                         int32_t* token, bool programmatic, cudaStream_t stream) {
  if (logits == nullptr || token == nullptr || rows < 1 || columns < 1 || stride < 0) {
    return cudaErrorInvalidValue;
  }
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(rows) * kBlocksPerRow);
  config.blockDim = dim3(kThreads);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = programmatic ? 1 : 0;
  return cudaLaunchKernelEx(&config, ArgmaxKernel, logits, stride, columns, token);
}

}  // namespace palimpsest
