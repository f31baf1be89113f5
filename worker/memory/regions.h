// Which slab is mapped at which place of a worker's address ranges: the parameter region, the KV
// region, and the workspace region, which lies behind the KV region in the same range. How mapping
// is done is RegionMemory's business.
//
// The region owns a duplicate of every mapped slab's descriptors, so that slabs can be returned to
// the next broker process when this one dies. A slab may also be mapped at places that are not its
// own: aliases, which count as nobody's.
//
// Threads: thread-safe; Map and Unmap block as RegionMemory does. The caller makes sure that nobody
// accesses a place while it is mapped or unmapped.
#ifndef PALIMPSEST_WORKER_MEMORY_REGIONS_H_
#define PALIMPSEST_WORKER_MEMORY_REGIONS_H_

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "common/fd.h"
#include "common/ids.h"
#include "common/mutex.h"
#include "worker/memory/region_memory.h"

namespace palimpsest {

class SlabRegion {
 public:
  struct Held {
    SlabId slab;
    Epoch epoch;
    RegionIndex index;
    std::shared_ptr<const SlabDescriptors> memory;
    uint64_t memory_id = 0;
  };
  // A slab that was granted.
  struct Arrival {
    SlabId slab;
    Epoch epoch;
    uint64_t memory_id = 0;
    // Empty if the back-end keeps the memory.
    SlabDescriptors memory;
  };

  // Places first .. first + places of `memory` are this region's places from 0.
  SlabRegion(std::shared_ptr<RegionMemory> memory, uint32_t first, uint32_t places,
             Bytes slab_bytes)
      : memory_(std::move(memory)),
        first_(first),
        count_(places),
        slab_bytes_(slab_bytes),
        places_(places) {}
  // Unmaps what is left.
  ~SlabRegion();

  // Maps slabs at these places, one each. AlreadyExists when one is taken, InvalidArgument for one
  // outside and for descriptors that are no slabs'. All or nothing.
  absl::Status Map(std::vector<Arrival> slabs, absl::Span<const RegionIndex> indexes);

  // As Map, at the lowest free places, which are returned in the slabs' order. ResourceExhausted
  // when there are too few.
  absl::StatusOr<std::vector<RegionIndex>> MapAnywhere(std::vector<Arrival> slabs);

  // Gives places up and says which slabs were there. NotFound, with nothing changed, when there was
  // none at one of them, or an alias.
  absl::StatusOr<std::vector<SlabId>> Unmap(absl::Span<const RegionIndex> indexes);
  // Everything; for the end.
  absl::Status UnmapAll();

  // The two halves of moving slabs that stay with this process. First gives places up, aliases too;
  // the slabs' memory is the caller's to keep. NotFound, with nothing changed, as Unmap.
  absl::Status Vacate(absl::Span<const RegionIndex> indexes);
  // Then maps slabs at their `index` in this region, and aliases of slabs at theirs. Errors as Map.
  absl::Status Occupy(std::vector<Held> slabs, std::vector<Held> aliases);

  // What is mapped, by place; of these four, aliases are known to the last one alone.
  std::vector<Held> held() const;
  int32_t mapped() const;
  bool IsMapped(RegionIndex index) const;
  bool IsTaken(RegionIndex index) const;

  bool Contains(RegionIndex index) const { return index.value() < places(); }

  uint32_t places() const { return count_; }
  Bytes slab_bytes() const { return slab_bytes_; }
  // On the GPU of that rank.
  std::byte* base(int rank = 0) const {
    return memory_->base(rank) + (slab_bytes_ * first_).count();
  }
  std::byte* at(RegionIndex index, int rank = 0) const {
    return base(rank) + (slab_bytes_ * index.value()).count();
  }

 private:
  struct Place {
    bool taken = false;  // also while Map is under way
    bool alias = false;
    std::optional<Held> held;
  };

  // Takes free places for what will be mapped there.
  absl::Status Take(absl::Span<const RegionIndex> indexes);
  absl::Status MapTaken(std::vector<Arrival> slabs, absl::Span<const RegionIndex> indexes);
  // Maps at places that were taken, and frees them again if that fails; `slabs` are the places' own
  // but for the last `aliases` of them.
  absl::Status OccupyTaken(std::vector<Held> slabs, size_t aliases);
  // Of places that are taken and no longer held.
  absl::Status UnmapVacated(absl::Span<const RegionIndex> indexes);
  RegionIndex InMemory(RegionIndex index) const { return RegionIndex(first_ + index.value()); }

  const std::shared_ptr<RegionMemory> memory_;
  const uint32_t first_;
  const uint32_t count_;
  const Bytes slab_bytes_;

  mutable Mutex mu_;
  std::vector<Place> places_ ABSL_GUARDED_BY(mu_);
  int32_t mapped_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_REGIONS_H_
