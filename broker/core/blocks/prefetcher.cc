#include "broker/core/blocks/prefetcher.h"

#include <algorithm>

namespace palimpsest::blocks {
namespace {

prefetch::SubjectId SubjectOf(cache::ConversationId conversation) {
  return prefetch::SubjectId(conversation.value());
}

}  // namespace

Prefetcher::Prefetcher(const BlockTree& tree, size_t tiers)
    : tree_(tree),
      planner_({.tiers = std::vector<prefetch::PrefetchBudget>(tiers),
                .max_wishes = kMostConversations}) {}

void Prefetcher::Forget(cache::ConversationId conversation) {
  const auto found = idle_.find(conversation);
  if (found == idle_.end()) return;
  planner_.Cancel(SubjectOf(conversation));

  by_number_.erase(found->second.number);
  idle_.erase(found);
}

void Prefetcher::OnBegin(cache::ConversationId conversation, absl::Time now) {
  const auto found = idle_.find(conversation);
  if (found == idle_.end()) return;
  returns_.OnReturn(found->second.how, now - found->second.since);
  Forget(conversation);
}

void Prefetcher::OnEnd(cache::ConversationId conversation, BlockHandle tail,
                       const cache::RequestEnd& end) {
  if (conversation == cache::ConversationId(0)) return;
  Forget(conversation);
  returns_.OnEnd(end.how);
  if (idle_.size() >= kMostConversations) Forget(by_number_.begin()->second);
  Idle& idle_now = idle_[conversation];
  idle_now = {.tail = std::nullopt, .how = end.how, .since = end.time, .number = ++last_number_};
  if (tail != kNoBlock) idle_now.tail = tree_.key(tail);
  by_number_[last_number_] = conversation;
  absl::Duration idle = end.expected_idle.value_or(absl::ZeroDuration());
  if (!end.expected_idle.has_value()) {
    const std::optional<prefetch::ReturnWindow> window = returns_.Expect(end.how);
    if (window.has_value() && window->probability >= kLeastProbability) idle = window->early;
  }
  if (idle <= absl::ZeroDuration() || end.last_turn) return;
  planner_.Want(
      {.subject = SubjectOf(conversation),
       .trigger = prefetch::Trigger::kTransition,
       .start = end.time + std::max(absl::ZeroDuration(), idle - std::max(kLead, idle / 8)),
       .deadline = end.time + idle});
}

std::optional<Prefetcher::Due> Prefetcher::TakeDue(absl::Time now) {
  const std::optional<prefetch::Wish> wish = planner_.TakeDue(now);
  if (!wish.has_value()) return std::nullopt;
  Due due = {.wish = *wish, .path = {}};
  const auto idle = idle_.find(cache::ConversationId(wish->subject.value()));
  if (!idle->second.tail.has_value()) return due;
  for (BlockHandle block = tree_.Find(*idle->second.tail); block != kNoBlock;
       block = tree_.parent(block)) {
    due.path.push_back(block);
  }
  std::reverse(due.path.begin(), due.path.end());
  return due;
}

}  // namespace palimpsest::blocks
