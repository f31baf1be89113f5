// The policies that give a cached block a score whenever it is used and evict the least: LRU, LFU
// and GDSF. Of equal scores the block used longest ago goes. Formulas and sources:
// docs/policies.md.
//
// Complexity and threads: EvictionPolicy's.
#ifndef PALIMPSEST_BROKER_CORE_CACHE_SCORE_POLICIES_H_
#define PALIMPSEST_BROKER_CORE_CACHE_SCORE_POLICIES_H_

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "broker/core/cache/eviction_policy.h"
#include "broker/core/cache/indexed_heap.h"

namespace palimpsest::cache {

class ScorePolicy : public EvictionPolicy {
 public:
  void OnRequest(const RequestInfo& request, const Access& access) final;
  void OnInsert(RequestId request, BlockHandle block, BlockHandle parent) final;
  void OnEvictable(BlockHandle block) final;
  void OnPinned(BlockHandle block) final;
  std::optional<BlockHandle> ChooseVictim(absl::Time now, BlockHandle block, bool may_refuse) final;
  void OnEvict(BlockHandle block) final;

 protected:
  // Of a block that has just been used for the `uses`-th time since it was stored.
  virtual double Score(int64_t uses) const = 0;
  // A block with this score goes.
  virtual void OnEvictScore(double score) { static_cast<void>(score); }

 private:
  using Key = std::pair<double, uint64_t>;  // score, number of the last use
  struct State {
    Key key;
    int64_t uses = 0;  // 0: not cached
  };

  void Use(BlockHandle block);

  std::vector<State> states_;  // by handle
  IndexedHeap<Key> evictable_;
  uint64_t clock_ = 0;
};

class LruPolicy : public ScorePolicy {
 public:
  absl::string_view name() const override { return "lru"; }

 protected:
  double Score(int64_t uses) const override;
};

// Counts uses since the block was stored.
class LfuPolicy : public ScorePolicy {
 public:
  absl::string_view name() const override { return "lfu"; }

 protected:
  double Score(int64_t uses) const override;
};

// Greedy-Dual-Size-Frequency for blocks of one size and one cost.
class GdsfPolicy : public ScorePolicy {
 public:
  absl::string_view name() const override { return "gdsf"; }

 protected:
  double Score(int64_t uses) const override;
  void OnEvictScore(double score) override { inflation_ = score; }

 private:
  double inflation_ = 0;  // L: the score of the last victim
};

}  // namespace palimpsest::cache

#endif  // PALIMPSEST_BROKER_CORE_CACHE_SCORE_POLICIES_H_
