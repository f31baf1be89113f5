// Which worker had the last turn of each conversation, of as many as were seen last. Pure.
//
// Threads: none of its own; the caller serialises. O(1) a call.
#ifndef PALIMPSEST_ROUTER_CORE_CONVERSATION_HOMES_H_
#define PALIMPSEST_ROUTER_CORE_CONVERSATION_HOMES_H_

#include <cstddef>
#include <cstdint>
#include <list>
#include <optional>

#include "absl/container/flat_hash_map.h"
#include "router/core/placement.h"

namespace palimpsest::router {

class ConversationHomes {
 public:
  // Remembers at most `capacity` conversations, at least one.
  explicit ConversationHomes(size_t capacity) : capacity_(capacity) {}

  void Set(uint64_t conversation, WorkerId worker);
  std::optional<WorkerId> Find(uint64_t conversation) const;
  size_t size() const { return entries_.size(); }

 private:
  struct Home {
    uint64_t conversation;
    WorkerId worker;
  };

  const size_t capacity_;
  std::list<Home> homes_;  // the one seen last first
  absl::flat_hash_map<uint64_t, std::list<Home>::iterator> entries_;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_CORE_CONVERSATION_HOMES_H_
