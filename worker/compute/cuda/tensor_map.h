// Describes tensors in global memory to Hopper's copy engine.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_TENSOR_MAP_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_TENSOR_MAP_H_

#include <cuda.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace palimpsest {

// A tensor of bf16, sizes and box from the innermost dimension on, byte_strides from the second.
// cudaErrorNotSupported without a driver that knows such tensors, cudaErrorInvalidValue if it
// refuses this one.
inline cudaError_t EncodeTensor(CUtensorMap* map, const void* data, int rank,
                                CUtensorMapSwizzle swizzle, const uint64_t* sizes,
                                const uint64_t* byte_strides, const uint32_t* box) {
  static const auto encode = [] {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult found;
    const cudaError_t error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function,
                                                               12000, cudaEnableDefault, &found);
    return error == cudaSuccess && found == cudaDriverEntryPointSuccess
               ? reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function)
               : nullptr;
  }();
  if (encode == nullptr) return cudaErrorNotSupported;
  const uint32_t steps[] = {1, 1, 1, 1, 1};
  const CUresult result =
      encode(map, CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, rank, const_cast<void*>(data), sizes,
             byte_strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, swizzle,
             CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_TENSOR_MAP_H_
