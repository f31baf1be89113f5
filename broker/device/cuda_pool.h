// The CUDA back-end of tier 0 as the broker's server sees it: without a header of CUDA, and there
// in every build. A build without a CUDA toolkit refuses it.
#ifndef PALIMPSEST_BROKER_DEVICE_CUDA_POOL_H_
#define PALIMPSEST_BROKER_DEVICE_CUDA_POOL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/statusor.h"
#include "broker/device/slab_device.h"
#include "common/bytes.h"

namespace palimpsest {

struct CudaPool {
  // In the order of ranks.
  std::vector<int> gpus = {0};
  uint32_t slabs = 0;
  Bytes slab_bytes;
  // Of this broker process.
  uint32_t generation = 1;
  // Most descriptors of memory beside the pool (SlabDevice::CreateBeside).
  uint32_t beside = 0;
};

// A CudaSlabDevice over the machine's driver. FailedPrecondition says what is missing: the toolkit
// when this program was built, the driver, or the GPU.
absl::StatusOr<std::unique_ptr<SlabDevice>> OpenCudaPool(const CudaPool& pool);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_DEVICE_CUDA_POOL_H_
