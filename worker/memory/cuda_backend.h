// The CUDA back-end of a worker's memory as its process sees it: without a header of CUDA, and
// there in every build. A build without a CUDA toolkit refuses it.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_BACKEND_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_BACKEND_H_

#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/memory/region_memory.h"

namespace palimpsest {

// A CudaMemory on these GPUs of this process, in the order of ranks, over the machine's driver.
// FailedPrecondition says what is missing: the toolkit when this program was built, the driver, or
// the GPU.
absl::StatusOr<std::unique_ptr<MemoryBackend>> OpenCudaMemory(const std::vector<int>& gpus);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_BACKEND_H_
