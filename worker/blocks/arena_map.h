// The chunks of a tenant's DRAM arena (tier 1) that this process has mapped, and who holds places
// in them.
//
// A place is held from the store's answer that names it until the call that gives it back has
// ended: until then its chunk stays mapped. A chunk that is to go gives no new places and is
// unmapped with its last one. With a session its chunks are forgotten; places that are still held
// keep their memory, which nobody else writes.
//
// Not thread-safe. Memory that is to go is handed to the caller (`gone`), who destroys it without a
// lock.
#ifndef PALIMPSEST_WORKER_BLOCKS_ARENA_MAP_H_
#define PALIMPSEST_WORKER_BLOCKS_ARENA_MAP_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "worker/blocks/chunk_memory.h"
#include "worker/core/kv_store.h"

namespace palimpsest {

// Where a block lies in the arena, as the broker says.
struct ChunkExtent {
  uint32_t chunk = 0;
  uint64_t offset_bytes = 0;
  uint64_t length_bytes = 0;

  friend bool operator==(const ChunkExtent&, const ChunkExtent&) = default;
};

class ArenaMap {
 public:
  using Gone = std::vector<ChunkMemory>;

  // Places are for blocks of this size.
  explicit ArenaMap(Bytes block_bytes) : block_bytes_(block_bytes) {}

  // Forgets all chunks, with their session.
  void Reset(Gone& gone);

  bool mapped(uint32_t chunk) const { return chunks_.contains(chunk); }
  // Requires that it is not mapped.
  void Insert(uint32_t chunk, ChunkMemory memory);

  // InvalidArgument: the extent is not a block's or not inside the chunk. Unavailable: the chunk is
  // not mapped, or is to go.
  // `request`: whose pin it is.
  absl::StatusOr<StorePlace> Hold(const ChunkExtent& extent, uint64_t request);
  struct Held {
    ChunkExtent extent;
    uint64_t request = 0;
  };
  // Requires a place that is held; nothing if it is one of an earlier session.
  std::optional<Held> Find(uint64_t place) const;
  // Requires a place that is held. The chunk, if it was to go and has gone with this place.
  std::optional<uint32_t> Drop(uint64_t place, Gone& gone);

  // The chunks are to go. Those that have gone: they were not mapped, or held nothing.
  std::vector<uint32_t> Unmap(absl::Span<const uint32_t> chunks, Gone& gone);

  size_t held() const { return places_.size(); }
  size_t chunks() const { return chunks_.size(); }

 private:
  struct Chunk {
    explicit Chunk(ChunkMemory memory) : memory(std::move(memory)) {}

    ChunkMemory memory;
    int64_t places = 0;
    bool leaving = false;
    bool forgotten = false;
  };
  struct Place {
    std::shared_ptr<Chunk> chunk;
    Held held;
  };

  const Bytes block_bytes_;
  absl::flat_hash_map<uint32_t, std::shared_ptr<Chunk>> chunks_;
  absl::flat_hash_map<uint64_t, Place> places_;
  uint64_t next_place_ = 1;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_BLOCKS_ARENA_MAP_H_
