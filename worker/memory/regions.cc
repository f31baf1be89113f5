#include "worker/memory/regions.h"

#include <iterator>

#include "absl/strings/str_cat.h"

namespace palimpsest {

SlabRegion::~SlabRegion() { (void)UnmapAll(); }

absl::Status SlabRegion::Take(absl::Span<const RegionIndex> indexes) {
  MutexLock lock(&mu_);
  for (size_t i = 0; i < indexes.size(); ++i) {
    const RegionIndex index = indexes[i];
    absl::Status status;
    if (!Contains(index)) {
      status = absl::InvalidArgumentError(
          absl::StrCat("place ", index.ToString(), " of a region of ", places()));
    } else if (places_[index.value()].taken) {
      status = absl::AlreadyExistsError(
          absl::StrCat("place ", index.ToString(), " of the region is taken"));
    }
    if (!status.ok()) {
      while (i > 0) places_[indexes[--i].value()].taken = false;
      return status;
    }
    places_[index.value()].taken = true;
  }
  return absl::OkStatus();
}

absl::Status SlabRegion::Map(std::vector<Arrival> slabs, absl::Span<const RegionIndex> indexes) {
  if (absl::Status status = Take(indexes); !status.ok()) return status;
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
  std::vector<Held> held;
  for (size_t i = 0; i < slabs.size(); ++i) {
    std::shared_ptr<const SlabDescriptors> descriptors;
    if (!slabs[i].memory.empty()) {
      descriptors = std::make_shared<const SlabDescriptors>(std::move(slabs[i].memory));
    }
    held.push_back(
        {slabs[i].slab, slabs[i].epoch, indexes[i], std::move(descriptors), slabs[i].memory_id});
  }
  return OccupyTaken(std::move(held), 0);
}

absl::Status SlabRegion::Occupy(std::vector<Held> slabs, std::vector<Held> aliases) {
  const size_t count = aliases.size();
  slabs.insert(slabs.end(), std::make_move_iterator(aliases.begin()),
               std::make_move_iterator(aliases.end()));
  std::vector<RegionIndex> indexes;
  for (const Held& slab : slabs) indexes.push_back(slab.index);
  if (absl::Status status = Take(indexes); !status.ok()) return status;
  return OccupyTaken(std::move(slabs), count);
}

absl::Status SlabRegion::OccupyTaken(std::vector<Held> slabs, size_t aliases) {
  std::vector<RegionMemory::Piece> pieces;
  for (const Held& slab : slabs) {
    pieces.push_back({InMemory(slab.index), slab.slab, slab.memory_id, slab.memory});
  }
  absl::Status status = memory_->Map(absl::MakeSpan(pieces));
  MutexLock lock(&mu_);
  for (size_t i = 0; i < slabs.size(); ++i) {
    Place& place = places_[slabs[i].index.value()];
    if (!status.ok()) {
      place.taken = false;
      continue;
    }
    place.alias = i + aliases >= slabs.size();
    slabs[i].memory = std::move(pieces[i].descriptors);
    place.held = std::move(slabs[i]);
    mapped_ += place.alias ? 0 : 1;
  }
  return status;
}

absl::StatusOr<std::vector<SlabId>> SlabRegion::Unmap(absl::Span<const RegionIndex> indexes) {
  std::vector<SlabId> slabs;
  {
    MutexLock lock(&mu_);
    for (const RegionIndex index : indexes) {
      if (!Contains(index) || !places_[index.value()].held.has_value() ||
          places_[index.value()].alias) {
        return absl::NotFoundError(absl::StrCat("no slab is at place ", index.ToString()));
      }
      slabs.push_back(places_[index.value()].held->slab);
    }
    for (const RegionIndex index : indexes) {
      places_[index.value()].held.reset();
      --mapped_;
    }
  }
  if (absl::Status status = UnmapVacated(indexes); !status.ok()) return status;
  return slabs;
}

absl::Status SlabRegion::Vacate(absl::Span<const RegionIndex> indexes) {
  {
    MutexLock lock(&mu_);
    for (const RegionIndex index : indexes) {
      if (!Contains(index) || !places_[index.value()].held.has_value()) {
        return absl::NotFoundError(absl::StrCat("nothing is mapped at place ", index.ToString()));
      }
    }
    for (const RegionIndex index : indexes) {
      Place& place = places_[index.value()];
      mapped_ -= place.alias ? 0 : 1;
      place.alias = false;
      place.held.reset();
    }
  }
  return UnmapVacated(indexes);
}

absl::Status SlabRegion::UnmapVacated(absl::Span<const RegionIndex> indexes) {
  std::vector<RegionIndex> places;
  for (const RegionIndex index : indexes) places.push_back(InMemory(index));
  if (absl::Status status = memory_->Unmap(places); !status.ok()) return status;
  MutexLock lock(&mu_);
  for (const RegionIndex index : indexes) places_[index.value()].taken = false;
  return absl::OkStatus();
}

absl::Status SlabRegion::UnmapAll() {
  std::vector<RegionIndex> indexes;
  {
    MutexLock lock(&mu_);
    for (uint32_t i = 0; i < count_; ++i) {
      if (places_[i].held.has_value()) indexes.push_back(RegionIndex(i));
    }
  }
  return indexes.empty() ? absl::OkStatus() : Vacate(indexes);
}

std::vector<SlabRegion::Held> SlabRegion::held() const {
  std::vector<Held> all;
  MutexLock lock(&mu_);
  for (const Place& place : places_) {
    if (place.held.has_value() && !place.alias) all.push_back(*place.held);
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
  return places_[index.value()].held.has_value() && !places_[index.value()].alias;
}

bool SlabRegion::IsTaken(RegionIndex index) const {
  if (!Contains(index)) return false;
  MutexLock lock(&mu_);
  return places_[index.value()].taken;
}

}  // namespace palimpsest
