// Regions and images for slabs of a GPU's memory.
//
// Memory that a slab left behind is kept if the broker named it (memory_id): the broker scrubs such
// slabs in place, so that the same memory comes back, and mapping it again needs neither its
// descriptor nor an import. What is kept is memory that the broker counts as its own; it is dropped
// when the broker is lost.
//
// Threads: thread-safe. The driver's calls block for as long as it works, never for kernels.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_MEMORY_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_MEMORY_H_

#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/cuda/context.h"
#include "worker/memory/region_memory.h"

namespace palimpsest {

class CudaMemory : public MemoryBackend {
 public:
  struct Options {
    const CudaDriver* driver = nullptr;
    int gpu = 0;
    // Copies that are under way at once; a revoke waits for them.
    Bytes restore_window = MiB(256);
  };

  // Opens the GPU's primary context, which the CUDA runtime shares.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Open(const Options& options);
  ~CudaMemory() override;

  std::string name() const override { return "cuda"; }
  absl::StatusOr<std::shared_ptr<RegionMemory>> Reserve(uint32_t places, Bytes slab_bytes) override;
  // The image is registered with the driver, so that it is copied at the link's speed.
  absl::StatusOr<std::unique_ptr<ImageRestorer>> OpenImage(UniqueFd image,
                                                           const ImageShape& shape) override;
  bool Keeps(uint64_t memory_id) const override;
  void DropKept() override;

  const CudaContextPtr& context() const { return context_; }

 private:
  class Imports;
  class Region;

  CudaMemory(const Options& options, CudaContextPtr context, std::shared_ptr<Imports> imports)
      : options_(options), context_(std::move(context)), imports_(std::move(imports)) {}

  const Options options_;
  const CudaContextPtr context_;
  const std::shared_ptr<Imports> imports_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_MEMORY_H_
