// How much memory of a GPU is taken, by whomever: from NVML, which needs no context. The difference
// that a call makes is what the call took, as long as no other process takes or gives at that
// moment. (NVML knows processes' shares, but not in every pid namespace.)
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_GPU_MEMORY_USE_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_GPU_MEMORY_USE_H_

#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/cuda/driver.h"

namespace palimpsest {

// Of GPU `ordinal` as the driver counts. FailedPrecondition without NVML.
absl::StatusOr<Bytes> GpuMemoryUse(const CudaDriver& driver, int ordinal);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_GPU_MEMORY_USE_H_
