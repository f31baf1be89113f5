#include "broker/core/blocks/prefetcher.h"

#include <algorithm>
#include <utility>

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
  const auto found = conversations_.find(conversation);
  if (found == conversations_.end()) return;
  planner_.Cancel(SubjectOf(conversation));
  by_number_.erase(found->second.number);
  conversations_.erase(found);
}

void Prefetcher::OnBegin(cache::ConversationId conversation, absl::Time now) {
  const auto found = conversations_.find(conversation);
  if (found == conversations_.end() || !std::exchange(found->second.idle, false)) return;
  returns_.OnReturn(found->second.how, now - found->second.since);
  planner_.Cancel(SubjectOf(conversation));
}

void Prefetcher::OnEnd(cache::ConversationId conversation, BlockHandle tail,
                       const cache::RequestEnd& end) {
  if (conversation == cache::ConversationId(0)) return;
  Forget(conversation);
  returns_.OnEnd(end.how);
  if (conversations_.size() >= kMostConversations) Forget(by_number_.begin()->second);
  Conversation& ended = conversations_[conversation];
  ended.how = end.how;
  ended.since = end.time;
  ended.number = ++last_number_;
  if (tail != kNoBlock) ended.tail = tree_.key(tail);
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
  return Due{.wish = *wish, .path = PathOf(cache::ConversationId(wish->subject.value()))};
}

std::vector<BlockHandle> Prefetcher::PathOf(cache::ConversationId conversation) const {
  const auto found = conversations_.find(conversation);
  if (found == conversations_.end() || !found->second.tail.has_value()) return {};
  return tree_.PathTo(tree_.Find(*found->second.tail));
}

}  // namespace palimpsest::blocks
