#include "broker/core/blocks/tier_rank.h"

#include <cassert>

#include "absl/strings/str_cat.h"

namespace palimpsest::blocks {

TierRank::State& TierRank::At(BlockHandle block) {
  if (block.value() >= states_.size()) states_.resize(block.value() + size_t{1});
  return states_[block.value()];
}

void TierRank::Refresh(BlockHandle block) {
  State& state = At(block);
  const bool candidate = state.ranked && state.pins == 0 && state.below == 0;
  if (candidate == state.candidate) return;
  state.candidate = candidate;
  if (candidate) {
    ++candidates_;
    policy_->OnEvictable(block);
  } else {
    --candidates_;
    policy_->OnPinned(block);
  }
}

void TierRank::CountAbove(BlockHandle block) {
  for (BlockHandle above = tree_.parent(block); above != kNoBlock; above = tree_.parent(above)) {
    State& state = At(above);
    const bool counted = state.ranked || state.below > 0;
    ++state.below;
    Refresh(above);
    if (counted) return;
  }
}

void TierRank::UncountAbove(BlockHandle block) {
  for (BlockHandle above = tree_.parent(block); above != kNoBlock; above = tree_.parent(above)) {
    State& state = At(above);
    assert(state.below > 0);
    --state.below;
    Refresh(above);
    if (state.ranked || state.below > 0) return;
  }
}

void TierRank::Insert(BlockHandle block) {
  State& state = At(block);
  assert(!state.ranked && state.pins == 0);
  state.ranked = true;
  ++size_;
  policy_->OnInsert(cache::RequestId(0), block, tree_.parent(block));
  if (At(block).below == 0) CountAbove(block);
  Refresh(block);
}

void TierRank::Remove(BlockHandle block) {
  assert(Contains(block));
  At(block).pins = 0;
  // The policy gives up candidates alone, and at most one of a sequence is one.
  const std::vector<BlockHandle> below =
      At(block).below > 0 ? CandidatesBelow(block) : std::vector<BlockHandle>();
  for (const BlockHandle candidate : below) policy_->OnPinned(candidate);
  if (!At(block).candidate) {
    policy_->OnEvictable(block);
  } else {
    --candidates_;
  }
  policy_->OnEvict(block);
  At(block).ranked = At(block).candidate = false;
  --size_;
  for (const BlockHandle candidate : below) policy_->OnEvictable(candidate);
  if (At(block).below == 0) UncountAbove(block);
}

void TierRank::Pin(BlockHandle block) {
  assert(Contains(block));
  ++At(block).pins;
  Refresh(block);
}

void TierRank::Unpin(BlockHandle block) {
  assert(Contains(block) && At(block).pins > 0);
  --At(block).pins;
  Refresh(block);
}

void TierRank::OnAttach(BlockHandle block) {
  const State& state = At(block);
  if (state.ranked || state.below > 0) CountAbove(block);
}

std::vector<BlockHandle> TierRank::CandidatesBelow(BlockHandle block) {
  std::vector<BlockHandle> found;
  std::vector<BlockHandle> open = {block};
  while (!open.empty()) {
    const BlockHandle next = open.back();
    open.pop_back();
    for (BlockHandle child = tree_.first_child(next); child != kNoBlock;
         child = tree_.next_sibling(child)) {
      const State& state = At(child);
      if (state.candidate) found.push_back(child);
      if (state.below > 0) open.push_back(child);
    }
  }
  return found;
}

absl::Status TierRank::CheckConsistency() const {
  std::vector<uint32_t> below(states_.size());
  size_t size = 0, candidates = 0;
  for (const BlockHandle block : tree_.All()) {
    if (block.value() >= states_.size()) continue;
    const State& state = states_[block.value()];
    size += state.ranked ? 1 : 0;
    candidates += state.candidate ? 1 : 0;
    const BlockHandle parent = tree_.parent(block);
    if (parent != kNoBlock && (state.ranked || state.below > 0)) {
      if (parent.value() >= states_.size()) return absl::InternalError("a parent has no count");
      ++below[parent.value()];
    }
    if (state.candidate != (state.ranked && state.pins == 0 && state.below == 0) ||
        (!state.ranked && state.pins > 0)) {
      return absl::InternalError("a block is a candidate and must not be, or the other way round");
    }
  }
  for (const BlockHandle block : tree_.All()) {
    if (block.value() < states_.size() && states_[block.value()].below != below[block.value()]) {
      return absl::InternalError("what hangs on a block is counted wrongly");
    }
  }
  if (size == size_ && candidates == candidates_) return absl::OkStatus();
  return absl::InternalError(absl::StrCat(size, " blocks and ", candidates, " candidates; counted ",
                                          size_, " and ", candidates_));
}

}  // namespace palimpsest::blocks
