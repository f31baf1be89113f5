#include "broker/tier/extent_allocator.h"

#include <cstdio>
#include <cstdlib>
#include <iterator>

namespace palimpsest {
namespace {

[[noreturn]] void DieOverlap(Extent extent) {
  std::fprintf(stderr, "extent of %llu units at %llu was freed, but is not in use\n",
               static_cast<unsigned long long>(extent.count),
               static_cast<unsigned long long>(extent.first));
  std::abort();
}

}  // namespace

ExtentAllocator::ExtentAllocator(uint64_t units) : units_(units) {
  if (units > 0) Insert(0, units);
}

void ExtentAllocator::Insert(uint64_t first, uint64_t count) {
  by_place_.emplace(first, count);
  by_size_.emplace(count, first);
  free_units_ += count;
}

void ExtentAllocator::Erase(FreeMap::iterator place) {
  by_size_.erase({place->second, place->first});
  free_units_ -= place->second;
  by_place_.erase(place);
}

void ExtentAllocator::Cut(FreeMap::iterator place, Extent extent) {
  const auto [first, count] = *place;
  Erase(place);
  const uint64_t before = extent.first - first;
  const uint64_t after = count - before - extent.count;
  if (before > 0) Insert(first, before);
  if (after > 0) Insert(extent.first + extent.count, after);
}

std::optional<Extent> ExtentAllocator::Allocate(uint64_t count) {
  const auto fit = by_size_.lower_bound({count, 0});
  if (count == 0 || fit == by_size_.end()) return std::nullopt;
  const Extent extent{fit->second, count};
  Cut(by_place_.find(extent.first), extent);
  return extent;
}

bool ExtentAllocator::Claim(Extent extent) {
  if (extent.count == 0 || extent.first >= units_ || extent.count > units_ - extent.first) {
    return false;
  }
  auto place = by_place_.upper_bound(extent.first);
  if (place == by_place_.begin()) return false;
  --place;
  if (place->first + place->second < extent.first + extent.count) return false;
  Cut(place, extent);
  return true;
}

void ExtentAllocator::Free(Extent extent) {
  uint64_t first = extent.first, count = extent.count;
  if (count == 0 || first >= units_ || count > units_ - first) DieOverlap(extent);
  auto next = by_place_.lower_bound(first);
  if (next != by_place_.end() && next->first < first + count) DieOverlap(extent);
  if (next != by_place_.end() && next->first == first + count) {
    count += next->second;
    Erase(next);
    next = by_place_.lower_bound(first);
  }
  if (next != by_place_.begin()) {
    const auto previous = std::prev(next);
    const uint64_t end = previous->first + previous->second;
    if (end > first) DieOverlap(extent);
    if (end == first) {
      first = previous->first;
      count += previous->second;
      Erase(previous);
    }
  }
  Insert(first, count);
}

}  // namespace palimpsest
