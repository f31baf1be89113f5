// What one tenant's conversations will need again, and when: keeps of each where its last request
// ended, and while it idles makes a wish (prefetch/prefetch_planner.h) for its blocks to be back
// when it is expected to go on, by the client's hint or by how such requests returned so far.
//
// Threads: none; times do not go back.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_PREFETCHER_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_PREFETCHER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "broker/core/blocks/block_tree.h"
#include "broker/core/cache/eviction_policy.h"
#include "broker/core/prefetch/prefetch_planner.h"
#include "broker/core/prefetch/return_times.h"

namespace palimpsest::blocks {

class Prefetcher {
 public:
  // Conversations that are remembered, those that ended last.
  static constexpr size_t kMostConversations = 4096;
  // Returns that are less likely are not prepared for.
  static constexpr double kLeastProbability = 0.5;
  // Blocks are fetched so long before they are expected to be needed, or an eighth of the idle time
  // if that is more: expectations are as coarse.
  static constexpr absl::Duration kLead = absl::Seconds(1);

  // `tree` outlives it. Nothing is fetched from `tiers` before SetBudget.
  Prefetcher(const BlockTree& tree, size_t tiers);

  // Requests of a conversation; 0, not known, has no effect. `tail`: the last block of its path, or
  // kNoBlock.
  void OnBegin(cache::ConversationId conversation, absl::Time now);
  void OnEnd(cache::ConversationId conversation, BlockHandle tail, const cache::RequestEnd& end);

  struct Due {
    prefetch::Wish wish;
    std::vector<BlockHandle> path;  // from the first one that is known; empty if the last is not
  };
  std::optional<Due> TakeDue(absl::Time now);
  // Of the conversation's last request that has ended, from the first block that is known; empty if
  // it is not remembered.
  std::vector<BlockHandle> PathOf(cache::ConversationId conversation) const;
  absl::Time next() const { return planner_.NextStart().value_or(absl::InfiniteFuture()); }

  prefetch::PrefetchPlanner& planner() { return planner_; }
  const prefetch::PrefetchPlanner& planner() const { return planner_; }

 private:
  struct Conversation {
    std::optional<BlockKey> tail;  // of its last request that has ended
    bool idle = true;              // no request of it has begun since
    cache::Ending how = cache::Ending::kUnknown;
    absl::Time since;
    uint64_t number = 0;
  };

  void Forget(cache::ConversationId conversation);

  const BlockTree& tree_;
  prefetch::ReturnTimes returns_;
  prefetch::PrefetchPlanner planner_;
  absl::flat_hash_map<cache::ConversationId, Conversation> conversations_;
  absl::btree_map<uint64_t, cache::ConversationId> by_number_;  // the oldest first
  uint64_t last_number_ = 0;
};

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_PREFETCHER_H_
