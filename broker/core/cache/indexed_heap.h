// A priority queue of blocks (or others with dense ids) whose keys may change: a 4-ary heap
// (Johnson, "Priority queues with update and finding minimum spanning trees", 1975) that knows
// where each block stands in it.
//
// Complexity: O(log size) a change, O(1) a look. Threads: none.
#ifndef PALIMPSEST_BROKER_CORE_CACHE_INDEXED_HEAP_H_
#define PALIMPSEST_BROKER_CORE_CACHE_INDEXED_HEAP_H_

#include <algorithm>
#include <cassert>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "broker/core/cache/eviction_policy.h"

namespace palimpsest::cache {

// The least key is on top; of equal keys the least id. Key: ordered by <, cheap to copy.
// Id: a StrongInt.
template <typename Key, typename Id = BlockHandle>
class IndexedHeap {
 public:
  bool empty() const { return entries_.empty(); }
  size_t size() const { return entries_.size(); }

  bool Contains(Id block) const {
    return block.value() < places_.size() && places_[block.value()] != kNowhere;
  }

  // Requires a block that is not in the heap.
  void Push(Id block, Key key) {
    assert(!Contains(block));
    if (block.value() >= places_.size()) places_.resize(block.value() + size_t{1}, kNowhere);
    entries_.push_back({key, block});
    Rise(entries_.size() - 1);
  }

  // The others require a block that is in it, or that it is not empty.
  Id Top() const { return entries_.front().block; }
  const Key& TopKey() const { return entries_.front().key; }

  void Update(Id block, Key key) {
    const size_t place = PlaceOf(block);
    const Entry entry{key, block};
    const bool rises = entry < entries_[place];
    entries_[place] = entry;
    rises ? Rise(place) : Sink(place);
  }

  void Remove(Id block) {
    const size_t place = PlaceOf(block);
    places_[block.value()] = kNowhere;
    const Entry last = entries_.back();
    entries_.pop_back();
    if (place == entries_.size()) return;
    const bool rises = last < entries_[place];
    entries_[place] = last;
    rises ? Rise(place) : Sink(place);
  }

 private:
  static constexpr uint32_t kNowhere = std::numeric_limits<uint32_t>::max();
  static constexpr size_t kChildren = 4;

  struct Entry {
    Key key;
    Id block;

    friend bool operator<(const Entry& a, const Entry& b) {
      if (a.key < b.key) return true;
      return !(b.key < a.key) && a.block < b.block;
    }
  };

  size_t PlaceOf(Id block) const {
    assert(Contains(block));
    return places_[block.value()];
  }

  void Put(size_t place, const Entry& entry) {
    entries_[place] = entry;
    places_[entry.block.value()] = static_cast<uint32_t>(place);
  }

  void Rise(size_t place) {
    const Entry entry = entries_[place];
    while (place > 0) {
      const size_t parent = (place - 1) / kChildren;
      if (!(entry < entries_[parent])) break;
      Put(place, entries_[parent]);
      place = parent;
    }
    Put(place, entry);
  }

  void Sink(size_t place) {
    const Entry entry = entries_[place];
    while (true) {
      const size_t first = place * kChildren + 1;
      if (first >= entries_.size()) break;
      const auto begin = entries_.begin() + static_cast<ptrdiff_t>(first);
      const auto end =
          entries_.begin() + static_cast<ptrdiff_t>(std::min(first + kChildren, entries_.size()));
      const auto least = std::min_element(begin, end);
      if (!(*least < entry)) break;
      const auto child = static_cast<size_t>(least - entries_.begin());
      Put(place, *least);
      place = child;
    }
    Put(place, entry);
  }

  std::vector<Entry> entries_;
  std::vector<uint32_t> places_;  // by handle
};

}  // namespace palimpsest::cache

#endif  // PALIMPSEST_BROKER_CORE_CACHE_INDEXED_HEAP_H_
