// What routers are told: which blocks can be had on this node, and in which tier. Each event has
// the number after that of the one before; whoever sees a gap, or asks for events that are gone,
// starts again from a snapshot, which says with which number it ends.
//
// Threads: none; plain data.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_EVENTS_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_EVENTS_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "broker/core/blocks/block_actions.h"
#include "common/block_key.h"

namespace palimpsest::blocks {

struct BlockEvent {
  enum class Kind : uint8_t { kStored, kRemoved };

  uint64_t sequence = 0;  // from 1
  Kind kind = Kind::kStored;
  TenantId tenant;
  TierIndex tier;
  BlockKey key;

  friend bool operator==(const BlockEvent&, const BlockEvent&) = default;
};

class BlockEvents {
 public:
  // Keeps the last `capacity` events.
  explicit BlockEvents(size_t capacity) : capacity_(capacity) {}

  void Add(BlockEvent::Kind kind, TenantId tenant, TierIndex tier, const BlockKey& key) {
    if (events_.size() == capacity_) events_.pop_front();
    events_.push_back({++last_, kind, tenant, tier, key});
  }

  uint64_t last() const { return last_; }

  // At most `limit` events behind number `after`. Nothing, not even an empty list, if some of them
  // are gone or `after` has not been yet.
  std::optional<std::vector<BlockEvent>> After(uint64_t after, size_t limit) const {
    const uint64_t first = last_ - events_.size() + 1;
    if (after > last_ || after + 1 < first) return std::nullopt;
    const auto begin = events_.begin() + static_cast<ptrdiff_t>(after + 1 - first);
    const auto count = static_cast<size_t>(events_.end() - begin);
    return std::vector<BlockEvent>(begin,
                                   begin + static_cast<ptrdiff_t>(count < limit ? count : limit));
  }

 private:
  const size_t capacity_;
  uint64_t last_ = 0;
  std::deque<BlockEvent> events_;
};

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_EVENTS_H_
