#include "worker/memory/cuda_backend.h"

namespace palimpsest {

absl::StatusOr<std::unique_ptr<MemoryBackend>> OpenCudaMemory(const std::vector<int>&) {
  return absl::FailedPreconditionError(
      "device cuda: this program was built without a CUDA toolkit; build it where one is (see "
      "README.md), or set engine.device to cpu");
}

}  // namespace palimpsest
