// Shared by the kernels: launching with programmatic dependence, 16-byte vectors of bfloat16.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_DEVICE_UTIL_CUH_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_DEVICE_UTIL_CUH_

#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace palimpsest::cuda {

// See SetLaunchOverlap in kernels.h.
inline std::atomic<bool> launch_overlap = true;

// As LaunchOverlapped, with clusters of `cluster` blocks.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchClusters(void (*kernel)(Parameters...), unsigned cluster, dim3 grid, dim3 block,
                           size_t shared, cudaStream_t stream, Arguments... arguments) {
  cudaLaunchAttribute attributes[2] = {};
  attributes[0].id = cudaLaunchAttributeClusterDimension;
  attributes[0].val.clusterDim.x = cluster;
  attributes[0].val.clusterDim.y = attributes[0].val.clusterDim.z = 1;
  attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attributes[1].val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = block;
  config.dynamicSmemBytes = shared;
  config.stream = stream;
  config.attrs = cluster > 1 ? attributes : attributes + 1;
  config.numAttrs = (cluster > 1 ? 1 : 0) + (launch_overlap ? 1 : 0);
  return cudaLaunchKernelEx(&config, kernel, arguments...);
}

// The kernel may start while the one before it drains; it calls AwaitPrevious before it touches
// anything that kernel wrote.
template <typename... Parameters, typename... Arguments>
cudaError_t LaunchOverlapped(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared,
                             cudaStream_t stream, Arguments... arguments) {
  return LaunchClusters(kernel, 1, grid, block, shared, stream, arguments...);
}

__device__ inline void AwaitPrevious() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// Lets the next kernel launch; it still waits for this one's end before it reads.
__device__ inline void LetNextLaunch() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Eight bfloat16 numbers, moved as one 16-byte access.
struct alignas(16) Vector8 {
  __nv_bfloat162 pairs[4];

  __device__ void Unpack(float (&out)[8]) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float2 pair = __bfloat1622float2(pairs[i]);
      out[2 * i] = pair.x;
      out[2 * i + 1] = pair.y;
    }
  }
  __device__ static Vector8 Pack(const float (&in)[8]) {
    Vector8 out;
#pragma unroll
    for (int i = 0; i < 4; ++i) out.pairs[i] = __floats2bfloat162_rn(in[2 * i], in[2 * i + 1]);
    return out;
  }
};

__device__ inline float WarpSum(float value) {
#pragma unroll
  for (int offset = 16; offset > 0; offset /= 2) {
    value += __shfl_xor_sync(0xffffffff, value, offset);
  }
  return value;
}

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_DEVICE_UTIL_CUH_
