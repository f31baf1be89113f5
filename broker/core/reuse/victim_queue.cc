#include "broker/core/reuse/victim_queue.h"

#include <bit>
#include <cassert>

namespace palimpsest::reuse {

void VictimQueue::SetWorth(ClassId id, const Worths& worth) {
  static_assert(kAgeBins <= 64);
  if (id.value() >= classes_.size()) classes_.resize(id.value() + size_t{1});
  Class& entry = classes_[id.value()];
  entry.worth = worth;
  for (uint64_t used = entry.used; used != 0; used &= used - 1) {
    const auto bin = static_cast<size_t>(std::countr_zero(used));
    buckets_.Update(BucketId(static_cast<uint32_t>(id.value() * kAgeBins + bin)), worth[bin]);
  }
}

void VictimQueue::Insert(SegmentId segment, ClassId id, size_t bin) {
  assert(!Contains(segment) && id.value() < classes_.size() && bin < kAgeBins);
  if (segment.value() >= links_.size()) links_.resize(segment.value() + size_t{1});
  Class& entry = classes_[id.value()];
  Bucket& bucket = entry.buckets[bin];
  const BucketId bucket_id(static_cast<uint32_t>(id.value() * kAgeBins + bin));
  At(segment) = {.previous = bucket.last, .next = kNoSegment, .bucket = bucket_id};
  if (bucket.last != kNoSegment) {
    At(bucket.last).next = segment;
    bucket.last = segment;
    return;
  }
  bucket = {.first = segment, .last = segment};
  buckets_.Push(bucket_id, entry.worth[bin]);
  if (entry.used == 0) {
    entry.place = static_cast<uint32_t>(live_.size());
    live_.push_back(id);
  }
  entry.used |= uint64_t{1} << bin;
}

void VictimQueue::Remove(SegmentId segment) {
  assert(Contains(segment));
  const Link link = At(segment);
  At(segment) = {};
  const size_t bin = link.bucket.value() % kAgeBins;
  Class& entry = classes_[link.bucket.value() / kAgeBins];
  Bucket& bucket = entry.buckets[bin];
  (link.previous == kNoSegment ? bucket.first : At(link.previous).next) = link.next;
  (link.next == kNoSegment ? bucket.last : At(link.next).previous) = link.previous;
  if (bucket.first != kNoSegment) return;
  buckets_.Remove(link.bucket);
  entry.used &= ~(uint64_t{1} << bin);
  if (entry.used != 0) return;
  const ClassId moved = live_.back();
  live_[entry.place] = moved;
  classes_[moved.value()].place = entry.place;
  live_.pop_back();
}

}  // namespace palimpsest::reuse
