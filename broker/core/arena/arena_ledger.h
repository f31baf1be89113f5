// Tier 1: who holds which part of the node's DRAM for KV blocks. Memory comes in chunks of one
// size, each granted to one tenant and mapped by its sessions; inside its chunks a tenant's blocks
// lie in extents. Pure bookkeeping: it moves no bytes, reads no clock and chooses no victims.
//
// A block is one extent with everything that a sequence needs to resume behind it, so it is there
// as a whole or not at all. A session reserves it (kWriting), writes it and commits it (kReady);
// what it has not committed when it ends is dropped. A block that is ready may be acquired by
// sessions of its tenant, each of which pins it until it releases it or ends. A dropped block is
// not found any more, and its extent is reused only when nobody pins it.
//
// The broker takes part as sessions of its own, one per tenant: a promotion reserves and commits, a
// demotion acquires and releases, and neither ends before its transfer was reaped.
//
// Cost: O(log n) per block and extent. Threads: none; the caller serializes.
#ifndef PALIMPSEST_BROKER_CORE_ARENA_ARENA_LEDGER_H_
#define PALIMPSEST_BROKER_CORE_ARENA_ARENA_LEDGER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "broker/core/slab_ledger.h"
#include "common/block_identity.h"
#include "common/bytes.h"
#include "common/ids.h"
#include "common/strong_int.h"

namespace palimpsest {

// A place for a chunk: 0 .. the largest number of chunks - 1.
using ArenaChunkId = StrongInt<struct ArenaChunkIdTag, uint32_t>;

// All legal transitions:
//   kFree     -> kMaking    BeginGrant: its memory is being made, for one tenant
//   kMaking   -> kGranted   EndGrant
//   kMaking   -> kFree      CancelGrant: there was no memory
//   kGranted  -> kDraining  BeginRevoke: nothing more is put there
//   kDraining -> kGranted   CancelRevoke
//   kDraining -> kRetiring  no block is left, and the last session has unmapped it
//   kRetiring -> kFree      Retired: its memory was given up
enum class ArenaChunkState : uint8_t { kFree, kMaking, kGranted, kDraining, kRetiring };
inline constexpr int kArenaChunkStates = 5;

// Where a block lies.
struct ArenaExtent {
  ArenaChunkId chunk;
  Bytes offset;
  Bytes length;  // of the block; what it takes is rounded up

  friend bool operator==(const ArenaExtent&, const ArenaExtent&) = default;
};

class ArenaLedger {
 public:
  static constexpr uint32_t kMaxPins = 1 << 16;

  struct Options {
    uint32_t max_chunks = 0;
    Bytes chunk_bytes;
    // Of offsets, and what lengths are rounded up to: a page, so that disks can read and write
    // without copying. Divides chunk_bytes.
    Bytes unit = KiB(4);

    absl::Status Validate() const;
  };

  // Requires options.Validate().ok().
  explicit ArenaLedger(const Options& options);
  ArenaLedger(const ArenaLedger&) = delete;
  ArenaLedger& operator=(const ArenaLedger&) = delete;

  // Chunks.

  // At most so many chunks are not free; more than there are now stay until they are revoked.
  void SetLimit(uint32_t chunks) { limit_ = chunks; }
  void SetTenantLimit(TenantId tenant, uint32_t chunks);
  // How many granted chunks would have to be revoked for the limits to hold.
  uint32_t Excess() const;
  uint32_t Excess(TenantId tenant) const;

  // Chunks of the tenant that are granted and not being revoked.
  uint32_t Staying(TenantId tenant) const;
  // Whether no limit is reached.
  bool CanGrant(TenantId tenant) const;
  // ResourceExhausted at a limit.
  absl::StatusOr<ArenaChunkId> BeginGrant(TenantId tenant);
  absl::Status EndGrant(ArenaChunkId chunk);
  absl::Status CancelGrant(ArenaChunkId chunk);
  // Of memory that is there at once.
  absl::StatusOr<ArenaChunkId> Grant(TenantId tenant);
  // Of the tenant's granted chunks one whose revocation costs least: fewest pinned, then fewest
  // used bytes. Nothing if it has none.
  std::optional<ArenaChunkId> Cheapest(TenantId tenant) const;
  absl::Status BeginRevoke(ArenaChunkId chunk);
  absl::Status CancelRevoke(ArenaChunkId chunk);
  // The blocks that lie there and are not dropped, for whoever moves or drops them. Requires
  // chunk < max_chunks, as does `state`.
  std::vector<BlockKey> BlocksIn(ArenaChunkId chunk) const;
  std::vector<SessionId> MappedBy(ArenaChunkId chunk) const;
  // Draining chunks without a block, and who should unmap them. In order, as is MappedBy.
  std::vector<std::pair<ArenaChunkId, SessionId>> UnmapsWanted() const;
  // Chunks whose memory should be given up.
  std::vector<ArenaChunkId> Retiring() const;
  absl::Status Retired(ArenaChunkId chunk);

  // Sessions.

  absl::Status OpenSession(SessionId session, TenantId tenant);
  // Its process is gone, or has unmapped everything. Drops what it was writing, releases its pins.
  absl::Status CloseSession(SessionId session);
  // The session is about to get the chunk's descriptor. Only kGranted ones of its tenant.
  absl::Status Map(SessionId session, ArenaChunkId chunk);
  // It has unmapped a chunk, or the chunk will be truncated under it. FailedPrecondition while it
  // pins or writes a block there.
  absl::Status Unmap(SessionId session, ArenaChunkId chunk);

  // Blocks.

  struct Wanted {
    BlockIdentity id;
    Bytes length;
  };
  enum class Reservation : uint8_t {
    kReserved,
    kPresent,    // the block is there already, or somebody is writing it
    kCollision,  // another block has the key
    kNoRoom,
  };
  struct Reserved {
    Reservation result = Reservation::kNoRoom;
    ArenaExtent extent;  // if kReserved
  };
  // In order, up to the first kCollision or kNoRoom, which is the last answer: a block is of no use
  // without those before it. InvalidArgument, with nothing reserved, for lengths that no chunk can
  // hold or too many tokens.
  absl::StatusOr<std::vector<Reserved>> Reserve(SessionId session, absl::Span<const Wanted> wanted);

  struct Committed {
    BlockKey key;
    uint64_t checksum = 0;
  };
  // All of them or, with FailedPrecondition, none: each must be one that this session writes.
  absl::Status Commit(SessionId session, absl::Span<const Committed> blocks);
  // Gives up what this session writes; all or none.
  absl::Status Abort(SessionId session, absl::Span<const BlockKey> keys);

  struct Acquired {
    ArenaExtent extent;
    uint64_t checksum = 0;
  };
  // Pins the longest prefix of blocks that are ready and the same as those asked for. It also ends
  // where this session has pinned a block kMaxPins times.
  absl::StatusOr<std::vector<Acquired>> Acquire(SessionId session,
                                                absl::Span<const BlockIdentity> ids);
  // Each takes back one pin of this session; all or none. By extent, since a key that was dropped
  // and stored again has two.
  absl::Status Release(SessionId session, absl::Span<const ArenaExtent> extents);

  // Makes a ready block unknown. True if there was one; its room is free when nobody pins it.
  bool Drop(TenantId tenant, const BlockKey& key);
  // Of a whole tenant, as Drop.
  void DropAll(TenantId tenant);

  struct Found {
    const BlockIdentity* id = nullptr;  // until the next call that changes something
    ArenaExtent extent;
    uint64_t checksum = 0;
    bool ready = false;
    bool dropped = false;
    SessionId writer;  // while not ready
    uint32_t pins = 0;
  };
  // The block of that key that is known, ready or not.
  std::optional<Found> Find(TenantId tenant, const BlockKey& key) const;
  // The block that begins there, known or dropped.
  std::optional<Found> At(const ArenaExtent& extent) const;
  // Keys of what the session is writing, in order. Empty if there is no such session.
  std::vector<BlockKey> WrittenBy(SessionId session) const;

  // Whether Reserve would find room for one more block.
  bool Fits(TenantId tenant, Bytes length) const;

  struct Usage {
    uint32_t chunks = 0;  // not free
    uint64_t blocks = 0;  // ready and known
    Bytes writing;
    Bytes ready;    // known; with what rounding takes, as are all of these
    Bytes dropped;  // not known any more, but pinned
    Bytes free;     // in granted chunks
  };
  Usage UsageOf(TenantId tenant) const;

  uint32_t max_chunks() const { return options_.max_chunks; }
  Bytes chunk_bytes() const { return options_.chunk_bytes; }
  uint32_t Count(ArenaChunkState state) const { return counts_[static_cast<size_t>(state)]; }
  ArenaChunkState state(ArenaChunkId chunk) const { return chunks_[chunk.value()].state; }
  // Whose it is. Of one that is not free.
  TenantId tenant(ArenaChunkId chunk) const { return chunks_[chunk.value()].tenant; }

  // Recounts everything: extents and free room tile each chunk, sums, pins and lists agree. O(n).
  absl::Status CheckConsistency() const;

 private:
  struct Block {
    BlockIdentity id;
    ArenaExtent extent;
    uint64_t checksum = 0;
    bool ready = false;
    bool dropped = false;
    SessionId writer;  // while not ready
    uint32_t pins = 0;
  };
  struct Chunk {
    ArenaChunkState state = ArenaChunkState::kFree;
    TenantId tenant;
    // By offset; dropped ones that are pinned, too.
    absl::btree_map<int64_t, std::unique_ptr<Block>> blocks;
    absl::btree_map<int64_t, int64_t> room;  // length by offset
    absl::flat_hash_set<SessionId> mapped;
    Bytes used;
    uint32_t pinned_blocks = 0;
  };
  struct Session {
    TenantId tenant;
    absl::flat_hash_set<Block*> writing;
    absl::flat_hash_map<Block*, uint32_t> pins;
    absl::flat_hash_set<ArenaChunkId> mapped;
  };
  struct Room {
    int64_t length;
    uint32_t chunk;
    int64_t offset;
    friend auto operator<=>(const Room&, const Room&) = default;
  };
  struct Tenant {
    uint32_t limit = UINT32_MAX;
    uint32_t chunks = 0;
    absl::flat_hash_map<BlockKey, Block*> known;
    absl::btree_set<Room> room;  // of granted chunks
    Usage usage;                 // but `chunks` and `free`
    Bytes room_bytes;
  };

  Bytes Rounded(Bytes length) const { return RoundUp(length, options_.unit); }
  absl::Status CheckChunk(ArenaChunkId chunk, ArenaChunkState expected) const;
  absl::StatusOr<Session*> FindSession(SessionId session);
  // The block of that key that this session writes.
  absl::StatusOr<Block*> FindWritten(const Session& session, const BlockKey& key);
  static Found View(const Block& block);
  void SetState(ArenaChunkId chunk, ArenaChunkState state);
  void FreeChunk(ArenaChunkId chunk);
  void AddRoom(Tenant& tenant, ArenaChunkId chunk);
  void RemoveRoom(Tenant& tenant, ArenaChunkId chunk);
  std::optional<ArenaExtent> Allocate(Tenant& tenant, Bytes length);
  void FreeExtent(Tenant& tenant, const ArenaExtent& extent);
  void Unpin(Tenant& tenant, Block* block, uint32_t pins);
  void Erase(Tenant& tenant, Block* block);
  void RetireIfDone(ArenaChunkId chunk);
  absl::Status CheckTiling(ArenaChunkId chunk) const;

  const Options options_;
  uint32_t limit_;
  std::vector<Chunk> chunks_;
  std::vector<uint32_t> counts_;
  std::vector<ArenaChunkId> free_chunks_;
  absl::flat_hash_map<SessionId, Session> sessions_;
  absl::flat_hash_map<TenantId, Tenant> tenants_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_ARENA_ARENA_LEDGER_H_
