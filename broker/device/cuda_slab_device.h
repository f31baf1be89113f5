// Slabs in a GPU's memory: one CUDA allocation each, which workers import from a descriptor.
//
// Every slab stays mapped in this process as well, at its own place of one reserved range, so that
// scrubbing a slab is one memset at memory speed and nothing else. Apart from the slabs the broker
// holds the GPU's primary context, and runs no kernel of its own.
//
// A descriptor of GPU memory has no name that fstat could tell: Identity counts allocations under
// the broker's generation. That a returned descriptor is the memory that was granted is believed,
// since only the process that held the slab may return it. If it lies (two slabs, one memory) it
// hurts its own tenant alone, as long as its slabs are retired when they come back; where they are
// scrubbed instead, workers are trusted.
//
// A worker that runs on several GPUs needs its slabs in lockstep on each. A slab of such a pool
// would be a stripe: one allocation on each GPU under one slab id, created, scrubbed and retired
// together, and handed over as one descriptor for each GPU in the order of `pool.gpus`. This class
// is what one GPU's share of a stripe does; the ledger and the sessions would not notice.
#ifndef PALIMPSEST_BROKER_DEVICE_CUDA_SLAB_DEVICE_H_
#define PALIMPSEST_BROKER_DEVICE_CUDA_SLAB_DEVICE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "broker/device/slab_device.h"
#include "common/bytes.h"
#include "common/cuda/context.h"
#include "common/cuda/virtual_memory.h"
#include "common/mutex.h"

namespace palimpsest {

class CudaSlabDevice : public SlabDevice {
 public:
  struct Options {
    const CudaDriver* driver = nullptr;
    int gpu = 0;
    uint32_t slabs = 0;
    // A multiple of the GPU's granularity (2 MiB).
    Bytes slab_bytes = MiB(32);
    // Of this broker process; names its memory apart from that of earlier ones.
    uint32_t generation = 1;
    // Descriptors that this process needs besides those of the pool.
    uint32_t other_descriptors = 4096;
  };

  // Creates no memory yet. FailedPrecondition when the GPU is not there, or smaller than the pool.
  static absl::StatusOr<std::unique_ptr<CudaSlabDevice>> Open(const Options& options);
  ~CudaSlabDevice() override;

  std::string name() const override { return "cuda"; }
  absl::Status Create(SlabId slab) override;
  absl::Status CheckMemory(const UniqueFd& memory, const Identity& granted) const override;
  absl::Status Adopt(SlabId slab, UniqueFd memory, const Identity& granted) override;
  absl::Status Scrub(absl::Span<const SlabId> slabs) override;
  absl::Status Retire(SlabId slab) override;
  std::shared_ptr<const UniqueFd> Descriptor(SlabId slab) override;
  Identity IdentityOf(SlabId slab) override;
  // Memory keeps its name for as long as it exists, so workers may keep what they imported.
  uint64_t MemoryId(SlabId slab) override { return IdentityOf(slab).inode; }

  const CudaContext& context() const { return *context_; }

 private:
  struct Slab {
    CudaAllocation handle;
    std::shared_ptr<const UniqueFd> descriptor;
    Identity identity;
  };

  CudaSlabDevice(const Options& options, CudaContextPtr context, CudaAddressRange range,
                 CudaStream stream)
      : options_(options),
        context_(std::move(context)),
        range_(std::move(range)),
        stream_(std::move(stream)),
        slabs_(options.slabs) {}

  absl::Status CheckId(SlabId slab) const;
  Bytes Place(SlabId slab) const { return options_.slab_bytes * slab.value(); }
  // Maps it at the slab's place.
  absl::Status Map(SlabId slab, const CudaAllocation& memory);
  absl::Status Zero(SlabId first, uint32_t count);
  absl::Status NewMemory(SlabId slab);
  // Takes the slab's memory away, if it has any.
  absl::Status Drop(SlabId slab);
  bool HasMemory(SlabId slab) const;
  void Install(SlabId slab, CudaAllocation handle, UniqueFd descriptor, const Identity& identity);

  const Options options_;
  const CudaContextPtr context_;
  const CudaAddressRange range_;
  const CudaStream stream_;

  mutable Mutex mu_;
  std::vector<Slab> slabs_ ABSL_GUARDED_BY(mu_);
  uint32_t created_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_DEVICE_CUDA_SLAB_DEVICE_H_
