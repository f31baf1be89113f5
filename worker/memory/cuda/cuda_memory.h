// Regions and images for slabs of the memory of one GPU, or of several: then a slab has a piece on
// each, mapped at the same place of that GPU's range.
//
// Memory that a slab left behind is kept if the broker named it (memory_id): the broker scrubs such
// slabs in place, so that the same memory comes back, and mapping it again needs neither its
// descriptor nor an import. What is kept is memory that the broker counts as its own; it is dropped
// when the broker is lost.
//
// Threads: thread-safe. The driver's calls block for as long as it works, never for kernels.
#ifndef PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_MEMORY_H_
#define PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_MEMORY_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "common/cuda/context.h"
#include "worker/memory/region_memory.h"

namespace palimpsest {

class CudaMemory : public MemoryBackend {
 public:
  struct Options {
    const CudaDriver* driver = nullptr;
    // In the order of ranks.
    std::vector<int> gpus = {0};
    // Copies that are under way at once on each GPU; a revoke waits for them.
    Bytes restore_window = MiB(256);
  };

  // Opens the GPUs' primary contexts, which the CUDA runtime shares.
  static absl::StatusOr<std::unique_ptr<CudaMemory>> Open(const Options& options);
  ~CudaMemory() override;

  std::string name() const override { return "cuda"; }
  int ranks() const override { return static_cast<int>(contexts_.size()); }
  absl::StatusOr<std::shared_ptr<RegionMemory>> Reserve(uint32_t places, Bytes slab_bytes) override;
  // The image is registered with the driver, so that it is copied at the link's speed.
  absl::StatusOr<std::unique_ptr<ImageRestorer>> OpenImage(UniqueFd image,
                                                           const ImageShape& shape) override;
  absl::StatusOr<std::unique_ptr<HostPin>> Pin(absl::Span<std::byte> memory) override;
  absl::StatusOr<Bytes> DeviceMemoryUse(int rank) const override;
  Bytes context_bytes(int rank) const override { return context_bytes_[static_cast<size_t>(rank)]; }
  bool Keeps(uint64_t memory_id) const override;
  void DropKept() override;

  const CudaContextPtr& context(int rank = 0) const { return contexts_[static_cast<size_t>(rank)]; }

 private:
  class Imports;
  class Region;

  CudaMemory(const Options& options, std::vector<CudaContextPtr> contexts,
             std::vector<Bytes> context_bytes, std::shared_ptr<Imports> imports)
      : options_(options),
        contexts_(std::move(contexts)),
        context_bytes_(std::move(context_bytes)),
        imports_(std::move(imports)) {}

  const Options options_;
  const std::vector<CudaContextPtr> contexts_;  // by rank
  const std::vector<Bytes> context_bytes_;      // by rank
  const std::shared_ptr<Imports> imports_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_CUDA_CUDA_MEMORY_H_
