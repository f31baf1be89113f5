#include "worker/memory/cuda_backend.h"

#include "absl/strings/str_cat.h"
#include "worker/memory/cuda/cuda_memory.h"

namespace palimpsest {

absl::StatusOr<std::unique_ptr<MemoryBackend>> OpenCudaMemory(const std::vector<int>& gpus) {
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver.ok()) {
    return absl::Status(driver.status().code(),
                        absl::StrCat("device cuda: ", driver.status().message()));
  }
  return CudaMemory::Open({.driver = *driver, .gpus = gpus});
}

}  // namespace palimpsest
