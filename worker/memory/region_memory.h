// What regions and images are made of: one implementation for slabs of host memory, one for slabs
// of GPUs (worker/memory/cuda). The client above knows places, epochs and sessions; this knows
// memory. Where a worker has several GPUs, a slab is a piece on each and a place is the same place
// of a range on each: what happens to one happens to all. They are numbered by rank.
//
// Threads: thread-safe for different places of a region. Map blocks while the kernel or the driver
// works; nobody may access a place while it is mapped or unmapped.
#ifndef PALIMPSEST_WORKER_MEMORY_REGION_MEMORY_H_
#define PALIMPSEST_WORKER_MEMORY_REGION_MEMORY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "common/fd.h"
#include "common/ids.h"
#include "worker/memory/image_restorer.h"

namespace palimpsest {

// A range of addresses that is reserved once, in slab-sized places; one on each GPU.
class RegionMemory {
 public:
  struct Piece {
    RegionIndex place;
    SlabId slab;
    // GrantedSlab.memory_id.
    uint64_t memory_id = 0;
    // One for each rank. Null: the memory is mapped that MemoryBackend::Keeps(memory_id) spoke of.
    std::shared_ptr<const SlabDescriptors> descriptors;
  };

  virtual ~RegionMemory() = default;

  // Of place 0. For a GPU an address that only kernels and the driver may use.
  virtual std::byte* base(int rank) const = 0;

  // Maps slabs at free places, so that every access works from then on, and sets the descriptors of
  // pieces that came without. A slab may be mapped at several places, which then show the same
  // memory. InvalidArgument if a descriptor is not a slab's. All or nothing.
  virtual absl::Status Map(absl::Span<Piece> pieces) = 0;

  // Gives mapped places up. On error their slabs must not be given back.
  virtual absl::Status Unmap(absl::Span<const RegionIndex> places) = 0;
};

// Memory of the host that a device copies from and to at its link's speed, until this ends.
class HostPin {
 public:
  virtual ~HostPin() = default;
};

class MemoryBackend {
 public:
  virtual ~MemoryBackend() = default;

  // "host" or "cuda": which slabs of a broker it can map (Attached.backend).
  virtual std::string name() const = 0;

  // Memories that each slab has a piece of (ImageManifest.ranks).
  virtual int ranks() const { return 1; }

  virtual absl::StatusOr<std::shared_ptr<RegionMemory>> Reserve(uint32_t places,
                                                                Bytes slab_bytes) = 0;

  // Takes the image's descriptor, after checking that it is a sealed, read-only memfd of exactly as
  // many slabs as there are checksums.
  virtual absl::StatusOr<std::unique_ptr<ImageRestorer>> OpenImage(UniqueFd image,
                                                                   const ImageShape& shape) = 0;

  // Pins memory that this process has mapped for writing, for copies from and to all ranks; to be
  // undone before it is unmapped. Blocks for about 40 ms a GiB. Null: nothing is to be done.
  virtual absl::StatusOr<std::unique_ptr<HostPin>> Pin(absl::Span<std::byte> /*memory*/) {
    return nullptr;
  }

  // Memory of the device that is taken, by whomever: what a step of this process's start adds to it
  // is what that took beside slabs. Unimplemented where that costs nothing.
  virtual absl::StatusOr<Bytes> DeviceMemoryUse(int /*rank*/) const {
    return absl::UnimplementedError("slabs are host memory");
  }
  // What opening the back-end took of it: a context.
  virtual Bytes context_bytes(int /*rank*/) const { return Bytes(0); }

  // Whether memory that was unmapped was kept, so that its slab can be mapped without a descriptor.
  virtual bool Keeps(uint64_t) const { return false; }

  // Lets go of everything that was kept. Its broker is gone: it would be memory that nobody knows.
  virtual void DropKept() {}
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_REGION_MEMORY_H_
