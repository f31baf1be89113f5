// Slabs in the memory of one GPU, or of several at once: a slab is a *stripe*, one CUDA allocation
// on each GPU of the pool, which workers import from one descriptor for each GPU. A stripe is
// created, scrubbed, retired and taken back as one: it has memory on every GPU or on none.
//
// Every slab stays mapped in this process as well, on each GPU at its own place of one reserved
// range, so that scrubbing is one memset at memory speed and nothing else; the GPUs work side by
// side. Apart from the slabs the broker holds each GPU's primary context, and runs no kernel of its
// own.
//
// A descriptor of GPU memory has no name that fstat could tell: Identity counts stripes under the
// broker's generation. That a returned descriptor is the memory that was granted is believed, since
// only the process that held the slab may return it. If it lies (two slabs, one memory) it hurts
// its own tenant alone, as long as its slabs are retired when they come back; where they are
// scrubbed instead, workers are trusted.
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
    // In the order of ranks: a slab's descriptors are in it too.
    std::vector<int> gpus = {0};
    uint32_t slabs = 0;
    // On each GPU; a multiple of their granularity (2 MiB).
    Bytes slab_bytes = MiB(32);
    // Of this broker process; names its memory apart from that of earlier ones.
    uint32_t generation = 1;
    // Descriptors that this process needs besides those of the pool.
    uint32_t other_descriptors = 4096;
  };

  // Creates no memory yet. FailedPrecondition when a GPU is not there, or smaller than the pool.
  static absl::StatusOr<std::unique_ptr<CudaSlabDevice>> Open(const Options& options);
  ~CudaSlabDevice() override;

  std::string name() const override { return "cuda"; }
  size_t pieces() const override { return gpus_.size(); }

  // Finds out how fast the links are, with some memory of each GPU for as long as it takes. Before
  // any other use of the device, while no worker copies.
  absl::Status MeasureLinks();
  std::vector<Link> Links() const override { return links_; }

  absl::Status Create(SlabId slab) override;
  absl::Status CheckMemory(const SlabDescriptors& memory, const Identity& granted) const override;
  absl::Status Adopt(SlabId slab, SlabDescriptors memory, const Identity& granted) override;
  absl::Status Scrub(absl::Span<const SlabId> slabs) override;
  absl::Status Retire(SlabId slab) override;
  std::shared_ptr<const SlabDescriptors> Descriptors(SlabId slab) override;
  Identity IdentityOf(SlabId slab) override;
  absl::StatusOr<UniqueFd> CreateBeside(int gpu) override;
  // Memory keeps its name for as long as it exists, so workers may keep what they imported.
  uint64_t MemoryId(SlabId slab) override { return IdentityOf(slab).inode; }

  // Of the GPU of that rank.
  const CudaContext& context(size_t rank) const { return *gpus_[rank].context; }

 private:
  struct Gpu {
    CudaContextPtr context;
    CudaAddressRange range;
    CudaStream stream;
  };
  // By rank; empty while the slab has no memory.
  using Stripe = std::vector<CudaAllocation>;
  struct Slab {
    Stripe memory;
    std::shared_ptr<const SlabDescriptors> descriptors;
    Identity identity;
  };

  CudaSlabDevice(const Options& options, std::vector<Gpu> gpus)
      : options_(options), gpus_(std::move(gpus)), slabs_(options.slabs) {}

  static absl::StatusOr<Link> MeasureLink(const Gpu& gpu);
  static absl::StatusOr<Gpu> OpenGpu(const Options& options, int ordinal);

  absl::Status CheckId(SlabId slab) const;
  // InvalidArgument for an unknown slab, AlreadyExists for one that has memory.
  absl::Status CheckEmpty(SlabId slab) const;
  Bytes Place(SlabId slab) const { return options_.slab_bytes * slab.value(); }
  // Maps it at the slab's place on every GPU, or on none.
  absl::Status Map(SlabId slab, const Stripe& memory);
  absl::Status MapPiece(SlabId slab, const Gpu& gpu, const CudaAllocation& memory) const;
  // On the first `count` GPUs.
  absl::Status Unmap(SlabId slab, size_t count);
  // Slabs first .. first + count - 1 on every GPU; enqueued.
  absl::Status Zero(SlabId first, uint32_t count);
  absl::Status AwaitZeroed();
  absl::Status NewMemory(SlabId slab);
  // Takes the slab's memory away, if it has any.
  absl::Status Drop(SlabId slab);
  bool HasMemory(SlabId slab) const;
  void Install(SlabId slab, Stripe memory, SlabDescriptors descriptors, const Identity& identity);

  const Options options_;
  const std::vector<Gpu> gpus_;
  std::vector<Link> links_;

  mutable Mutex mu_;
  std::vector<Slab> slabs_ ABSL_GUARDED_BY(mu_);
  uint32_t created_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_DEVICE_CUDA_SLAB_DEVICE_H_
