#include "tools/replay/belady_policy.h"

#include <cassert>
#include <limits>

namespace palimpsest::replay {

using cache::BlockHandle;

namespace {

constexpr int64_t kNever = std::numeric_limits<int64_t>::max();

}  // namespace

BeladyPolicy::BeladyPolicy(absl::Span<const uint32_t> accesses, uint32_t distinct)
    : next_(accesses.size()) {
  std::vector<int64_t> following(distinct, kNever);
  for (size_t i = accesses.size(); i > 0; --i) {
    next_[i - 1] = following[accesses[i - 1]];
    following[accesses[i - 1]] = static_cast<int64_t>(i - 1);
  }
}

void BeladyPolicy::OnRequest(const cache::RequestInfo&, const cache::Access& access) {
  for (const BlockHandle block : access.path) {
    assert(access_ < next_.size());
    if (block.value() >= need_.size()) need_.resize(block.value() + size_t{1});
    need_[block.value()] = -next_[access_++];
    if (evictable_.Contains(block)) evictable_.Update(block, need_[block.value()]);
  }
}

void BeladyPolicy::OnEvictable(BlockHandle block) { evictable_.Push(block, need_[block.value()]); }

std::optional<BlockHandle> BeladyPolicy::ChooseVictim(absl::Time, BlockHandle block,
                                                      bool may_refuse) {
  if (evictable_.empty()) return std::nullopt;
  if (may_refuse && block != cache::kNoBlock && need_[block.value()] <= evictable_.TopKey()) {
    return std::nullopt;
  }
  return evictable_.Top();
}

}  // namespace palimpsest::replay
