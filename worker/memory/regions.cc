#include "worker/memory/regions.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/memory_file.h"

namespace palimpsest {

absl::StatusOr<std::unique_ptr<SlabRegion>> SlabRegion::Reserve(int32_t slabs, Bytes slab_bytes) {
  absl::StatusOr<AddressRange> range = AddressRange::Reserve(slab_bytes * slabs, MiB(2));
  if (!range.ok()) return range.status();
  return std::unique_ptr<SlabRegion>(new SlabRegion(*std::move(range), slab_bytes));
}

absl::Status SlabRegion::Map(RegionIndex index, SlabId slab, Epoch epoch, UniqueFd memory) {
  if (!Contains(index)) {
    return absl::InvalidArgumentError(
        absl::StrCat("place ", index.ToString(), " of a region of ", places()));
  }
  {
    MutexLock lock(&mu_);
    Place& place = places_[index.value()];
    if (place.taken) {
      return absl::AlreadyExistsError(
          absl::StrCat("place ", index.ToString(), " of the region is taken"));
    }
    place.taken = true;
  }
  return MapTaken(index, slab, epoch, std::move(memory));
}

absl::StatusOr<RegionIndex> SlabRegion::MapAnywhere(SlabId slab, Epoch epoch, UniqueFd memory) {
  RegionIndex index;
  {
    MutexLock lock(&mu_);
    const auto free = std::find_if(places_.begin(), places_.end(),
                                   [](const Place& place) { return !place.taken; });
    if (free == places_.end()) {
      return absl::ResourceExhaustedError(
          absl::StrCat("all ", places(), " places of the region are taken"));
    }
    free->taken = true;
    index = RegionIndex(static_cast<uint32_t>(free - places_.begin()));
  }
  if (absl::Status status = MapTaken(index, slab, epoch, std::move(memory)); !status.ok()) {
    return status;
  }
  return index;
}

absl::Status SlabRegion::MapTaken(RegionIndex index, SlabId slab, Epoch epoch, UniqueFd memory) {
  absl::Status status = CheckSlabFile(memory.get(), slab_bytes_);
  if (status.ok()) {
    status = range_.Map(slab_bytes_ * index.value(), slab_bytes_, memory.get(),
                        MapAccess::kReadWrite, MapPopulate::kYes);
  }
  MutexLock lock(&mu_);
  Place& place = places_[index.value()];
  if (!status.ok()) {
    place.taken = false;
    return absl::Status(status.code(),
                        absl::StrCat("slab ", slab.ToString(), ": ", status.message()));
  }
  place.held = Held{slab, epoch, index, std::make_shared<const UniqueFd>(std::move(memory))};
  ++mapped_;
  return absl::OkStatus();
}

absl::StatusOr<SlabId> SlabRegion::Unmap(RegionIndex index) {
  std::optional<Held> held;
  if (Contains(index)) {
    MutexLock lock(&mu_);
    Place& place = places_[index.value()];
    held = std::exchange(place.held, std::nullopt);
    if (held.has_value()) --mapped_;
  }
  if (!held.has_value()) {
    return absl::NotFoundError(absl::StrCat("nothing is mapped at place ", index.ToString()));
  }
  const absl::Status status = range_.Unmap(slab_bytes_ * index.value(), slab_bytes_);
  if (!status.ok()) return status;
  MutexLock lock(&mu_);
  places_[index.value()].taken = false;
  return held->slab;
}

std::vector<SlabRegion::Held> SlabRegion::held() const {
  std::vector<Held> all;
  MutexLock lock(&mu_);
  for (const Place& place : places_) {
    if (place.held.has_value()) all.push_back(*place.held);
  }
  return all;
}

int32_t SlabRegion::mapped() const {
  MutexLock lock(&mu_);
  return mapped_;
}

bool SlabRegion::IsMapped(RegionIndex index) const {
  if (!Contains(index)) return false;
  MutexLock lock(&mu_);
  return places_[index.value()].held.has_value();
}

}  // namespace palimpsest
