// Which of a tenant's blocks leaves one tier next: an EvictionPolicy over the blocks of a BlockTree
// that lie there. Keeps what the policy asks of its owner: only a block on which no other in the
// tier hangs, directly or over blocks that are not there, and that is not pinned, may be a victim.
//
// Complexity: the policy's; Remove of a block that is no victim, O(blocks that hang on it).
// Threads: none. Broken requirements abort.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_TIER_RANK_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_TIER_RANK_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "broker/core/blocks/block_tree.h"
#include "broker/core/cache/eviction_policy.h"

namespace palimpsest::blocks {

class TierRank {
 public:
  // `tree` outlives the rank.
  TierRank(const BlockTree& tree, std::unique_ptr<cache::EvictionPolicy> policy)
      : tree_(tree), policy_(std::move(policy)) {}

  bool Contains(BlockHandle block) const {
    return block.value() < states_.size() && states_[block.value()].ranked;
  }
  bool IsCandidate(BlockHandle block) const {
    return block.value() < states_.size() && states_[block.value()].candidate;
  }
  size_t size() const { return size_; }
  // Blocks that may be victims.
  size_t candidates() const { return candidates_; }

  // The block, which the policy knows from a request, is in the tier from now on; or it has left.
  // What pinned it does so no longer.
  void Insert(BlockHandle block);
  void Remove(BlockHandle block);
  // Counted. Require a block that is in the tier.
  void Pin(BlockHandle block);
  void Unpin(BlockHandle block);
  uint32_t pins(BlockHandle block) const { return states_[block.value()].pins; }

  // Right after tree.Attach of the block.
  void OnAttach(BlockHandle block);
  // As EvictionPolicy::ChooseVictim.
  std::optional<BlockHandle> ChooseVictim(absl::Time now, BlockHandle block, bool may_refuse) {
    return policy_->ChooseVictim(now, block, may_refuse);
  }
  cache::EvictionPolicy& policy() { return *policy_; }

  // Recounts what is kept of each block. O(known blocks).
  absl::Status CheckConsistency() const;

 private:
  struct State {
    uint32_t pins = 0;
    uint32_t below = 0;  // children that are ranked, or have such below them
    bool ranked = false;
    bool candidate = false;
  };

  State& At(BlockHandle block);
  // Tells the policy if the block may be a victim, and could not until now, or the other way round.
  void Refresh(BlockHandle block);
  // The block is ranked or has such below it, and neither was so before; or the other way round.
  void CountAbove(BlockHandle block);
  void UncountAbove(BlockHandle block);
  // All candidates that hang on the block.
  std::vector<BlockHandle> CandidatesBelow(BlockHandle block);

  const BlockTree& tree_;
  const std::unique_ptr<cache::EvictionPolicy> policy_;
  std::vector<State> states_;  // by handle
  size_t size_ = 0;
  size_t candidates_ = 0;
};

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_TIER_RANK_H_
