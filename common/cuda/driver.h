// The CUDA driver's functions as a table, so that one program runs on machines with and without a
// GPU: nothing is linked, libcuda.so.1 is opened when somebody asks for it.
//
// Everything that talks to the driver takes the table as a parameter; tests pass a test double
// (common/cuda/testing/fake_driver.h), which keeps "GPU memory" in memory files.
//
// Threads: the table is constant and the driver is thread-safe. Calls that need a context use the
// one that is current on the calling thread (context.h).
#ifndef PALIMPSEST_COMMON_CUDA_DRIVER_H_
#define PALIMPSEST_COMMON_CUDA_DRIVER_H_

#include <cuda.h>

#include <type_traits>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace palimpsest {

// Names as in cuda.h, whose macros choose the version of a function (cuMemGetInfo is
// cuMemGetInfo_v2): whoever uses the table includes cuda.h.
#define PALIMPSEST_CUDA_FUNCTIONS(F)        \
  F(cuInit)                                 \
  F(cuGetErrorName)                         \
  F(cuGetErrorString)                       \
  F(cuDriverGetVersion)                     \
  F(cuDeviceGetCount)                       \
  F(cuDeviceGet)                            \
  F(cuDeviceGetName)                        \
  F(cuDeviceGetAttribute)                   \
  F(cuDeviceGetUuid)                        \
  F(cuDeviceTotalMem)                       \
  F(cuDevicePrimaryCtxRetain)               \
  F(cuDevicePrimaryCtxRelease)              \
  F(cuCtxSetCurrent)                        \
  F(cuCtxGetCurrent)                        \
  F(cuMemGetInfo)                           \
  F(cuMemCreate)                            \
  F(cuMemRelease)                           \
  F(cuMemRetainAllocationHandle)            \
  F(cuMemExportToShareableHandle)           \
  F(cuMemImportFromShareableHandle)         \
  F(cuMemGetAllocationPropertiesFromHandle) \
  F(cuMemGetAllocationGranularity)          \
  F(cuMemAddressReserve)                    \
  F(cuMemAddressFree)                       \
  F(cuMemMap)                               \
  F(cuMemUnmap)                             \
  F(cuMemSetAccess)                         \
  F(cuMemHostRegister)                      \
  F(cuMemHostUnregister)                    \
  F(cuMemHostAlloc)                         \
  F(cuMemFreeHost)                          \
  F(cuMemcpyHtoDAsync)                      \
  F(cuMemcpyDtoHAsync)                      \
  F(cuMemcpyDtoDAsync)                      \
  F(cuMemcpy2DAsync)                        \
  F(cuMemsetD32Async)                       \
  F(cuStreamCreateWithPriority)             \
  F(cuStreamDestroy)                        \
  F(cuStreamSynchronize)                    \
  F(cuStreamWaitEvent)                      \
  F(cuEventCreate)                          \
  F(cuEventDestroy)                         \
  F(cuEventRecord)                          \
  F(cuEventQuery)                           \
  F(cuEventSynchronize)                     \
  F(cuModuleLoadData)                       \
  F(cuModuleUnload)                         \
  F(cuModuleGetFunction)                    \
  F(cuLaunchKernel)

// Null in the table of a driver that is too old for them (before CUDA 13).
#define PALIMPSEST_CUDA_LATE_FUNCTIONS(F) F(cuMemcpyBatchAsync)

struct CudaDriver {
#define PALIMPSEST_CUDA_POINTER(name) std::add_pointer<decltype(::name)>::type name = nullptr;
  PALIMPSEST_CUDA_FUNCTIONS(PALIMPSEST_CUDA_POINTER)
  PALIMPSEST_CUDA_LATE_FUNCTIONS(PALIMPSEST_CUDA_POINTER)
#undef PALIMPSEST_CUDA_POINTER

  // The process's driver, opened and initialised once. FailedPrecondition, with what to do, where
  // there is none, it is too old, or it has no GPU.
  static absl::StatusOr<const CudaDriver*> Load();

  // OK for CUDA_SUCCESS. Otherwise "WHAT failed: CUDA_ERROR_X (its description)" and what can be
  // done about it: ResourceExhausted for memory, FailedPrecondition for an absent, unfit or
  // forbidden GPU, InvalidArgument for arguments and foreign handles, Internal for an error that
  // breaks the context (every later call fails: the process must end).
  absl::Status Check(CUresult result, absl::string_view what) const;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_CUDA_DRIVER_H_
