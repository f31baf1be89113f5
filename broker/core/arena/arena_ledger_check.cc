#include "absl/strings/str_cat.h"
#include "broker/core/arena/arena_ledger.h"

namespace palimpsest {

absl::Status ArenaLedger::CheckTiling(ArenaChunkId id) const {
  const Chunk& chunk = chunks_[id.value()];
  const auto wrong = [&](absl::string_view what) {
    return absl::InternalError(absl::StrCat("chunk ", id.ToString(), ": ", what));
  };
  if (chunk.state == ArenaChunkState::kFree || chunk.state == ArenaChunkState::kMaking) {
    return chunk.blocks.empty() && chunk.room.empty() && chunk.mapped.empty()
               ? absl::OkStatus()
               : wrong("it has no memory, but is not empty");
  }
  auto block = chunk.blocks.begin();
  auto room = chunk.room.begin();
  int64_t at = 0;
  bool after_room = false;
  Bytes used;
  uint32_t pinned = 0;
  while (at < chunk_bytes().count()) {
    if (block != chunk.blocks.end() && block->first == at) {
      const Bytes taken = Rounded(block->second->extent.length);
      if (block->second->extent.chunk != id || block->second->extent.offset.count() != at) {
        return wrong("a block believes that it lies elsewhere");
      }
      used += taken;
      pinned += block->second->pins > 0 ? 1 : 0;
      at += taken.count();
      after_room = false;
      ++block;
    } else if (room != chunk.room.end() && room->first == at && room->second > 0) {
      if (after_room) return wrong("free room is in two pieces");
      at += room->second;
      after_room = true;
      ++room;
    } else {
      return wrong(absl::StrCat("byte ", at, " is neither free nor a block's, or both"));
    }
  }
  if (at != chunk_bytes().count() || block != chunk.blocks.end() || room != chunk.room.end()) {
    return wrong("its blocks and free room do not end with it");
  }
  if (used != chunk.used || pinned != chunk.pinned_blocks) return wrong("its sums are wrong");
  const bool done = chunk.blocks.empty() && chunk.mapped.empty();
  if (chunk.state == ArenaChunkState::kRetiring
          ? !done
          : chunk.state == ArenaChunkState::kDraining && done) {
    return wrong("it retires too early or not at all");
  }
  return absl::OkStatus();
}

absl::Status ArenaLedger::CheckConsistency() const {
  std::vector<uint32_t> counts(kArenaChunkStates);
  absl::flat_hash_map<TenantId, Usage> usages;
  absl::flat_hash_map<TenantId, size_t> known;
  absl::flat_hash_map<const Block*, uint32_t> pins;
  size_t writing = 0;
  for (uint32_t i = 0; i < chunks_.size(); ++i) {
    const Chunk& chunk = chunks_[i];
    if (absl::Status status = CheckTiling(ArenaChunkId(i)); !status.ok()) return status;
    ++counts[static_cast<size_t>(chunk.state)];
    if (chunk.state == ArenaChunkState::kFree) continue;
    Usage& usage = usages[chunk.tenant];
    ++usage.chunks;
    if (chunk.state == ArenaChunkState::kGranted) usage.free += chunk_bytes() - chunk.used;
    for (const auto& [offset, block] : chunk.blocks) {
      const Bytes taken = Rounded(block->extent.length);
      (block->dropped ? usage.dropped : block->ready ? usage.ready : usage.writing) += taken;
      if (block->ready && !block->dropped) ++usage.blocks;
      known[chunk.tenant] += block->dropped ? 0 : 1;
      writing += block->ready ? 0 : 1;
      pins[block.get()] = block->pins;
      if (block->dropped && block->pins == 0) {
        return absl::InternalError("a dropped block that nobody pins still takes room");
      }
    }
  }
  for (const auto& [id, session] : sessions_) {
    writing -= session.writing.size();
    for (const auto& [block, count] : session.pins) {
      if (count == 0 || !pins.contains(block) || pins[block] < count) {
        return absl::InternalError("a session's pins are not those of its blocks");
      }
      pins[block] -= count;
    }
  }
  for (const auto& [block, count] : pins) {
    if (count != 0) return absl::InternalError("a block is pinned by nobody");
  }
  if (writing != 0) return absl::InternalError("a block is written by nobody");
  if (counts != counts_ || free_chunks_.size() != Count(ArenaChunkState::kFree)) {
    return absl::InternalError("chunks are counted wrongly");
  }
  for (const auto& [id, tenant] : tenants_) {
    const Usage counted = usages[id];
    const Usage kept = UsageOf(id);
    Bytes room;
    for (const Room& piece : tenant.room) room += Bytes(piece.length);
    if (counted.chunks != kept.chunks || counted.blocks != kept.blocks ||
        counted.writing != kept.writing || counted.ready != kept.ready ||
        counted.dropped != kept.dropped || counted.free != kept.free || room != kept.free ||
        tenant.known.size() != known[id]) {
      return absl::InternalError(absl::StrCat("the sums of tenant ", id.ToString(), " are wrong"));
    }
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
