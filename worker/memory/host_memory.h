// Regions and images in host memory.
#ifndef PALIMPSEST_WORKER_MEMORY_HOST_MEMORY_H_
#define PALIMPSEST_WORKER_MEMORY_HOST_MEMORY_H_

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "worker/memory/region_memory.h"

namespace palimpsest {

class HostMemory : public MemoryBackend {
 public:
  // Parameters are copied on this many threads.
  explicit HostMemory(int restore_threads) : restore_threads_(restore_threads) {}

  std::string name() const override { return "host"; }
  // Aligned to 2 MiB, so that huge pages can be mapped as such. Slabs are populated, so that no
  // access faults later.
  absl::StatusOr<std::shared_ptr<RegionMemory>> Reserve(uint32_t places, Bytes slab_bytes) override;
  absl::StatusOr<std::unique_ptr<ImageRestorer>> OpenImage(UniqueFd image,
                                                           const ImageShape& shape) override;

 private:
  const int restore_threads_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_HOST_MEMORY_H_
