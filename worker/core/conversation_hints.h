// Takes what clients say of conversations between their requests to the block store.
//
// Thread-safe; does not block.
#ifndef PALIMPSEST_WORKER_CORE_CONVERSATION_HINTS_H_
#define PALIMPSEST_WORKER_CORE_CONVERSATION_HINTS_H_

#include <cstdint>
#include <functional>

#include "absl/status/statusor.h"
#include "worker/core/request_hints.h"

namespace palimpsest {

class ConversationHints {
 public:
  virtual ~ConversationHints() = default;

  // About the blocks of the conversation's last request that has ended. `done` is called once, on
  // any thread, also from within: how many blocks are moved or retained, or will be.
  virtual void Hint(uint64_t conversation, const CacheAction& action,
                    std::function<void(absl::StatusOr<uint64_t>)> done) = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_CONVERSATION_HINTS_H_
