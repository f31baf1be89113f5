#include "worker/memory/regions.h"

#include "absl/strings/str_cat.h"

namespace palimpsest {

SlabRegion::~SlabRegion() { (void)UnmapAll(); }

absl::Status SlabRegion::Map(std::vector<Arrival> slabs, absl::Span<const RegionIndex> indexes) {
  {
    MutexLock lock(&mu_);
    for (const RegionIndex index : indexes) {
      if (!Contains(index)) {
        return absl::InvalidArgumentError(
            absl::StrCat("place ", index.ToString(), " of a region of ", places()));
      }
      if (places_[index.value()].taken) {
        return absl::AlreadyExistsError(
            absl::StrCat("place ", index.ToString(), " of the region is taken"));
      }
    }
    for (const RegionIndex index : indexes) places_[index.value()].taken = true;
  }
  return MapTaken(std::move(slabs), indexes);
}

absl::StatusOr<std::vector<RegionIndex>> SlabRegion::MapAnywhere(std::vector<Arrival> slabs) {
  std::vector<RegionIndex> indexes;
  {
    MutexLock lock(&mu_);
    for (uint32_t i = 0; i < places_.size() && indexes.size() < slabs.size(); ++i) {
      if (!places_[i].taken) indexes.push_back(RegionIndex(i));
    }
    if (indexes.size() < slabs.size()) {
      return absl::ResourceExhaustedError(absl::StrCat(slabs.size(), " slabs for ", indexes.size(),
                                                       " free places of the region's ", places()));
    }
    for (const RegionIndex index : indexes) places_[index.value()].taken = true;
  }
  if (absl::Status status = MapTaken(std::move(slabs), indexes); !status.ok()) return status;
  return indexes;
}

absl::Status SlabRegion::MapTaken(std::vector<Arrival> slabs,
                                  absl::Span<const RegionIndex> indexes) {
  std::vector<RegionMemory::Piece> pieces;
  for (size_t i = 0; i < slabs.size(); ++i) {
    std::shared_ptr<const SlabDescriptors> descriptors;
    if (!slabs[i].memory.empty()) {
      descriptors = std::make_shared<const SlabDescriptors>(std::move(slabs[i].memory));
    }
    pieces.push_back(
        {InMemory(indexes[i]), slabs[i].slab, slabs[i].memory_id, std::move(descriptors)});
  }
  absl::Status status = memory_->Map(absl::MakeSpan(pieces));
  MutexLock lock(&mu_);
  for (size_t i = 0; i < slabs.size(); ++i) {
    Place& place = places_[indexes[i].value()];
    if (status.ok()) {
      place.held =
          Held{slabs[i].slab, slabs[i].epoch, indexes[i], std::move(pieces[i].descriptors)};
      ++mapped_;
    } else {
      place.taken = false;
    }
  }
  return status;
}

absl::StatusOr<std::vector<SlabId>> SlabRegion::Unmap(absl::Span<const RegionIndex> indexes) {
  std::vector<SlabId> slabs;
  std::vector<RegionIndex> places;
  {
    MutexLock lock(&mu_);
    for (const RegionIndex index : indexes) {
      if (!Contains(index) || !places_[index.value()].held.has_value()) {
        return absl::NotFoundError(absl::StrCat("nothing is mapped at place ", index.ToString()));
      }
      slabs.push_back(places_[index.value()].held->slab);
      places.push_back(InMemory(index));
    }
    for (const RegionIndex index : indexes) {
      places_[index.value()].held.reset();
      --mapped_;
    }
  }
  if (absl::Status status = memory_->Unmap(places); !status.ok()) return status;
  MutexLock lock(&mu_);
  for (const RegionIndex index : indexes) places_[index.value()].taken = false;
  return slabs;
}

absl::Status SlabRegion::UnmapAll() {
  std::vector<RegionIndex> indexes;
  for (const Held& slab : held()) indexes.push_back(slab.index);
  return indexes.empty() ? absl::OkStatus() : Unmap(indexes).status();
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
