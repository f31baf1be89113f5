// Which parts of a device are free. Pure logic: exact sizes in units, best fit (the smallest free
// extent that is large enough, the lowest among equals), neighbours merge when they are freed.
// Blocks of one model have one size, so that what one gives back the next one fits into; a fixed
// set of size classes would round every other size up.
//
// Not thread-safe. Every operation takes O(log n) in the number of free extents.
#ifndef PALIMPSEST_BROKER_TIER_EXTENT_ALLOCATOR_H_
#define PALIMPSEST_BROKER_TIER_EXTENT_ALLOCATOR_H_

#include <cstdint>
#include <optional>
#include <utility>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"

namespace palimpsest {

// Units `first` .. `first + count - 1`.
struct Extent {
  uint64_t first = 0;
  uint64_t count = 0;

  friend bool operator==(const Extent&, const Extent&) = default;
};

class ExtentAllocator {
 public:
  // Everything is free.
  explicit ExtentAllocator(uint64_t units);

  // Nothing if no free extent has `count` units; `count` > 0.
  std::optional<Extent> Allocate(uint64_t count);

  // Takes that very extent; false, with nothing changed, unless all of it is free and inside.
  bool Claim(Extent extent);

  // Aborts unless all of it is in use.
  void Free(Extent extent);

  uint64_t units() const { return units_; }
  uint64_t free_units() const { return free_units_; }
  // The largest count that Allocate would not refuse.
  uint64_t largest_free() const { return by_size_.empty() ? 0 : by_size_.rbegin()->first; }

 private:
  using FreeMap = absl::btree_map<uint64_t, uint64_t>;  // first to count; no two touch

  void Insert(uint64_t first, uint64_t count);
  void Erase(FreeMap::iterator place);
  // Cuts `extent`, which lies inside of it, out of a free one.
  void Cut(FreeMap::iterator place, Extent extent);

  const uint64_t units_;
  uint64_t free_units_ = 0;
  FreeMap by_place_;
  absl::btree_set<std::pair<uint64_t, uint64_t>> by_size_;  // (count, first) of by_place_
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_EXTENT_ALLOCATOR_H_
