// Evicts the block whose KV is worth least per second of holding it, as the hazards learned so far
// tell (HazardModel, HitDensity).
//
// Blocks last used by one request form a *segment*: what is left of its path behind the part that
// later requests took. They idle together, and it is enough to watch the segment. When one of its
// age bins closes it votes: for each *run* of its blocks of one class, the share that was reused in
// the bin; one vote a run however long, booked when the bin closes, reuse and survival together.
// Blocks that are not cached, but known, vote alike: what was evicted teaches whether that was
// right.
//
// A block that a running request comes to behind its prompt, but that another path has meanwhile
// with blocks before it, stays that one's.
//
// A segment's age counts from the end of its request. While the request runs its blocks count as
// just used, and as of an ending not known.
//
// With more than `most_watched` segments only a part of them, drawn by lot, votes: what there is to
// learn does not grow with the cache, but its cost would.
//
// Memory: O(known blocks), HazardModel's bound, and at most kMostPending segments that nothing is
// left of but a vote.
//
// Complexity: O(1) amortised a block, O(features x runs) an age bin of a segment that is watched,
// and a class whose worth is computed anew for every few votes. Threads: none.
#ifndef PALIMPSEST_BROKER_CORE_REUSE_PREDICTIVE_POLICY_H_
#define PALIMPSEST_BROKER_CORE_REUSE_PREDICTIVE_POLICY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "broker/core/cache/eviction_policy.h"
#include "broker/core/reuse/calibration.h"
#include "broker/core/reuse/hazard_model.h"
#include "broker/core/reuse/segment_pool.h"
#include "broker/core/reuse/victim_queue.h"

namespace palimpsest::reuse {

class PredictivePolicy : public cache::EvictionPolicy {
 public:
  static constexpr size_t kMostPending = size_t{1} << 16;
  static constexpr size_t kMostWatched = size_t{1} << 12;  // segments, nearly
  // A path that goes on from an earlier one may lack this many of its last blocks: the one that was
  // cut in the middle, and the answer's end, which templates rewrite.
  static constexpr uint32_t kContinuationSlack = 2;
  // After so many votes what one more class is worth is computed anew, one class after another.
  static constexpr uint64_t kVotesPerRefresh = 8;
  // After so many votes what a class is worth is old.
  static constexpr uint64_t kStaleVotes = 4096;

  explicit PredictivePolicy(const HazardModelOptions& options = {},
                            size_t most_watched = kMostWatched);

  absl::string_view name() const override { return "predictive"; }
  void OnRequest(const cache::RequestInfo& request, const cache::Access& access) override;
  void OnExtend(cache::RequestId request, cache::BlockHandle block) override;
  // Cached or not, a block counts alike.
  void OnInsert(cache::RequestId, cache::BlockHandle, cache::BlockHandle) override {}
  void OnEvictable(cache::BlockHandle block) override;
  void OnPinned(cache::BlockHandle block) override;
  std::optional<cache::BlockHandle> ChooseVictim(absl::Time now, cache::BlockHandle block,
                                                 bool may_refuse) override;
  std::optional<cache::Outlook> OutlookOf(absl::Time now, cache::BlockHandle block) override;
  void OnEvict(cache::BlockHandle block) override;
  void OnRequestEnd(const cache::RequestEnd& end) override;
  void OnForget(cache::BlockHandle block) override;

  const HazardModel& model() const { return model_; }
  // Of P(reuse before an age bin ends), as predicted just before it was known.
  const Calibration& calibration() const { return calibration_; }
  // Segments, also those that only wait for a vote.
  size_t segments() const { return segments_.size(); }

  // What a known block is worth now, per second; and whether it may be a victim. For audits.
  float WorthOf(cache::BlockHandle block);
  bool IsEvictable(cache::BlockHandle block) const;

 private:
  struct Block {
    SegmentId segment = kNoSegment;
    uint32_t index = 0;  // in the segment's path
    uint32_t uses = 0;
    cache::BlockType type = cache::BlockType::kUnknown;
  };
  // What a request's path says of it.
  struct Arrival {
    Origin origin = Origin::kNew;
    Transition transition = Transition::kNewConversation;
    uint32_t turns = 0;
  };

  // Blocks `begin` to `end` of a path, before they are cut by distance to its end.
  struct Stretch {
    uint32_t begin = 0;
    uint32_t end = 0;
    ReuseClass features;
  };

  Block& At(cache::BlockHandle handle);
  Arrival Classify(const cache::RequestInfo& request, const cache::Access& access) const;
  // Moves the path's blocks into segment `id` and describes them in stretches_.
  void Take(SegmentId id, const cache::RequestInfo& request, const cache::Access& access,
            const Arrival& arrival);
  cache::BlockType TypeOf(const cache::RequestInfo& request, size_t index, bool known,
                          const Arrival& arrival, cache::BlockType before) const;
  // Out of the segment it is in, which notes the reuse. Whether it was evictable.
  bool Leave(cache::BlockHandle handle, Transition transition);
  void MarkLeftBehind(SegmentId id);
  // Makes stretches_ the segment's runs.
  void Cut(Segment& segment);
  void DropRuns(Segment& segment);
  void Finish(SegmentId id, const cache::RequestEnd& end);
  bool DrawsWatch();

  void Advance(absl::Time now);
  void CloseBin(SegmentId id);
  void Vote(Segment& segment);
  // Of a segment whose request has ended, after blocks left it.
  void FreeIfEmpty(SegmentId id);
  void Free(SegmentId id);

  void Enqueue(SegmentId id);
  void Dequeue(SegmentId id);
  ClassId ClassOf(const Segment& segment, uint32_t index) const;
  // Computes what the class is worth if that is not known, or old.
  void EnsureWorth(ClassId id);
  void ComputeWorth(ClassId id);
  void RefreshSome();

  const size_t most_watched_;
  HazardModel model_;
  Calibration calibration_;
  SegmentPool segments_;
  VictimQueue queue_;
  std::vector<Block> blocks_;  // by handle
  absl::flat_hash_map<cache::RequestId, SegmentId> running_;
  std::vector<SegmentId> touched_;  // by the request in OnRequest
  std::vector<Stretch> stretches_;
  absl::Time advanced_ = absl::InfinitePast();
  size_t pending_ = 0;  // segments without blocks
  uint64_t votes_ = 0;
  uint64_t refreshed_ = 0;  // votes that RefreshSome has answered
  uint64_t finished_ = 0;   // segments so far
  size_t next_refresh_ = 0;
  struct Computed {
    uint64_t serial = 0;
    uint64_t votes = 0;
    std::array<float, kAgeBins> reuse{};  // ReuseAtAll
  };
  std::vector<Computed> computed_;  // by class: when its worth was, and what with it
};

}  // namespace palimpsest::reuse

#endif  // PALIMPSEST_BROKER_CORE_REUSE_PREDICTIVE_POLICY_H_
