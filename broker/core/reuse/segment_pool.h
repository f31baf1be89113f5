// Segments of the predictive policy, and those of each age bin from the oldest to the youngest.
//
// Complexity: O(1). Threads: none.
#ifndef PALIMPSEST_BROKER_CORE_REUSE_SEGMENT_POOL_H_
#define PALIMPSEST_BROKER_CORE_REUSE_SEGMENT_POOL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "broker/core/cache/eviction_policy.h"
#include "broker/core/reuse/age_bins.h"
#include "broker/core/reuse/hazard_model.h"
#include "broker/core/reuse/reuse_class.h"
#include "broker/core/reuse/transition_pairs.h"
#include "broker/core/reuse/victim_queue.h"

namespace palimpsest::reuse {

// Blocks `begin` to `end` of a path that are of one class.
struct Run {
  uint32_t begin = 0;
  uint32_t end = 0;
  uint32_t taken = 0;  // in the current age bin
  ClassId now{};
  ClassId voter{};  // its class when the bin began
};

struct Segment {
  absl::Time since{};  // when its request ended, or began as long as it runs
  cache::ConversationId conversation{};
  cache::RequestId request{};
  ReuseClass base;  // what its blocks have in common
  std::vector<Run> runs;
  uint32_t length = 0;  // blocks of the path
  uint32_t taken = 0;   // the first of them that later requests took
  uint32_t known = 0;   // and where those begin that were forgotten
  uint32_t blocks = 0;  // that are in the segment
  uint32_t turns = 0;
  cache::Ending ending = cache::Ending::kUnknown;
  bool running = false;
  bool watched = false;  // votes
  // Why blocks left in this age bin, the first time.
  std::optional<Transition> transition{};
  cache::BlockHandle leaf = cache::kNoBlock;  // the one that may be evicted
  uint8_t bin = 0;
  SegmentId older = kNoSegment, younger = kNoSegment;  // in the age bin

  // Blocks of a run that are still there.
  uint32_t Left(const Run& run) const {
    const uint32_t begin = run.begin < taken ? taken : run.begin;
    const uint32_t end = run.end < known ? run.end : known;
    return begin < end ? end - begin : 0;
  }
};

class SegmentPool {
 public:
  SegmentId Allocate();
  // Requires that it is in no age bin.
  void Free(SegmentId id);
  Segment& At(SegmentId id) { return segments_[id.value()]; }
  const Segment& At(SegmentId id) const { return segments_[id.value()]; }
  size_t size() const { return segments_.size() - free_.size(); }

  // Into bin `bin` as its youngest.
  void Push(SegmentId id, size_t bin);
  void Remove(SegmentId id);
  // kNoSegment: none.
  SegmentId Oldest(size_t bin) const { return bins_[bin].oldest; }

 private:
  struct Bin {
    SegmentId oldest = kNoSegment, youngest = kNoSegment;
  };

  std::vector<Segment> segments_;
  std::vector<SegmentId> free_;
  std::array<Bin, kAgeBins> bins_{};
};

}  // namespace palimpsest::reuse

#endif  // PALIMPSEST_BROKER_CORE_REUSE_SEGMENT_POOL_H_
