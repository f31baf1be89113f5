// What a client of the block store (worker/blocks) needs of the session with the broker: who it is
// there, descriptors of the arena's chunks, and the word when chunks must go. Sessions are told
// apart by an epoch that grows.
#ifndef PALIMPSEST_WORKER_MEMORY_ARENA_LINK_H_
#define PALIMPSEST_WORKER_MEMORY_ARENA_LINK_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "common/fd.h"
#include "common/ids.h"

namespace palimpsest {

struct ArenaSession {
  uint64_t epoch = 0;
  SessionId session;
  // Attached.block_token; empty if the broker has no tiers.
  std::string block_token;
};

// Called by threads of the link, without a lock. Must not block for long.
class ArenaListener {
 public:
  virtual ~ArenaListener() = default;

  virtual void OnSession(const ArenaSession& session) = 0;
  // May come before the OnSession that it ends.
  virtual void OnSessionLost(uint64_t epoch) = 0;
  virtual void OnUnmapChunks(uint64_t epoch, std::vector<uint32_t> chunks) = 0;
  // Answers FetchChunk.
  virtual void OnChunk(uint64_t epoch, uint32_t chunk, absl::StatusOr<UniqueFd> memory) = 0;
};

// Thread-safe; nothing blocks.
class ArenaLink {
 public:
  virtual ~ArenaLink() = default;

  // Once. The listener is told of the session that there is, and must outlive the link.
  virtual void SetArenaListener(ArenaListener* listener) = 0;

  // Fetches the descriptor that `token` (MapChunks) is for.
  virtual void FetchChunk(uint64_t epoch, uint32_t chunk, std::string token) = 0;

  // The chunks are not mapped (any more).
  virtual void ChunksUnmapped(uint64_t epoch, std::vector<uint32_t> chunks) = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_ARENA_LINK_H_
