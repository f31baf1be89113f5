// Memory of T1 that comes and goes.
#include <algorithm>
#include <cassert>

#include "absl/strings/str_cat.h"
#include "broker/core/blocks/block_directory_impl.h"

namespace palimpsest::blocks {

bool BlockDirectory::Impl::Making(const TenantBlocks& tenant) const {
  return std::any_of(making_.begin(), making_.end(),
                     [&](const auto& chunk) { return chunk.second == &tenant; });
}

bool BlockDirectory::Impl::CanGrow(const TenantBlocks& tenant, absl::Time now) const {
  return Making(tenant) || (now >= next_memory_ && ledger_.CanGrant(tenant.id()));
}

// One chunk at a time, before the last one is full.
void BlockDirectory::Impl::Grow(TenantBlocks& tenant, bool needed, absl::Time now) {
  if (Making(tenant) || !CanGrow(tenant, now) ||
      (!needed && ledger_.UsageOf(tenant.id()).free * 2 > ledger_.chunk_bytes())) {
    return;
  }
  const absl::StatusOr<ArenaChunkId> chunk = ledger_.BeginGrant(tenant.id());
  MustSucceed(chunk.status());
  making_.emplace(*chunk, &tenant);
  actions_.push_back(MakeChunk{.chunk = *chunk, .tenant = tenant.id()});
}

void BlockDirectory::Impl::OnChunkMade(ArenaChunkId chunk, const absl::Status& status,
                                       absl::Time now) {
  const auto found = making_.find(chunk);
  if (found == making_.end()) return;
  TenantBlocks& tenant = *found->second;
  making_.erase(found);
  if (status.ok()) {
    MustSucceed(ledger_.EndGrant(chunk));
    EnforceLimits(now);
  } else {
    MustSucceed(ledger_.CancelGrant(chunk));
    next_memory_ = now + options_.memory_back_off;
    tenant.account(kArenaTier).Refuse(Refusal::kNoMemory);
  }
  Pump(now);
}

void BlockDirectory::Impl::Revoke(ArenaChunkId chunk, absl::Time now) {
  MustSucceed(ledger_.BeginRevoke(chunk));
  revoking_.emplace(chunk, now);
}

void BlockDirectory::Impl::EnforceLimits(absl::Time now) {
  for (const auto& [id, tenant] : tenants_) {
    for (uint32_t excess = ledger_.Excess(id); excess > 0; --excess) {
      Revoke(*ledger_.Cheapest(id), now);
    }
  }
  // Of all together: whoever has most, compared with its budget.
  for (uint32_t excess = ledger_.Excess(); excess > 0; --excess) {
    TenantBlocks* fullest = nullptr;
    double most = -1;
    for (const auto& [id, tenant] : tenants_) {
      const auto budget = static_cast<double>(tenant->account(kArenaTier).budget.count());
      const double share = static_cast<double>(ledger_.Staying(id)) / std::max(budget, 1.0);
      if (ledger_.Staying(id) == 0 || share <= most) continue;
      fullest = tenant.get();
      most = share;
    }
    Revoke(*ledger_.Cheapest(fullest->id()), now);
  }
}

void BlockDirectory::Impl::PumpChunks(absl::Time now) {
  if (revoking_.empty()) return;
  for (const auto& [chunk, since] : revoking_) {
    TenantBlocks& tenant = *tenants_.at(ledger_.tenant(chunk));
    Evacuate(tenant, chunk, since + options_.unmap_deadline / 2, now);
  }
  absl::btree_map<SessionId, UnmapChunks> unmaps;
  for (const auto& [chunk, id] : ledger_.UnmapsWanted()) {
    if (!sessions_.at(id).unmaps.insert(chunk).second) continue;
    UnmapChunks& unmap = unmaps[id];
    unmap.session = id;
    unmap.chunks.push_back(chunk);
    unmap.deadline = std::max(unmap.deadline, revoking_.at(chunk) + options_.unmap_deadline);
  }
  for (auto& [id, unmap] : unmaps) actions_.push_back(std::move(unmap));
  for (const ArenaChunkId chunk : ledger_.Retiring()) {
    if (!retiring_.insert(chunk).second) continue;
    revoking_.erase(chunk);
    actions_.push_back(RetireChunk{.chunk = chunk});
  }
}

// Sends what lies in a chunk that is revoked to lower tiers, without more copies under way than
// there may be, or drops it: at once if there is a copy, else after `due`. What is pinned stays
// until it is not, or until then.
void BlockDirectory::Impl::Evacuate(TenantBlocks& tenant, ArenaChunkId chunk, absl::Time due,
                                    absl::Time now) {
  for (const BlockKey& key : ledger_.BlocksIn(chunk)) {
    const BlockHandle block = tenant.tree().Find(key);
    const PlacedBlock& placed = tenant.At(block);
    if (placed.retention != 0) tenant.Unretain(block);
    if (placed.arena == InArena::kRanked) {
      const bool waits = placed.store != TransferId() ||
                         (!placed.HasCopy() && stores_.size() >= options_.max_stores);
      const bool pinned = tenant.rank(kArenaTier).pins(block) > 0;
      if (now < due && (pinned || waits)) continue;
      if (now < due) {
        LetGo(tenant, block, now);
      } else {
        Drop(tenant, block);
      }
    }
    if (placed.arena == InArena::kSpare || (placed.arena == InArena::kLeaving && now >= due)) {
      Drop(tenant, block);
    }
  }
}

void BlockDirectory::Impl::ReportOverdue(ArenaChunkId chunk) {
  const auto report = [&](SessionId id, Session& session) {
    if (session.overdue) return;
    session.overdue = true;
    actions_.push_back(SessionOverdue{
        .session = id,
        .why = absl::StrCat("it has not given chunk ", chunk.ToString(), " of T1 back in ",
                            absl::FormatDuration(options_.unmap_deadline))});
  };
  const std::vector<SessionId> mapped = ledger_.MappedBy(chunk);
  for (auto& [id, session] : sessions_) {
    bool uses = std::binary_search(mapped.begin(), mapped.end(), id);
    for (const auto& [number, request] : session.requests) {
      const auto pins = request.pins.lower_bound({chunk.value(), 0});
      uses = uses || (pins != request.pins.end() && pins->first.first == chunk.value());
    }
    for (const BlockKey& key : ledger_.WrittenBy(id)) {
      uses = uses || ledger_.Find(session.tenant->id(), key)->extent.chunk == chunk;
    }
    if (uses) report(id, session);
  }
}

absl::Status BlockDirectory::Impl::Map(SessionId id, absl::Span<const ArenaChunkId> chunks) {
  absl::StatusOr<Session*> found = FindSession(id);
  if (!found.ok()) return found.status();
  for (const ArenaChunkId chunk : chunks) {
    if (chunk.value() >= ledger_.max_chunks() ||
        ledger_.state(chunk) != ArenaChunkState::kGranted ||
        ledger_.tenant(chunk) != (*found)->tenant->id()) {
      return absl::FailedPreconditionError(
          absl::StrCat("chunk ", chunk.ToString(),
                       " is not the tenant's, or is being revoked; expected that what lies there "
                       "is released or aborted"));
    }
  }
  for (const ArenaChunkId chunk : chunks) MustSucceed(ledger_.Map(id, chunk));
  return absl::OkStatus();
}

std::vector<ArenaChunkId> BlockDirectory::Impl::UnmapsOf(SessionId session) const {
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return {};
  return {found->second.unmaps.begin(), found->second.unmaps.end()};
}

absl::Status BlockDirectory::Impl::OnUnmapped(SessionId id, absl::Span<const ArenaChunkId> chunks,
                                              absl::Time now) {
  absl::StatusOr<Session*> found = FindSession(id);
  if (!found.ok()) return found.status();
  absl::Status result;
  for (const ArenaChunkId chunk : chunks) {
    const absl::Status status = ledger_.Unmap(id, chunk);
    if (status.ok()) (*found)->unmaps.erase(chunk);
    result.Update(absl::IsInvalidArgument(status) ? absl::FailedPreconditionError(status.message())
                                                  : status);
  }
  Pump(now);
  return result;
}

void BlockDirectory::Impl::OnChunkRetired(ArenaChunkId chunk, absl::Time now) {
  if (retiring_.erase(chunk) == 0) return;
  MustSucceed(ledger_.Retired(chunk));
  Pump(now);
}

}  // namespace palimpsest::blocks
