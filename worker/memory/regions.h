// An address range of the worker that slabs are mapped into, at slab-sized places: the parameter
// region or the KV region. Reserved once, so that addresses never change; what is not mapped
// faults.
//
// The region owns a duplicate of every mapped slab's descriptor, so that slabs can be returned to
// the next broker process when this one dies.
//
// Threads: thread-safe; Map and Unmap block for as long as the kernel takes to populate. The caller
// makes sure that nobody accesses a place while it is mapped or unmapped.
#ifndef PALIMPSEST_WORKER_MEMORY_REGIONS_H_
#define PALIMPSEST_WORKER_MEMORY_REGIONS_H_

#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/fd.h"
#include "common/ids.h"
#include "common/mapping.h"
#include "common/mutex.h"

namespace palimpsest {

class SlabRegion {
 public:
  struct Held {
    SlabId slab;
    Epoch epoch;
    RegionIndex index;
    std::shared_ptr<const UniqueFd> memory;
  };

  // Reserves `slabs` places, aligned to 2 MiB so that huge pages can be mapped as such.
  static absl::StatusOr<std::unique_ptr<SlabRegion>> Reserve(int32_t slabs, Bytes slab_bytes);

  // Maps a slab at a place, after checking that the descriptor is a slab's. Populates it, so that
  // no access faults later. AlreadyExists when the place is taken.
  absl::Status Map(RegionIndex index, SlabId slab, Epoch epoch, UniqueFd memory);

  // As Map, at the lowest free place. ResourceExhausted when there is none.
  absl::StatusOr<RegionIndex> MapAnywhere(SlabId slab, Epoch epoch, UniqueFd memory);

  // Gives a place up and says which slab was there. NotFound when there was none.
  absl::StatusOr<SlabId> Unmap(RegionIndex index);

  // What is mapped, by place.
  std::vector<Held> held() const;
  int32_t mapped() const;
  bool Contains(RegionIndex index) const { return index.value() < places(); }
  bool IsMapped(RegionIndex index) const;

  uint32_t places() const { return static_cast<uint32_t>(range_.size() / slab_bytes_); }
  Bytes slab_bytes() const { return slab_bytes_; }
  std::byte* base() const { return range_.base(); }
  std::byte* at(RegionIndex index) const { return base() + (slab_bytes_ * index.value()).count(); }

 private:
  struct Place {
    bool taken = false;  // also while Map is under way
    std::optional<Held> held;
  };

  SlabRegion(AddressRange range, Bytes slab_bytes)
      : range_(std::move(range)), slab_bytes_(slab_bytes), places_(places()) {}

  absl::Status MapTaken(RegionIndex index, SlabId slab, Epoch epoch, UniqueFd memory);

  AddressRange range_;
  const Bytes slab_bytes_;

  mutable Mutex mu_;
  std::vector<Place> places_ ABSL_GUARDED_BY(mu_);
  int32_t mapped_ ABSL_GUARDED_BY(mu_) = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_REGIONS_H_
