// What lower tiers say, and purges.
#include <algorithm>
#include <cassert>

#include "absl/container/flat_hash_map.h"
#include "broker/core/blocks/block_directory_impl.h"

namespace palimpsest::blocks {
namespace {

// A purge that failed is tried again.
constexpr absl::Duration kPurgeAgain = absl::Seconds(1);

}  // namespace

void BlockDirectory::Impl::OnTierState(TierIndex tier, const TierState& state, absl::Time now) {
  if (tier == kArenaTier || !CheckTier(tier).ok()) return;
  LowerOf(tier).state = state;
  SetPrefetchBudgets();
  Pump(now);
}

bool BlockDirectory::Impl::AddCopy(TenantBlocks& tenant, TierIndex tier, const BlockRecord& record,
                                   bool foreign, absl::Time now) {
  BlockHandle block = tenant.tree().Find(record.id.key);
  if (block == kNoBlock) {
    block = tenant.tree().Add(record.id.key, tenant.tree().Find(record.id.parent));
    tenant.NameStrangers({&block, 1}, now);
  }
  PlacedBlock& placed = tenant.At(block);
  const std::optional<ArenaLedger::Found> above = ledger_.Find(tenant.id(), record.id.key);
  if ((placed.id != nullptr && *placed.id != record.id) ||
      (above.has_value() && *above->id != record.id)) {
    tenant.account(tier).Refuse(Refusal::kCollision);
    return false;
  }
  const Copy* const known = placed.CopyIn(tier);
  if (known != nullptr && known->foreign && !foreign) tenant.Removed(block, tier);
  if (placed.CopyIn(tier) == nullptr) tenant.Stored(block, tier, record, foreign);
  return true;
}

void BlockDirectory::Impl::AddOwn(TierIndex tier, const BlockRecord& record, absl::Time now) {
  const auto found = by_name_.find(record.id.tenant);
  bool wanted = found != by_name_.end();
  if (wanted) {
    TenantBlocks& tenant = *found->second;
    const BlockHandle block = tenant.tree().Find(record.id.key);
    const auto store = block == kNoBlock ? stores_.end() : stores_.find(tenant.At(block).store);
    const bool doomed = store != stores_.end() && store->second.to == tier && store->second.doomed;
    wanted = !doomed && AddCopy(tenant, tier, record, /*foreign=*/false, now);
  }
  if (!wanted) actions_.push_back(RemoveBlock{.tier = tier, .key = record.id.key});
}

void BlockDirectory::Impl::OnStored(TierIndex tier, const BlockRecord& record, absl::Time now) {
  if (tier == kArenaTier || !CheckTier(tier).ok()) return;
  AddOwn(tier, record, now);
  Pump(now);
}

void BlockDirectory::Impl::OnForeign(TierIndex tier, const BlockRecord& record, absl::Time now) {
  if (tier == kArenaTier || !CheckTier(tier).ok()) return;
  const auto found = by_name_.find(record.id.tenant);
  // What is found before the tier has purged may be from before.
  if (found == by_name_.end() || Purging(found->second->id())) return;
  AddCopy(*found->second, tier, record, /*foreign=*/true, now);
  Pump(now);
}

// Parents first, so that each hangs on the one before it when the policies hear of it.
void BlockDirectory::Impl::OnRecovered(TierIndex tier, absl::Span<const BlockRecord> records,
                                       absl::Time now) {
  if (tier == kArenaTier || !CheckTier(tier).ok()) return;
  absl::flat_hash_map<BlockKey, const BlockRecord*> left;
  for (const BlockRecord& record : records) left.emplace(record.id.key, &record);
  std::vector<const BlockRecord*> chain;
  for (const BlockRecord& record : records) {
    for (auto next = left.find(record.id.key); next != left.end();
         next = left.find(chain.back()->id.parent)) {
      chain.push_back(next->second);
      left.erase(next);
    }
    for (; !chain.empty(); chain.pop_back()) AddOwn(tier, *chain.back(), now);
  }
  Pump(now);
}

void BlockDirectory::Impl::OnRemoved(TierIndex tier, const BlockRecord& record, absl::Time now) {
  if (tier == kArenaTier || !CheckTier(tier).ok()) return;
  const auto found = by_name_.find(record.id.tenant);
  if (found == by_name_.end()) return;
  TenantBlocks& tenant = *found->second;
  const BlockHandle block = tenant.tree().Find(record.id.key);
  if (block == kNoBlock) return;
  PlacedBlock& placed = tenant.At(block);
  if (placed.CopyIn(tier) == nullptr || *placed.id != record.id) return;
  tenant.Removed(block, tier);
  Pump(now);
}

void BlockDirectory::Impl::SendPurge(PurgeId id) {
  const OpenPurge& purge = purges_.at(id);
  actions_.push_back(PurgeTier{.purge = id, .tier = purge.tier, .tenant = purge.tenant->id()});
}

absl::StatusOr<uint64_t> BlockDirectory::Impl::Purge(TenantId id, absl::Time now) {
  absl::StatusOr<TenantBlocks*> found = FindTenant(id);
  if (!found.ok()) return found.status();
  TenantBlocks& tenant = **found;
  for (auto& [transfer, load] : loads_) load.doomed = load.doomed || load.tenant == &tenant;
  for (auto& [transfer, store] : stores_) store.doomed = store.doomed || store.tenant == &tenant;
  std::vector<WaitId> waits;
  for (const auto& [wait, open] : waits_) {
    if (open.tenant == &tenant) waits.push_back(wait);
  }
  for (const WaitId wait : waits) {
    actions_.push_back(NoAnswer(wait));
    GiveUpWait(wait);
  }
  // The last ones of each sequence first: then nothing hangs on what goes.
  std::vector<BlockHandle> blocks = tenant.tree().All();
  std::stable_sort(blocks.begin(), blocks.end(), [&](BlockHandle a, BlockHandle b) {
    return tenant.tree().position(a) > tenant.tree().position(b);
  });
  uint64_t forgotten = 0;
  for (const BlockHandle block : blocks) {
    PlacedBlock& placed = tenant.At(block);
    if (placed.ready() || placed.HasCopy()) ++forgotten;
    placed.doomed = placed.arena == InArena::kWriting;
    if (placed.ready()) Drop(tenant, block);
    for (const Copy& copy : absl::InlinedVector<Copy, 1>(placed.copies)) {
      if (copy.foreign) {
        tenant.Removed(block, copy.tier);
      } else if (!copy.leaving) {
        tenant.LeaveTier(block, copy.tier);
      }
    }
  }
  for (size_t i = 1; i <= lower_.size(); ++i) {
    const PurgeId purge(++last_purge_);
    purges_[purge] = {.tenant = &tenant, .tier = TierIndex(static_cast<uint8_t>(i))};
    SendPurge(purge);
  }
  Pump(now);
  return forgotten;
}

bool BlockDirectory::Impl::Purging(TenantId tenant) const {
  return std::any_of(purges_.begin(), purges_.end(),
                     [tenant](const auto& purge) { return purge.second.tenant->id() == tenant; });
}

void BlockDirectory::Impl::OnPurged(PurgeId id, const absl::Status& status, absl::Time now) {
  const auto found = purges_.find(id);
  if (found == purges_.end()) return;
  if (status.ok()) {
    purges_.erase(found);
  } else {
    found->second.again = now + kPurgeAgain;
  }
}

absl::StatusOr<Trimmed> BlockDirectory::Impl::Trim(TenantId id, TierIndex tier, Bytes keep,
                                                   absl::Time now) {
  if (absl::Status status = CheckTier(tier); !status.ok()) return status;
  absl::StatusOr<TenantBlocks*> found = FindTenant(id);
  if (!found.ok()) return found.status();
  if (keep < Bytes(0)) return absl::InvalidArgumentError("less than nothing is to be kept");
  TenantBlocks& tenant = **found;
  Trimmed trimmed;
  if (tier == kArenaTier) {
    const int64_t most = keep / ledger_.chunk_bytes();
    for (int64_t has = ledger_.Staying(id); has > most; --has) {
      const std::optional<ArenaChunkId> chunk = ledger_.Cheapest(id);
      if (!chunk.has_value()) break;
      for (const BlockKey& key : ledger_.BlocksIn(*chunk)) {
        ++trimmed.blocks;
        trimmed.bytes += ledger_.Find(id, key)->extent.length;
      }
      Revoke(*chunk, now);
    }
  } else {
    const TierAccount& account = tenant.account(tier);
    while (account.Staying() > keep) {
      const std::optional<BlockHandle> victim =
          tenant.rank(tier).ChooseVictim(now, kNoBlock, false);
      if (!victim.has_value()) break;
      ++trimmed.blocks;
      trimmed.bytes += tenant.At(*victim).CopyIn(tier)->length;
      LetGoBelow(tenant, tier, *victim, now);
    }
  }
  Pump(now);
  return trimmed;
}

}  // namespace palimpsest::blocks
