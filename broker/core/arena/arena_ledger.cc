#include "broker/core/arena/arena_ledger.h"

#include <algorithm>
#include <cassert>

#include "absl/strings/str_cat.h"

namespace palimpsest {
absl::Status ArenaLedger::Options::Validate() const {
  if (max_chunks >= 1 && unit >= Bytes(1) && chunk_bytes >= unit &&
      chunk_bytes.count() % unit.count() == 0) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat(max_chunks, " chunks of ", chunk_bytes.count(), " bytes in units of ",
                   unit.count(), "; expected at least one chunk of a multiple of the unit"));
}

ArenaLedger::ArenaLedger(const Options& options)
    : options_(options),
      limit_(options.max_chunks),
      chunks_(options.max_chunks),
      counts_(kArenaChunkStates) {
  assert(options.Validate().ok());
  counts_[static_cast<size_t>(ArenaChunkState::kFree)] = options.max_chunks;
  for (uint32_t i = options.max_chunks; i > 0; --i) free_chunks_.push_back(ArenaChunkId(i - 1));
}

std::optional<ArenaExtent> ArenaLedger::Allocate(Tenant& tenant, Bytes length) {
  const int64_t needed = Rounded(length).count();
  // The smallest room that is large enough.
  const auto found = tenant.room.lower_bound({needed, 0, 0});
  if (found == tenant.room.end()) return std::nullopt;
  const Room room = *found;
  tenant.room.erase(found);
  tenant.room_bytes -= Bytes(needed);
  Chunk& chunk = chunks_[room.chunk];
  chunk.room.erase(room.offset);
  if (room.length > needed) {
    chunk.room.emplace(room.offset + needed, room.length - needed);
    tenant.room.insert({room.length - needed, room.chunk, room.offset + needed});
  }
  chunk.used += Bytes(needed);
  return ArenaExtent{ArenaChunkId(room.chunk), Bytes(room.offset), length};
}

void ArenaLedger::FreeExtent(Tenant& tenant, const ArenaExtent& extent) {
  const uint32_t id = extent.chunk.value();
  Chunk& chunk = chunks_[id];
  const bool granted = chunk.state == ArenaChunkState::kGranted;
  int64_t offset = extent.offset.count();
  int64_t length = Rounded(extent.length).count();
  chunk.used -= Bytes(length);
  if (granted) tenant.room_bytes += Bytes(length);
  const auto absorb = [&](absl::btree_map<int64_t, int64_t>::iterator neighbour) {
    if (granted) tenant.room.erase({neighbour->second, id, neighbour->first});
    offset = std::min(offset, neighbour->first);
    length += neighbour->second;
    chunk.room.erase(neighbour);
  };
  if (auto next = chunk.room.find(offset + length); next != chunk.room.end()) absorb(next);
  auto previous = chunk.room.lower_bound(offset);
  if (previous != chunk.room.begin()) {
    --previous;
    if (previous->first + previous->second == offset) absorb(previous);
  }
  chunk.room.emplace(offset, length);
  if (granted) tenant.room.insert({length, id, offset});
}

absl::StatusOr<std::vector<ArenaLedger::Reserved>> ArenaLedger::Reserve(
    SessionId session, absl::Span<const Wanted> wanted) {
  absl::StatusOr<Session*> found = FindSession(session);
  if (!found.ok()) return found.status();
  for (const Wanted& block : wanted) {
    if (block.length < Bytes(1) || block.length > options_.chunk_bytes ||
        block.id.tokens.size() > kMaxBlockTokens) {
      return absl::InvalidArgumentError(
          absl::StrCat("a block of ", block.length.count(), " bytes and ", block.id.tokens.size(),
                       " tokens; expected 1 to ", options_.chunk_bytes.count(), " and at most ",
                       kMaxBlockTokens));
    }
  }
  Tenant& tenant = tenants_[(*found)->tenant];
  std::vector<Reserved> reserved;
  for (const Wanted& block : wanted) {
    reserved.emplace_back();
    if (const auto known = tenant.known.find(block.id.key); known != tenant.known.end()) {
      const bool same =
          known->second->id == block.id && known->second->extent.length == block.length;
      reserved.back().result = same ? Reservation::kPresent : Reservation::kCollision;
      if (!same) break;
      continue;
    }
    const std::optional<ArenaExtent> extent = Allocate(tenant, block.length);
    if (!extent.has_value()) break;
    auto added = std::make_unique<Block>();
    added->id = block.id;
    added->extent = *extent;
    added->writer = session;
    tenant.known.emplace(block.id.key, added.get());
    tenant.usage.writing += Rounded(block.length);
    (*found)->writing.insert(added.get());
    chunks_[extent->chunk.value()].blocks.emplace(extent->offset.count(), std::move(added));
    reserved.back() = {Reservation::kReserved, *extent};
  }
  return reserved;
}

absl::StatusOr<ArenaLedger::Block*> ArenaLedger::FindWritten(const Session& session,
                                                             const BlockKey& key) {
  const Tenant& tenant = tenants_[session.tenant];
  const auto known = tenant.known.find(key);
  if (known != tenant.known.end() && session.writing.contains(known->second)) return known->second;
  return absl::FailedPreconditionError("a block that this session has not reserved, or no longer");
}

absl::Status ArenaLedger::Commit(SessionId session, absl::Span<const Committed> blocks) {
  absl::StatusOr<Session*> found = FindSession(session);
  if (!found.ok()) return found.status();
  absl::flat_hash_set<Block*> distinct;
  for (const Committed& committed : blocks) {
    const absl::StatusOr<Block*> block = FindWritten(**found, committed.key);
    if (!block.ok()) return block.status();
    if (!distinct.insert(*block).second) {
      return absl::FailedPreconditionError("a block is committed twice");
    }
  }
  Tenant& tenant = tenants_[(*found)->tenant];
  for (const Committed& committed : blocks) {
    Block* const block = tenant.known.at(committed.key);
    (*found)->writing.erase(block);
    block->ready = true;
    block->checksum = committed.checksum;
    const Bytes taken = Rounded(block->extent.length);
    tenant.usage.writing -= taken;
    tenant.usage.ready += taken;
    ++tenant.usage.blocks;
  }
  return absl::OkStatus();
}

absl::Status ArenaLedger::Abort(SessionId session, absl::Span<const BlockKey> keys) {
  absl::StatusOr<Session*> found = FindSession(session);
  if (!found.ok()) return found.status();
  absl::flat_hash_set<Block*> aborted;
  for (const BlockKey& key : keys) {
    const absl::StatusOr<Block*> block = FindWritten(**found, key);
    if (!block.ok()) return block.status();
    aborted.insert(*block);
  }
  for (Block* block : aborted) {
    (*found)->writing.erase(block);
    Erase(tenants_[(*found)->tenant], block);
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<ArenaLedger::Acquired>> ArenaLedger::Acquire(
    SessionId session, absl::Span<const BlockIdentity> ids) {
  absl::StatusOr<Session*> found = FindSession(session);
  if (!found.ok()) return found.status();
  const Tenant& tenant = tenants_[(*found)->tenant];
  std::vector<Acquired> acquired;
  for (const BlockIdentity& id : ids) {
    const auto known = tenant.known.find(id.key);
    if (known == tenant.known.end() || !known->second->ready || known->second->id != id) break;
    Block* const block = known->second;
    uint32_t& pins = (*found)->pins[block];
    if (pins == kMaxPins) break;
    ++pins;
    if (++block->pins == 1) ++chunks_[block->extent.chunk.value()].pinned_blocks;
    acquired.push_back({block->extent, block->checksum});
  }
  return acquired;
}

absl::Status ArenaLedger::Release(SessionId session, absl::Span<const ArenaExtent> extents) {
  absl::StatusOr<Session*> found = FindSession(session);
  if (!found.ok()) return found.status();
  absl::flat_hash_map<Block*, uint32_t> released;
  for (const ArenaExtent& extent : extents) {
    Block* block = nullptr;
    if (extent.chunk.value() < chunks_.size()) {
      const auto& blocks = chunks_[extent.chunk.value()].blocks;
      const auto at = blocks.find(extent.offset.count());
      if (at != blocks.end()) block = at->second.get();
    }
    const auto pins = (*found)->pins.find(block);
    if (pins == (*found)->pins.end() || ++released[block] > pins->second) {
      return absl::FailedPreconditionError(
          absl::StrCat("chunk ", extent.chunk.ToString(), ", offset ", extent.offset.count(),
                       ": nothing that this session has acquired, or not so often"));
    }
  }
  for (const auto& [block, pins] : released) {
    const auto held = (*found)->pins.find(block);
    held->second -= pins;
    if (held->second == 0) (*found)->pins.erase(held);
    Unpin(tenants_[(*found)->tenant], block, pins);
  }
  return absl::OkStatus();
}

void ArenaLedger::Unpin(Tenant& tenant, Block* block, uint32_t pins) {
  block->pins -= pins;
  if (block->pins > 0) return;
  --chunks_[block->extent.chunk.value()].pinned_blocks;
  if (block->dropped) Erase(tenant, block);
}

bool ArenaLedger::Drop(TenantId tenant, const BlockKey& key) {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return false;
  Tenant& t = found->second;
  const auto known = t.known.find(key);
  if (known == t.known.end() || !known->second->ready) return false;
  Block* const block = known->second;
  const Bytes taken = Rounded(block->extent.length);
  t.known.erase(known);
  block->dropped = true;
  --t.usage.blocks;
  t.usage.ready -= taken;
  t.usage.dropped += taken;
  if (block->pins == 0) Erase(t, block);
  return true;
}

void ArenaLedger::DropAll(TenantId tenant) {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return;
  std::vector<BlockKey> ready;
  for (const auto& [key, block] : found->second.known) {
    if (block->ready) ready.push_back(key);
  }
  for (const BlockKey& key : ready) Drop(tenant, key);
}

// Of a block that was dropped, or is being written.
void ArenaLedger::Erase(Tenant& tenant, Block* block) {
  const Bytes taken = Rounded(block->extent.length);
  if (block->dropped) {
    tenant.usage.dropped -= taken;
  } else {
    assert(!block->ready);
    tenant.usage.writing -= taken;
    tenant.known.erase(block->id.key);
  }
  const ArenaExtent extent = block->extent;
  chunks_[extent.chunk.value()].blocks.erase(extent.offset.count());
  FreeExtent(tenant, extent);
  RetireIfDone(extent.chunk);
}

ArenaLedger::Found ArenaLedger::View(const Block& block) {
  return {.id = &block.id,
          .extent = block.extent,
          .checksum = block.checksum,
          .ready = block.ready,
          .dropped = block.dropped,
          .writer = block.writer,
          .pins = block.pins};
}

std::optional<ArenaLedger::Found> ArenaLedger::Find(TenantId tenant, const BlockKey& key) const {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return std::nullopt;
  const auto known = found->second.known.find(key);
  if (known == found->second.known.end()) return std::nullopt;
  return View(*known->second);
}

std::optional<ArenaLedger::Found> ArenaLedger::At(const ArenaExtent& extent) const {
  if (extent.chunk.value() >= chunks_.size()) return std::nullopt;
  const auto& blocks = chunks_[extent.chunk.value()].blocks;
  const auto found = blocks.find(extent.offset.count());
  if (found == blocks.end()) return std::nullopt;
  return View(*found->second);
}

std::vector<BlockKey> ArenaLedger::WrittenBy(SessionId session) const {
  std::vector<BlockKey> keys;
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return keys;
  for (const Block* block : found->second.writing) keys.push_back(block->id.key);
  std::sort(keys.begin(), keys.end());
  return keys;
}

bool ArenaLedger::Fits(TenantId tenant, Bytes length) const {
  const auto found = tenants_.find(tenant);
  return found != tenants_.end() && found->second.room.lower_bound({Rounded(length).count(), 0,
                                                                    0}) != found->second.room.end();
}

ArenaLedger::Usage ArenaLedger::UsageOf(TenantId tenant) const {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return {};
  Usage usage = found->second.usage;
  usage.chunks = found->second.chunks;
  usage.free = found->second.room_bytes;
  return usage;
}

}  // namespace palimpsest
