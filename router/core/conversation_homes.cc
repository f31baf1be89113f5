#include "router/core/conversation_homes.h"

namespace palimpsest::router {

void ConversationHomes::Set(uint64_t conversation, WorkerId worker) {
  const auto found = entries_.find(conversation);
  if (found != entries_.end()) {
    found->second->worker = worker;
    homes_.splice(homes_.begin(), homes_, found->second);
    return;
  }
  if (entries_.size() >= capacity_) {
    entries_.erase(homes_.back().conversation);
    homes_.pop_back();
  }
  homes_.push_front({conversation, worker});
  entries_[conversation] = homes_.begin();
}

std::optional<WorkerId> ConversationHomes::Find(uint64_t conversation) const {
  const auto found = entries_.find(conversation);
  if (found == entries_.end()) return std::nullopt;
  return found->second->worker;
}

}  // namespace palimpsest::router
