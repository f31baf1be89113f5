#include "broker/device/cuda_pool.h"

namespace palimpsest {

absl::StatusOr<std::unique_ptr<SlabDevice>> OpenCudaPool(const CudaPool&) {
  return absl::FailedPreconditionError(
      "backend cuda: this program was built without a CUDA toolkit; build it where one is (see "
      "README.md), or set pool.backend to host");
}

}  // namespace palimpsest
