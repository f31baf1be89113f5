#include "broker/core/reuse/segment_pool.h"

#include <utility>

namespace palimpsest::reuse {

SegmentId SegmentPool::Allocate() {
  if (free_.empty()) {
    free_.push_back(SegmentId(static_cast<uint32_t>(segments_.size())));
    segments_.emplace_back();
  }
  const SegmentId id = free_.back();
  free_.pop_back();
  return id;
}

void SegmentPool::Free(SegmentId id) {
  std::vector<Run> runs = std::move(At(id).runs);  // keeps its memory
  runs.clear();
  At(id) = {};
  At(id).runs = std::move(runs);
  free_.push_back(id);
}

void SegmentPool::Push(SegmentId id, size_t bin) {
  Bin& list = bins_[bin];
  Segment& segment = At(id);
  segment.bin = static_cast<uint8_t>(bin);
  segment.older = list.youngest;
  segment.younger = kNoSegment;
  (list.youngest == kNoSegment ? list.oldest : At(list.youngest).younger) = id;
  list.youngest = id;
}

void SegmentPool::Remove(SegmentId id) {
  Segment& segment = At(id);
  Bin& list = bins_[segment.bin];
  (segment.older == kNoSegment ? list.oldest : At(segment.older).younger) = segment.younger;
  (segment.younger == kNoSegment ? list.youngest : At(segment.younger).older) = segment.older;
  segment.older = segment.younger = kNoSegment;
}

}  // namespace palimpsest::reuse
