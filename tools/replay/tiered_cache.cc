#include "tools/replay/tiered_cache.h"

#include <algorithm>
#include <cassert>
#include <optional>
#include <utility>

namespace palimpsest::replay {

using cache::BlockCache;
using cache::BlockHandle;

TieredCache::TieredCache(const TierCosts& costs, Bytes block, int64_t block_tokens, size_t history,
                         const PolicyMaker& policy)
    : costs_(costs),
      block_(block),
      block_tokens_(block_tokens),
      prices_(costs.tiers.size()),
      counts_(costs.tiers.size()),
      links_(costs.tiers.size()) {
  assert(!costs.tiers.empty());
  size_t above = 0;
  for (const ReplayTier& tier : costs.tiers) {
    // What comes from the tiers above was not requested since, and must be known here all the same.
    caches_.push_back(std::make_unique<BlockCache>(
        cache::BlockCacheOptions{.capacity = tier.blocks,
                                 .history = std::max(history, 2 * above),
                                 .store_requests = caches_.empty()},
        policy(tier.blocks)));
    above += tier.blocks;
  }
}

std::vector<size_t> TieredCache::Begin(const cache::RequestInfo& request,
                                       absl::Span<const BlockKey> path) {
  // What lower tiers have is looked up, and kept, before the first one makes room.
  std::vector<size_t> ends(tiers());
  std::optional<BlockCache::Outcome> first;
  for (size_t tier = tiers(); tier-- > 0;) {
    const BlockCache::Outcome outcome = caches_[tier]->Begin(request, path);
    ends[tier] = outcome.cached;
    if (tier == 0) first = outcome;
  }
  size_t end = 0;
  for (size_t tier = 0; tier < tiers(); ++tier) {
    counts_[tier].hits += static_cast<int64_t>(std::max(end, ends[tier]) - end);
    end = ends[tier] = std::max(end, ends[tier]);
  }
  Settle(0, request.arrival, *first);
  return ends;
}

void TieredCache::End(const cache::RequestEnd& end) {
  for (size_t tier = 0; tier < tiers(); ++tier) Settle(tier, end.time, caches_[tier]->End(end));
}

void TieredCache::Prefetch(size_t tier, absl::Time now, absl::Span<const BlockKey> path,
                           absl::FunctionRef<void(BlockKey)> fetched) {
  BlockCache& cache = *caches_[tier];
  size_t cached = 0;
  while (cached < path.size() && cache.IsCached(path[cached])) ++cached;
  const BlockCache::Outcome outcome = cache.Admit(now, path);
  for (size_t i = cached; i < cached + outcome.stored; ++i) fetched(path[i]);
  counts_[tier].prefetched += static_cast<int64_t>(outcome.stored);
  Settle(tier, now, outcome);
}

void TieredCache::Settle(size_t tier, absl::Time now, const BlockCache::Outcome& outcome) {
  counts_[tier].stored += static_cast<int64_t>(outcome.stored);
  counts_[tier].evicted += static_cast<int64_t>(outcome.evicted);
  counts_[tier].wasted += static_cast<int64_t>(outcome.wasted);
  // Placing calls the caches below alone.
  for (const BlockKey key : caches_[tier]->victims()) {
    if (on_evict_) on_evict_(tier, key);
    Place(tier, now, key);
  }
}

void TieredCache::Place(size_t from, absl::Time now, BlockKey key) {
  for (size_t tier = from + 1; tier < tiers(); ++tier) {
    if (caches_[tier]->IsCached(key)) return;
  }
  const size_t to = Choose(from, now, key);
  if (to == tiers()) return;
  // With all before it that the tier lacks.
  std::vector<BlockKey> path = {key};
  const BlockCache& above = *caches_[from];
  for (BlockHandle block = above.HandleOf(key); block != cache::kNoBlock;) {
    const std::optional<BlockKey> parent = above.ParentOf(block);
    if (!parent.has_value() || caches_[to]->IsCached(*parent)) break;
    path.push_back(*parent);
    block = above.HandleOf(*parent);
  }
  std::reverse(path.begin(), path.end());
  Settle(to, now, caches_[to]->Admit(now, path));
}

size_t TieredCache::Choose(size_t from, absl::Time now, BlockKey key) {
  BlockCache& cache = *caches_[from];
  const BlockHandle block = cache.HandleOf(key);
  if (block == cache::kNoBlock) return tiers();
  const std::optional<cache::Outlook> outlook = cache.policy().OutlookOf(now, block);
  if (!outlook.has_value()) return from + 1;
  const size_t position = cache.PositionOf(block);
  size_t best = tiers();
  double most = 0;
  for (size_t tier = from + 1; tier < tiers(); ++tier) {
    const absl::Duration move = costs_.tiers[tier].Store(block_) * links_[tier].ShareAt(now);
    const double gain = RateOf(tier, *outlook, position, move) - PriceOf(tier, now);
    if (gain <= most) continue;
    most = gain;
    best = tier;
  }
  const double here = RateOf(from, *outlook, position, absl::ZeroDuration());
  prices_[from].OnEvicted(std::max(0.0, here - most), now);
  return best;
}

double TieredCache::RateOf(size_t tier, const cache::Outlook& outlook, size_t position,
                           absl::Duration move) const {
  const auto token = static_cast<int64_t>(position) * block_tokens_;
  return blocks::WorthRate(outlook,
                           {.otherwise = costs_.Recompute(token, token + block_tokens_),
                            .load = costs_.tiers[tier].Load(block_),
                            .move = move},
                           block_);
}

double TieredCache::PriceOf(size_t tier, absl::Time now) const {
  return caches_[tier]->cached() < caches_[tier]->capacity() ? 0 : prices_[tier].At(now);
}

double TieredCache::PrefetchGain(size_t from, size_t to, double probability, absl::Duration held,
                                 absl::Time now) const {
  const double seconds = std::max(absl::ToDoubleSeconds(held), 1e-3);
  return blocks::WorthRate({.reuse = probability, .hits_per_second = probability / seconds},
                           {.otherwise = costs_.tiers[from].Load(block_),
                            .load = costs_.tiers[to].Load(block_),
                            .move = absl::ZeroDuration()},
                           block_) -
         PriceOf(to, now);
}

void TieredCache::OnLoad(size_t tier, absl::Time now, Bytes bytes) {
  links_[tier].OnLoad(costs_.tiers[tier].Load(bytes), now);
}

}  // namespace palimpsest::replay
