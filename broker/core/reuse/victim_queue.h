// Which segment's last block goes next, when what a block is worth changes with its age.
//
// All blocks of one class and age bin are worth the same, so they share a bucket, and only buckets
// are ordered: a heap by worth. A block that ages moves to another bucket; when a class's worth is
// learned anew its buckets move in the heap and the blocks in them stay. So the order is exact at
// any time, for the worth that was set last. In a bucket the order is first in, first out.
//
// Complexity: O(1) a move between buckets that stay non-empty, else O(log buckets). Threads: none.
#ifndef PALIMPSEST_BROKER_CORE_REUSE_VICTIM_QUEUE_H_
#define PALIMPSEST_BROKER_CORE_REUSE_VICTIM_QUEUE_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "broker/core/cache/indexed_heap.h"
#include "broker/core/reuse/age_bins.h"
#include "broker/core/reuse/hazard_model.h"
#include "common/strong_int.h"

namespace palimpsest::reuse {

// Dense; recycled.
using SegmentId = StrongInt<struct ReuseSegmentIdTag, uint32_t>;
inline constexpr SegmentId kNoSegment{std::numeric_limits<uint32_t>::max()};

class VictimQueue {
 public:
  using Worths = std::array<float, kAgeBins>;

  // Before anything of the class is inserted, and whenever it changes.
  void SetWorth(ClassId id, const Worths& worth);
  float WorthOf(ClassId id, size_t bin) const { return classes_[id.value()].worth[bin]; }

  bool Contains(SegmentId segment) const {
    return segment.value() < links_.size() && links_[segment.value()].bucket != kNoBucket;
  }
  // Requires that it is not in the queue; Remove that it is.
  void Insert(SegmentId segment, ClassId id, size_t bin);
  void Remove(SegmentId segment);

  bool empty() const { return buckets_.empty(); }
  // The segment of least worth. Require that there is one.
  SegmentId Top() const { return BucketAt(buckets_.Top()).first; }
  float TopWorth() const { return buckets_.TopKey(); }

  // Classes of which something is in the queue, in an order that changes as they come and go.
  const std::vector<ClassId>& live() const { return live_; }

 private:
  using BucketId = StrongInt<struct BucketIdTag, uint32_t>;  // class * kAgeBins + bin
  static constexpr BucketId kNoBucket{std::numeric_limits<uint32_t>::max()};

  struct Bucket {
    SegmentId first = kNoSegment, last = kNoSegment;
  };
  struct Class {
    Worths worth{};
    std::array<Bucket, kAgeBins> buckets{};
    uint64_t used = 0;   // a bit for each bucket that is not empty
    uint32_t place = 0;  // in live_
  };
  struct Link {
    SegmentId previous = kNoSegment, next = kNoSegment;
    BucketId bucket = kNoBucket;
  };

  const Bucket& BucketAt(BucketId id) const {
    return classes_[id.value() / kAgeBins].buckets[id.value() % kAgeBins];
  }
  Link& At(SegmentId segment) { return links_[segment.value()]; }

  std::vector<Class> classes_;  // by id
  std::vector<Link> links_;     // by segment
  std::vector<ClassId> live_;
  cache::IndexedHeap<float, BucketId> buckets_;
};

}  // namespace palimpsest::reuse

#endif  // PALIMPSEST_BROKER_CORE_REUSE_VICTIM_QUEUE_H_
