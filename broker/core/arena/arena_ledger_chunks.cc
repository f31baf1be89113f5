// Chunks and sessions.
#include <algorithm>
#include <cassert>

#include "absl/strings/str_cat.h"
#include "broker/core/arena/arena_ledger.h"

namespace palimpsest {
namespace {

absl::string_view StateName(ArenaChunkState state) {
  switch (state) {
    case ArenaChunkState::kFree:
      return "free";
    case ArenaChunkState::kMaking:
      return "being made";
    case ArenaChunkState::kGranted:
      return "granted";
    case ArenaChunkState::kDraining:
      return "draining";
    case ArenaChunkState::kRetiring:
      return "retiring";
  }
  return "invalid";
}

}  // namespace

absl::Status ArenaLedger::CheckChunk(ArenaChunkId chunk, ArenaChunkState expected) const {
  if (chunk.value() >= chunks_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("chunk ", chunk.ToString(), " of ", chunks_.size()));
  }
  if (state(chunk) == expected) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat("chunk ", chunk.ToString(), " is ",
                                                    StateName(state(chunk)), ", expected ",
                                                    StateName(expected)));
}

void ArenaLedger::SetState(ArenaChunkId chunk, ArenaChunkState state) {
  Chunk& c = chunks_[chunk.value()];
  --counts_[static_cast<size_t>(c.state)];
  ++counts_[static_cast<size_t>(state)];
  c.state = state;
}

void ArenaLedger::SetTenantLimit(TenantId tenant, uint32_t chunks) {
  tenants_[tenant].limit = chunks;
}

uint32_t ArenaLedger::Excess() const {
  const uint32_t staying = Count(ArenaChunkState::kGranted);
  return staying > limit_ ? staying - limit_ : 0;
}

uint32_t ArenaLedger::Staying(TenantId tenant) const {
  return static_cast<uint32_t>(
      std::count_if(chunks_.begin(), chunks_.end(), [&](const Chunk& chunk) {
        return chunk.state == ArenaChunkState::kGranted && chunk.tenant == tenant;
      }));
}

uint32_t ArenaLedger::Excess(TenantId tenant) const {
  const auto found = tenants_.find(tenant);
  if (found == tenants_.end()) return 0;
  const uint32_t staying = Staying(tenant);
  return staying > found->second.limit ? staying - found->second.limit : 0;
}

bool ArenaLedger::CanGrant(TenantId tenant) const {
  const auto found = tenants_.find(tenant);
  return (found == tenants_.end() || found->second.chunks < found->second.limit) &&
         !free_chunks_.empty() && options_.max_chunks - Count(ArenaChunkState::kFree) < limit_;
}

absl::StatusOr<ArenaChunkId> ArenaLedger::BeginGrant(TenantId tenant) {
  Tenant& t = tenants_[tenant];
  if (t.chunks >= t.limit) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the tenant has ", t.chunks, " of ", t.limit, " chunks of DRAM"));
  }
  if (free_chunks_.empty() || options_.max_chunks - Count(ArenaChunkState::kFree) >= limit_) {
    return absl::ResourceExhaustedError(
        absl::StrCat("all ", std::min(limit_, options_.max_chunks), " chunks of DRAM are granted"));
  }
  const ArenaChunkId id = free_chunks_.back();
  free_chunks_.pop_back();
  chunks_[id.value()].tenant = tenant;
  SetState(id, ArenaChunkState::kMaking);
  ++t.chunks;
  return id;
}

absl::Status ArenaLedger::EndGrant(ArenaChunkId chunk) {
  if (absl::Status status = CheckChunk(chunk, ArenaChunkState::kMaking); !status.ok()) {
    return status;
  }
  Chunk& c = chunks_[chunk.value()];
  c.room = {{0, options_.chunk_bytes.count()}};
  SetState(chunk, ArenaChunkState::kGranted);
  AddRoom(tenants_[c.tenant], chunk);
  return absl::OkStatus();
}

absl::Status ArenaLedger::CancelGrant(ArenaChunkId chunk) {
  if (absl::Status status = CheckChunk(chunk, ArenaChunkState::kMaking); !status.ok()) {
    return status;
  }
  FreeChunk(chunk);
  return absl::OkStatus();
}

absl::StatusOr<ArenaChunkId> ArenaLedger::Grant(TenantId tenant) {
  absl::StatusOr<ArenaChunkId> chunk = BeginGrant(tenant);
  if (!chunk.ok()) return chunk;
  if (absl::Status status = EndGrant(*chunk); !status.ok()) return status;
  return chunk;
}

void ArenaLedger::FreeChunk(ArenaChunkId chunk) {
  Chunk& c = chunks_[chunk.value()];
  c.room.clear();
  --tenants_[c.tenant].chunks;
  SetState(chunk, ArenaChunkState::kFree);
  free_chunks_.push_back(chunk);
}

void ArenaLedger::AddRoom(Tenant& tenant, ArenaChunkId chunk) {
  for (const auto& [offset, length] : chunks_[chunk.value()].room) {
    tenant.room.insert({length, chunk.value(), offset});
    tenant.room_bytes += Bytes(length);
  }
}

void ArenaLedger::RemoveRoom(Tenant& tenant, ArenaChunkId chunk) {
  for (const auto& [offset, length] : chunks_[chunk.value()].room) {
    tenant.room.erase({length, chunk.value(), offset});
    tenant.room_bytes -= Bytes(length);
  }
}

std::optional<ArenaChunkId> ArenaLedger::Cheapest(TenantId tenant) const {
  std::optional<ArenaChunkId> cheapest;
  const auto cost = [&](ArenaChunkId id) {
    const Chunk& chunk = chunks_[id.value()];
    return std::pair(chunk.pinned_blocks, chunk.used);
  };
  for (uint32_t i = 0; i < chunks_.size(); ++i) {
    const ArenaChunkId id(i);
    if (chunks_[i].state != ArenaChunkState::kGranted || chunks_[i].tenant != tenant) continue;
    if (!cheapest.has_value() || cost(id) < cost(*cheapest)) cheapest = id;
  }
  return cheapest;
}

absl::Status ArenaLedger::BeginRevoke(ArenaChunkId chunk) {
  if (absl::Status status = CheckChunk(chunk, ArenaChunkState::kGranted); !status.ok()) {
    return status;
  }
  RemoveRoom(tenants_[chunks_[chunk.value()].tenant], chunk);
  SetState(chunk, ArenaChunkState::kDraining);
  RetireIfDone(chunk);
  return absl::OkStatus();
}

absl::Status ArenaLedger::CancelRevoke(ArenaChunkId chunk) {
  if (absl::Status status = CheckChunk(chunk, ArenaChunkState::kDraining); !status.ok()) {
    return status;
  }
  SetState(chunk, ArenaChunkState::kGranted);
  AddRoom(tenants_[chunks_[chunk.value()].tenant], chunk);
  return absl::OkStatus();
}

void ArenaLedger::RetireIfDone(ArenaChunkId chunk) {
  const Chunk& c = chunks_[chunk.value()];
  if (c.state == ArenaChunkState::kDraining && c.blocks.empty() && c.mapped.empty()) {
    SetState(chunk, ArenaChunkState::kRetiring);
  }
}

std::vector<BlockKey> ArenaLedger::BlocksIn(ArenaChunkId chunk) const {
  std::vector<BlockKey> keys;
  for (const auto& [offset, block] : chunks_[chunk.value()].blocks) {
    if (!block->dropped) keys.push_back(block->id.key);
  }
  return keys;
}

std::vector<SessionId> ArenaLedger::MappedBy(ArenaChunkId chunk) const {
  const auto& mapped = chunks_[chunk.value()].mapped;
  std::vector<SessionId> sessions(mapped.begin(), mapped.end());
  std::sort(sessions.begin(), sessions.end());
  return sessions;
}

std::vector<std::pair<ArenaChunkId, SessionId>> ArenaLedger::UnmapsWanted() const {
  std::vector<std::pair<ArenaChunkId, SessionId>> wanted;
  for (uint32_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& chunk = chunks_[i];
    if (chunk.state != ArenaChunkState::kDraining || !chunk.blocks.empty()) continue;
    for (SessionId session : MappedBy(ArenaChunkId(i)))
      wanted.emplace_back(ArenaChunkId(i), session);
  }
  return wanted;
}

std::vector<ArenaChunkId> ArenaLedger::Retiring() const {
  std::vector<ArenaChunkId> retiring;
  for (uint32_t i = 0; i < chunks_.size(); ++i) {
    if (chunks_[i].state == ArenaChunkState::kRetiring) retiring.push_back(ArenaChunkId(i));
  }
  return retiring;
}

absl::Status ArenaLedger::Retired(ArenaChunkId chunk) {
  if (absl::Status status = CheckChunk(chunk, ArenaChunkState::kRetiring); !status.ok()) {
    return status;
  }
  FreeChunk(chunk);
  return absl::OkStatus();
}

absl::Status ArenaLedger::OpenSession(SessionId session, TenantId tenant) {
  if (!sessions_.emplace(session, Session{.tenant = tenant}).second) {
    return absl::AlreadyExistsError(absl::StrCat("session ", session.ToString(), " is open"));
  }
  tenants_.try_emplace(tenant);
  return absl::OkStatus();
}

absl::StatusOr<ArenaLedger::Session*> ArenaLedger::FindSession(SessionId session) {
  const auto found = sessions_.find(session);
  if (found != sessions_.end()) return &found->second;
  return absl::NotFoundError(absl::StrCat("no session ", session.ToString()));
}

absl::Status ArenaLedger::CloseSession(SessionId session) {
  absl::StatusOr<Session*> found = FindSession(session);
  if (!found.ok()) return found.status();
  const Session closing = std::move(**found);
  sessions_.erase(session);
  Tenant& tenant = tenants_[closing.tenant];
  for (ArenaChunkId chunk : closing.mapped) chunks_[chunk.value()].mapped.erase(session);
  for (Block* block : closing.writing) Erase(tenant, block);
  for (const auto& [block, pins] : closing.pins) Unpin(tenant, block, pins);
  for (ArenaChunkId chunk : closing.mapped) RetireIfDone(chunk);
  return absl::OkStatus();
}

absl::Status ArenaLedger::Map(SessionId session, ArenaChunkId chunk) {
  absl::StatusOr<Session*> found = FindSession(session);
  if (!found.ok()) return found.status();
  if (absl::Status status = CheckChunk(chunk, ArenaChunkState::kGranted); !status.ok()) {
    return status;
  }
  Chunk& c = chunks_[chunk.value()];
  if (c.tenant != (*found)->tenant) {
    return absl::PermissionDeniedError(
        absl::StrCat("chunk ", chunk.ToString(), " is of another tenant"));
  }
  c.mapped.insert(session);
  (*found)->mapped.insert(chunk);
  return absl::OkStatus();
}

absl::Status ArenaLedger::Unmap(SessionId session, ArenaChunkId chunk) {
  absl::StatusOr<Session*> found = FindSession(session);
  if (!found.ok()) return found.status();
  if (!(*found)->mapped.contains(chunk)) {
    return absl::FailedPreconditionError(
        absl::StrCat("session ", session.ToString(), " has not mapped chunk ", chunk.ToString()));
  }
  const auto in_chunk = [chunk](const Block* block) { return block->extent.chunk == chunk; };
  const auto& pins = (*found)->pins;
  const auto& writing = (*found)->writing;
  if (std::any_of(writing.begin(), writing.end(), in_chunk) ||
      std::any_of(pins.begin(), pins.end(), [&](const auto& pin) { return in_chunk(pin.first); })) {
    return absl::FailedPreconditionError(
        absl::StrCat("session ", session.ToString(), " unmapped chunk ", chunk.ToString(),
                     ", where it writes or pins a block; expected Abort or Release first"));
  }
  (*found)->mapped.erase(chunk);
  chunks_[chunk.value()].mapped.erase(session);
  RetireIfDone(chunk);
  return absl::OkStatus();
}

}  // namespace palimpsest
