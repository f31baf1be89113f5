// What the block directory wants done, and what it answers. The server takes the actions under the
// lock under which it called the directory and carries them out after releasing it, side by side or
// in any order, but for PurgeTier: a StoreBlock into that tier that was taken before it must have
// been handed to the tier's store first.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_ACTIONS_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_ACTIONS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "broker/core/arena/arena_ledger.h"
#include "broker/tier/block_record.h"
#include "common/block_identity.h"
#include "common/bytes.h"
#include "common/ids.h"
#include "common/strong_int.h"

namespace palimpsest::blocks {

// 0 is T1, the arena; i is the i-th of Options.lower.
using TierIndex = StrongInt<struct BlockTierIndexTag, uint8_t>;
inline constexpr TierIndex kArenaTier{0};

// One LoadBlock or StoreBlock. Never reused.
using TransferId = StrongInt<struct BlockTransferIdTag, uint64_t>;
// One Acquire that waits. Never reused.
using WaitId = StrongInt<struct BlockWaitIdTag, uint64_t>;
// One PurgeTier. Never reused.
using PurgeId = StrongInt<struct BlockPurgeIdTag, uint64_t>;

// Make the chunk's memory (DramArena::Create), then OnChunkMade.
struct MakeChunk {
  ArenaChunkId chunk;
  TenantId tenant;
};

// Give the chunk's memory up (DramArena::Retire), then OnChunkRetired. No session maps it.
struct RetireChunk {
  ArenaChunkId chunk;
};

// Ask the session to unmap chunks, then OnUnmapped. A session that has not by the deadline gets
// SessionOverdue. After a re-attachment the server asks again (UnmapsOf).
struct UnmapChunks {
  SessionId session;
  std::vector<ArenaChunkId> chunks;
  absl::Time deadline;
};

// The session pins, writes or maps a chunk that should have been given back by now. Kill its
// process and close the session once it is gone. Once a session.
struct SessionOverdue {
  SessionId session;
  std::string why;
};

// Promotion: load the block from the tier into a buffer, check that it has the record's checksum,
// write it into the extent, then OnLoaded. Nothing may touch the extent after OnLoaded was called.
struct LoadBlock {
  TransferId transfer;
  TierIndex from;
  BlockRecord record;
  ArenaExtent to;
  absl::Time deadline;
};

// Demotion: read the block from its extent (or, without one, load it from tier `from`) into a
// buffer, check the record's checksum and store it in tier `to`, then OnStoreDone. What is stored
// is reported by OnStored, before OnStoreDone.
struct StoreBlock {
  TransferId transfer;
  TierIndex from;
  std::optional<ArenaExtent> extent;  // if `from` is T1
  TierIndex to;
  BlockRecord record;
  absl::Time deadline;
};

// TierStore::Remove. Its OnRemoved is awaited, nothing else.
struct RemoveBlock {
  TierIndex tier;
  BlockKey key;
};

// TierStore::Purge, then OnPurged.
struct PurgeTier {
  PurgeId purge;
  TierIndex tier;
  TenantId tenant;
};

// A run of blocks behind the acquired ones, in the order of the keys asked for.
struct Elsewhere {
  TierIndex tier;
  uint32_t blocks = 0;
  // From now until the last of them could be in T1, those before them included. InfiniteDuration if
  // the tier does not serve.
  absl::Duration expected;
};

struct AcquireReply {
  // Pinned for the request: what the longest prefix that is ready in T1 needs behind the held
  // blocks. The first of them is ids[first].
  std::vector<ArenaLedger::Acquired> blocks;
  size_t first = 0;
  // Behind them, up to the first block that is nowhere. With a window at most one, as far as the
  // longest prefix goes that can be had; expected is when its window could be in T1.
  std::vector<Elsewhere> elsewhere;
  // Leading ones of the held blocks that lie in some tier, or are on their way there.
  size_t kept = 0;
  // Nothing of the above is set yet: an AcquireDone with this id will come.
  std::optional<WaitId> wait;
};

// Answers an Acquire that waited.
struct AcquireDone {
  WaitId wait;
  SessionId session;
  AcquireReply reply;
};

using BlockAction = std::variant<MakeChunk, RetireChunk, UnmapChunks, SessionOverdue, LoadBlock,
                                 StoreBlock, RemoveBlock, PurgeTier, AcquireDone>;

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_ACTIONS_H_
