// What a router knows that follows a directory's events, for tests: it must be what the snapshot
// says, and after a gap it begins anew with that.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_EVENT_FOLLOWER_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_EVENT_FOLLOWER_H_

#include <cstdint>
#include <set>
#include <tuple>
#include <utility>

#include "broker/core/blocks/block_directory.h"
#include "gtest/gtest.h"

namespace palimpsest::blocks {

class EventFollower {
 public:
  // Hears what happened since the last call.
  void Follow(const BlockDirectory& directory) {
    const auto events = directory.events().After(seen_, SIZE_MAX);
    if (events.has_value()) {
      for (const BlockEvent& event : *events) {
        ASSERT_EQ(event.sequence, ++seen_);
        const Entry entry(event.tenant, event.tier, event.key);
        if (event.kind == BlockEvent::Kind::kStored) {
          ASSERT_TRUE(known_.insert(entry).second);
        } else {
          ASSERT_EQ(known_.erase(entry), 1);
        }
      }
    }
    std::set<Entry> snapshot;
    for (const BlockEvent& event : directory.Snapshot()) {
      ASSERT_TRUE(snapshot.insert({event.tenant, event.tier, event.key}).second);
    }
    if (events.has_value()) {
      ASSERT_EQ(snapshot, known_);
    }
    known_ = std::move(snapshot);
    seen_ = directory.events().last();
  }

 private:
  using Entry = std::tuple<TenantId, TierIndex, BlockKey>;

  std::set<Entry> known_;
  uint64_t seen_ = 0;
};

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_EVENT_FOLLOWER_H_
