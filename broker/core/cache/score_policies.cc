#include "broker/core/cache/score_policies.h"

#include <algorithm>

namespace palimpsest::cache {

void ScorePolicy::Use(BlockHandle block) {
  State& state = states_[block.value()];
  state.key = {Score(++state.uses), ++clock_};
  if (evictable_.Contains(block)) evictable_.Update(block, state.key);
}

void ScorePolicy::OnRequest(const RequestInfo&, const Access& access) {
  for (const BlockHandle block : access.path) {
    if (block.value() < states_.size() && states_[block.value()].uses > 0) Use(block);
  }
}

void ScorePolicy::OnInsert(RequestId, BlockHandle block, BlockHandle) {
  if (block.value() >= states_.size()) states_.resize(block.value() + size_t{1});
  Use(block);
}

void ScorePolicy::OnEvictable(BlockHandle block) {
  evictable_.Push(block, states_[block.value()].key);
}

void ScorePolicy::OnPinned(BlockHandle block) { evictable_.Remove(block); }

std::optional<BlockHandle> ScorePolicy::ChooseVictim(absl::Time, BlockHandle, bool) {
  if (evictable_.empty()) return std::nullopt;
  return evictable_.Top();
}

void ScorePolicy::OnEvict(BlockHandle block) {
  evictable_.Remove(block);
  OnEvictScore(states_[block.value()].key.first);
  states_[block.value()].uses = 0;
}

double LruPolicy::Score(int64_t) const { return 0; }

double LfuPolicy::Score(int64_t uses) const { return static_cast<double>(uses); }

double GdsfPolicy::Score(int64_t uses) const { return inflation_ + static_cast<double>(uses); }

}  // namespace palimpsest::cache
