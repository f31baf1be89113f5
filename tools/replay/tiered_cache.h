// The tiers of one node as caches of blocks, without their data: the first one, in which requests
// run, stores what they compute; what a tier evicts goes to one below it, with what stands before
// it in its path, or nowhere. A policy that predicts places by worth and price
// (broker/core/blocks/placement.h); with others it goes one tier down. A copy that a tier has
// already is not stored again, and stays where it is when the block is used above.
//
// Two things are as they have to be for the sums to be right. A tier's price is what its victims
// lose: the rate that they had there, less what they gain where they go. And moving a block takes
// from others what its transfer makes loads wait: its length times the share of the link that loads
// keep busy.
//
// Threads: none.
#ifndef PALIMPSEST_TOOLS_REPLAY_TIERED_CACHE_H_
#define PALIMPSEST_TOOLS_REPLAY_TIERED_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/core/blocks/placement.h"
#include "broker/core/cache/block_cache.h"
#include "tools/replay/tier_costs.h"

namespace palimpsest::replay {

// Blocks that came into a tier, and went.
struct TierCounts {
  int64_t hits = 0;        // used from there, of the blocks that no faster tier has
  int64_t stored = 0;      // in the first tier: computed, or loaded for a request
  int64_t prefetched = 0;  // of these, those fetched ahead of their use
  int64_t evicted = 0;
  int64_t wasted = 0;  // of these, those that were not used since they came

  friend bool operator==(const TierCounts&, const TierCounts&) = default;
};

class TieredCache {
 public:
  // Of the policy of a tier with so many blocks.
  using PolicyMaker = std::function<std::unique_ptr<cache::EvictionPolicy>(size_t blocks)>;

  // `costs` outlives it.
  TieredCache(const TierCosts& costs, Bytes block, int64_t block_tokens, size_t history,
              const PolicyMaker& policy);

  size_t tiers() const { return caches_.size(); }

  // Of each tier: where the part of the path ends that it or a faster one has.
  std::vector<size_t> Begin(const cache::RequestInfo& request, absl::Span<const BlockKey> path);
  void End(const cache::RequestEnd& end);

  bool IsCached(size_t tier, BlockKey key) const { return caches_[tier]->IsCached(key); }
  // Stores the head of a path in the tier; tells of each block that it did not have.
  void Prefetch(size_t tier, absl::Time now, absl::Span<const BlockKey> path,
                absl::FunctionRef<void(BlockKey)> fetched);

  // The rate of fetching a block from tier `from` to tier `to`, where it is used with that
  // probability within that time, less the price there.
  double PrefetchGain(size_t from, size_t to, double probability, absl::Duration held,
                      absl::Time now) const;

  // `bytes` are loaded from the tier.
  void OnLoad(size_t tier, absl::Time now, Bytes bytes);

  // Called with each block that a tier evicts.
  void OnEvict(std::function<void(size_t tier, BlockKey)> callback) {
    on_evict_ = std::move(callback);
  }

  const TierCounts& counts(size_t tier) const { return counts_[tier]; }
  double price(size_t tier) const { return prices_[tier].last(); }
  const cache::EvictionPolicy& policy(size_t tier) const { return caches_[tier]->policy(); }

 private:
  // Counts the outcome of a call to the tier's cache, and places its victims.
  void Settle(size_t tier, absl::Time now, const cache::BlockCache::Outcome& outcome);
  void Place(size_t from, absl::Time now, BlockKey key);
  // Below `from`; tiers(): nowhere.
  size_t Choose(size_t from, absl::Time now, BlockKey key);
  // What a byte-second in the tier is worth to a block, with what moving it there costs or without.
  double RateOf(size_t tier, const cache::Outlook& outlook, size_t position,
                absl::Duration move) const;
  double PriceOf(size_t tier, absl::Time now) const;

  const TierCosts& costs_;
  const Bytes block_;
  const int64_t block_tokens_;
  std::vector<std::unique_ptr<cache::BlockCache>> caches_;
  std::vector<blocks::TierPrice> prices_;
  std::vector<TierCounts> counts_;
  std::vector<blocks::LinkUse> links_;
  std::function<void(size_t, BlockKey)> on_evict_;
};

}  // namespace palimpsest::replay

#endif  // PALIMPSEST_TOOLS_REPLAY_TIERED_CACHE_H_
