#include "broker/device/cuda_pool.h"

#include "absl/strings/str_cat.h"
#include "broker/device/cuda_slab_device.h"
#include "common/log.h"

namespace palimpsest {
namespace {

// That a broker needs besides those of GPU memory.
constexpr uint32_t kOtherDescriptors = 4096;

}  // namespace

absl::StatusOr<std::unique_ptr<SlabDevice>> OpenCudaPool(const CudaPool& pool) {
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver.ok()) {
    return absl::Status(driver.status().code(),
                        absl::StrCat("backend cuda: ", driver.status().message()));
  }
  absl::StatusOr<std::unique_ptr<CudaSlabDevice>> device =
      CudaSlabDevice::Open({.driver = *driver,
                            .gpus = pool.gpus,
                            .slabs = pool.slabs,
                            .slab_bytes = pool.slab_bytes,
                            .generation = pool.generation,
                            .other_descriptors = kOtherDescriptors + pool.beside});
  if (!device.ok()) return device.status();
  // After a restart there may be no memory to spare, while workers hold theirs.
  if (const absl::Status status = (*device)->MeasureLinks(); !status.ok()) {
    Log(LogLevel::kWarning, "the links of the GPUs are not measured", {{"status", status}});
  }
  const std::vector<SlabDevice::Link> links = (*device)->Links();
  for (size_t rank = 0; rank < pool.gpus.size(); ++rank) {
    const CudaContext& context = (*device)->context(rank);
    absl::Status status = context.MakeCurrent();
    if (!status.ok()) return status;
    const absl::StatusOr<CudaContext::MemoryInfo> memory = context.Memory();
    if (!memory.ok()) return memory.status();
    Log(LogLevel::kInfo, "slabs in GPU memory",
        {{"gpu", pool.gpus[rank]},
         {"rank", rank},
         {"name", context.name()},
         {"total", memory->total},
         {"free", memory->free},
         {"gigabytes_per_s_to_gpu", links.empty() ? 0 : links[rank].to_device / 1e9},
         {"gigabytes_per_s_from_gpu", links.empty() ? 0 : links[rank].from_device / 1e9}});
  }
  return *std::move(device);
}

}  // namespace palimpsest
