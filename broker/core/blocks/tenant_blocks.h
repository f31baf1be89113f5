// One tenant's blocks: which lie where, how they are ranked in each tier, what is counted of them.
// Each method is one fact about one block; it changes state, rankings, counters and events
// together. What to do about it is decided elsewhere (block_directory_impl.h).
//
// Threads: none. Broken requirements abort.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_TENANT_BLOCKS_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_TENANT_BLOCKS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/core/blocks/block_actions.h"
#include "broker/core/blocks/block_directory.h"
#include "broker/core/blocks/block_events.h"
#include "broker/core/blocks/block_tree.h"
#include "broker/core/blocks/placement.h"
#include "broker/core/blocks/prefetcher.h"
#include "broker/core/blocks/tier_counters.h"
#include "broker/core/blocks/tier_rank.h"
#include "broker/core/cache/block_list.h"

namespace palimpsest::blocks {

// All legal transitions:
//   kNo      -> kWriting  a session has reserved it, the directory's own for a promotion
//   kWriting -> kRanked   committed
//   kWriting -> kNo       aborted
//   kRanked  -> kLeaving  chosen to go, and a lower tier is given a copy
//   kRanked  -> kSpare    chosen to go: its room is used when it is needed
//   kLeaving -> kSpare    the copy ended
//   kLeaving, kSpare -> kRanked  a request came back for it
//   kRanked, kLeaving, kSpare -> kNo  dropped
enum class InArena : uint8_t { kNo, kWriting, kRanked, kLeaving, kSpare };

// In a lower tier.
struct Copy {
  TierIndex tier;
  Bytes length;
  uint64_t checksum = 0;
  absl::Time expiry;
  bool leaving = false;  // not ranked: its removal was asked for, or waits for a copy further down
  // Another node's, in a tier that they share: neither ranked nor accounted here, nor ever leaving.
  bool foreign = false;
};

struct PlacedBlock {
  InArena arena = InArena::kNo;
  bool doomed = false;  // purged while it was written: must not be served
  // Being loaded, and nobody asked for it.
  std::optional<prefetch::Trigger> prefetched;
  uint64_t retention = 0;         // by which it is retained; 0: none
  uint8_t promoted_from = 0;      // the tier, until it is used
  bool promoted_foreign = false;  // another node had it there
  bool load_queued = false;
  Bytes length;       // in the arena
  TransferId load{};  // under way, 0: none
  TransferId store{};
  cache::Outlook at_least;  // what blocks that hang on it and were kept were expected to do
  // Of `copies`.
  std::unique_ptr<BlockIdentity> id;
  absl::InlinedVector<Copy, 1> copies;

  Copy* CopyIn(TierIndex tier);
  // In the arena, for whoever acquires it.
  bool ready() const { return arena != InArena::kNo && arena != InArena::kWriting; }
  // Not leaving.
  bool HasCopy() const;
};

struct TierAccount {
  TierCounters counters;  // but used, capacity and price
  Bytes budget;
  Bytes unit;
  Bytes copies;   // lower tiers: of all copies but foreign ones
  Bytes leaving;  // of them
  Bytes writing;  // stores under way
  TierPrice price;

  Bytes Rounded(Bytes length) const { return RoundUp(length, unit); }
  // What is left of it when those that leave have left.
  Bytes Staying() const { return copies - leaving + writing; }
  Bytes Used() const { return copies + writing; }
  void Refuse(Refusal why) { ++counters.refusals[static_cast<size_t>(why)]; }
};

class TenantBlocks {
 public:
  TenantBlocks(const BlockTenant& tenant, const DirectoryOptions& options, BlockEvents& events);

  TenantId id() const { return tenant_.id; }
  const std::string& name() const { return tenant_.name; }
  const BlockTree& tree() const { return tree_; }
  BlockTree& tree() { return tree_; }
  size_t tiers() const { return ranks_.size(); }
  TierRank& rank(TierIndex tier) { return *ranks_[tier.value()]; }
  TierAccount& account(TierIndex tier) { return accounts_[tier.value()]; }
  const TierAccount& account(TierIndex tier) const { return accounts_[tier.value()]; }
  PlacedBlock& At(BlockHandle block);
  Prefetcher& prefetcher() { return prefetcher_; }
  const Prefetcher& prefetcher() const { return prefetcher_; }
  void set_recompute(const RecomputeCost& cost) { tenant_.recompute = cost; }

  // Requests, for the policies.

  // Whether running requests make more blocks known than may be.
  bool Crowded() const;
  // The handles of a whole path, known or new. `known`: leading ones that were known. Shorter than
  // `ids` if a key means a block behind another one, or if a new one would be too many.
  std::vector<BlockHandle> Name(absl::Span<const BlockIdentity> ids, size_t& known);
  // Only as far as they are known.
  std::vector<BlockHandle> Find(absl::Span<const BlockIdentity> ids) const;
  cache::RequestId Begin(const AcquireRequest& request, absl::Span<const BlockHandle> path,
                         size_t known, absl::Time now);
  // A new block, which hangs on what the running request has named so far.
  void Extend(cache::RequestId request, BlockHandle block);
  cache::RequestEnd End(cache::RequestId request, const RequestEnding& ending, absl::Time now);
  // New blocks, each the parent of the next one, of no request that is known.
  void NameStrangers(absl::Span<const BlockHandle> path, absl::Time now);
  void ForgetOldest();

  // Whether the policy tells more of the block than of any other.
  bool Predicts(BlockHandle block, absl::Time now) {
    return rank(kArenaTier).policy().OutlookOf(now, block).has_value();
  }
  cache::Outlook OutlookOf(BlockHandle block, absl::Time now);
  // What it is worth in a tier as long as nothing but recomputing could replace it.
  double RateOf(BlockHandle block, Bytes length, absl::Duration load, absl::Duration move,
                absl::Time now);

  // The arena.

  void Reserved(BlockHandle block, Bytes length);
  void Unreserved(BlockHandle block);
  // From a lower tier, if it was promoted.
  void Committed(BlockHandle block, TierIndex from);
  // kRanked, chosen to go, and not retained.
  void Leave(BlockHandle block, InArena to);
  void Spare(BlockHandle block);
  // An Acquire pins it: a hit of T1, or, if it was waited for, of the tier that it came from.
  void Pinned(BlockHandle block, bool waited);
  // It must not be chosen to go until Unretain, or until it is dropped. Requires that it is ready.
  void Retain(BlockHandle block, uint64_t retention);
  void Unretain(BlockHandle block);
  Bytes retained_bytes() const { return account(kArenaTier).counters.retained; }
  void Unpinned(BlockHandle block) { rank(kArenaTier).Unpin(block); }
  void Dropped(BlockHandle block);
  BlockHandle oldest_spare() const { return spare_.oldest(); }
  Bytes spare_bytes() const { return spare_bytes_; }
  Bytes leaving_bytes() const { return leaving_bytes_; }

  // Lower tiers.

  void Stored(BlockHandle block, TierIndex tier, const BlockRecord& record, bool foreign);
  // One that is not foreign.
  void LeaveTier(BlockHandle block, TierIndex tier);
  void Removed(BlockHandle block, TierIndex tier);

  // Rankings against residency, sums. O(known blocks).
  absl::Status CheckConsistency() const;

 private:
  cache::Outlook Guess() const;
  // Of a block that is ready: kRanked from now on.
  void ComeBack(BlockHandle block);
  void Count(BlockEvent::Kind kind, TierIndex tier, BlockHandle block);

  BlockTenant tenant_;
  const size_t history_;
  BlockEvents& events_;
  BlockTree tree_;
  Prefetcher prefetcher_;
  std::vector<std::unique_ptr<TierRank>> ranks_;  // by tier
  std::vector<TierAccount> accounts_;
  std::deque<PlacedBlock> blocks_;  // by handle; references last
  cache::BlockList spare_;          // in the order in which they were chosen
  Bytes spare_bytes_;
  Bytes leaving_bytes_;
  uint64_t last_request_ = 0;
};

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_TENANT_BLOCKS_H_
