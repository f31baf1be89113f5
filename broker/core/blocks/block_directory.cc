#include "broker/core/blocks/block_directory.h"

#include <algorithm>
#include <cassert>

#include "absl/strings/str_cat.h"
#include "broker/core/blocks/block_directory_impl.h"

namespace palimpsest::blocks {
namespace {

// The directory's own sessions.
constexpr uint64_t kOwn = uint64_t{1} << 63;

}  // namespace

absl::string_view RefusalName(Refusal refusal) {
  switch (refusal) {
    case Refusal::kNoRoom:
      return "no_room";
    case Refusal::kCollision:
      return "collision";
    case Refusal::kNoMemory:
      return "no_memory";
    case Refusal::kWorthless:
      return "worthless";
    case Refusal::kBusy:
      return "busy";
    case Refusal::kBroken:
      return "broken";
    case Refusal::kLate:
      return "late";
  }
  return "invalid";
}

void MustSucceed(const absl::Status& status) {
  assert(status.ok());
  static_cast<void>(status);
}

absl::Status DirectoryOptions::Validate() const {
  if (absl::Status status = arena.Validate(); !status.ok()) return status;
  if (lower.size() > BlockDirectory::kMaxLowerTiers) {
    return absl::InvalidArgumentError(absl::StrCat(
        lower.size(), " tiers below T1; expected at most ", BlockDirectory::kMaxLowerTiers));
  }
  for (const LowerTier& tier : lower) {
    if (tier.name.empty() || tier.capacity < Bytes(0) || tier.unit < Bytes(1)) {
      return absl::InvalidArgumentError(
          absl::StrCat("tier '", tier.name, "' of ", tier.capacity.count(), " bytes in units of ",
                       tier.unit.count(), "; expected a name, no less than 0 and 1"));
    }
  }
  if (!(low_water >= 0 && low_water < 1) || !(prefetch_share >= 0 && prefetch_share <= 1) ||
      !(retain_share >= 0 && retain_share <= 1) || max_loads < 1 || max_stores < 1 ||
      max_waits < 1 || max_requests < 1 || events < 1) {
    return absl::InvalidArgumentError(
        "expected low_water from 0 to below 1, prefetch_share and retain_share from 0 to 1, and "
        "max_loads, "
        "max_stores, max_waits, max_requests "
        "and events of at least 1");
  }
  return absl::OkStatus();
}

BlockDirectory::Impl::Impl(const DirectoryOptions& options)
    : options_(options), ledger_(options.arena), events_(options.events) {
  assert(options.Validate().ok());
  for (const LowerTier& tier : options.lower) lower_.push_back({.config = tier});
}

absl::Status BlockDirectory::Impl::AddTenant(const BlockTenant& tenant, absl::Time now) {
  if (tenant.name.empty() || tenant.name.size() > kMaxTenantName ||
      tenant.budgets.size() > lower_.size() + 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("tenant '", tenant.name, "' with ", tenant.budgets.size(),
                     " budgets; expected a name of 1 to ", kMaxTenantName, " bytes and at most ",
                     lower_.size() + 1, " budgets"));
  }
  if (tenants_.contains(tenant.id) || by_name_.contains(tenant.name)) {
    return absl::AlreadyExistsError(absl::StrCat("tenant '", tenant.name, "' is known"));
  }
  auto added = std::make_unique<TenantBlocks>(tenant, options_, events_);
  MustSucceed(ledger_.OpenSession(OwnSession(*added), tenant.id));
  by_name_.emplace(tenant.name, added.get());
  const Bytes budget = added->account(kArenaTier).budget;
  tenants_.emplace(tenant.id, std::move(added));
  SetPrefetchBudgets();
  return SetBudget(tenant.id, kArenaTier, budget, now);
}

absl::StatusOr<TenantBlocks*> BlockDirectory::Impl::FindTenant(TenantId tenant) {
  const auto found = tenants_.find(tenant);
  if (found != tenants_.end()) return found->second.get();
  return absl::NotFoundError(absl::StrCat("no tenant ", tenant.ToString()));
}

absl::Status BlockDirectory::Impl::CheckTier(TierIndex tier) const {
  if (tier.value() <= lower_.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("tier ", tier.ToString(), "; expected 0 to ", lower_.size()));
}

SessionId BlockDirectory::Impl::OwnSession(const TenantBlocks& tenant) const {
  return SessionId(kOwn | tenant.id().value());
}

Bytes BlockDirectory::Impl::Staying(TierIndex tier) const {
  Bytes sum;
  for (const auto& [id, tenant] : tenants_) sum += tenant->account(tier).Staying();
  return sum;
}

Bytes BlockDirectory::Impl::Used(TierIndex tier) const {
  Bytes sum;
  for (const auto& [id, tenant] : tenants_) sum += tenant->account(tier).Used();
  return sum;
}

void BlockDirectory::Impl::Pump(absl::Time now) {
  BeginQueued(now);
  DemoteQueued(now);
  PumpChunks(now);
  for (const auto& [id, tenant] : tenants_) KeepArenaFree(*tenant, now);
  for (size_t i = 1; i <= lower_.size(); ++i) {
    KeepTierFree(TierIndex(static_cast<uint8_t>(i)), now);
  }
  for (const auto& [id, tenant] : tenants_) tenant->ForgetOldest();
}

absl::Status BlockDirectory::Impl::SetCapacity(TierIndex tier, Bytes capacity, absl::Time now) {
  if (absl::Status status = CheckTier(tier); !status.ok()) return status;
  if (capacity < Bytes(0)) return absl::InvalidArgumentError("a capacity below 0");
  if (tier == kArenaTier) {
    const int64_t chunks = std::min<int64_t>(capacity / ledger_.chunk_bytes(), UINT32_MAX);
    ledger_.SetLimit(static_cast<uint32_t>(chunks));
    EnforceLimits(now);
  } else {
    LowerOf(tier).config.capacity = capacity;
  }
  Pump(now);
  return absl::OkStatus();
}

absl::Status BlockDirectory::Impl::SetBudget(TenantId tenant, TierIndex tier, Bytes budget,
                                             absl::Time now) {
  if (absl::Status status = CheckTier(tier); !status.ok()) return status;
  absl::StatusOr<TenantBlocks*> found = FindTenant(tenant);
  if (!found.ok()) return found.status();
  if (budget < Bytes(0)) return absl::InvalidArgumentError("a budget below 0");
  if (tier == kArenaTier) {
    const int64_t chunks = std::min<int64_t>(budget / ledger_.chunk_bytes(), UINT32_MAX);
    (*found)->account(tier).budget = ledger_.chunk_bytes() * chunks;
    ledger_.SetTenantLimit(tenant, static_cast<uint32_t>(chunks));
    EnforceLimits(now);
  } else {
    (*found)->account(tier).budget = budget;
  }
  Pump(now);
  return absl::OkStatus();
}

absl::Status BlockDirectory::Impl::SetRecompute(TenantId tenant, const RecomputeCost& cost) {
  absl::StatusOr<TenantBlocks*> found = FindTenant(tenant);
  if (!found.ok()) return found.status();
  if (cost.first < absl::ZeroDuration() || cost.per_position < absl::ZeroDuration()) {
    return absl::InvalidArgumentError("computing a block takes less than no time");
  }
  (*found)->set_recompute(cost);
  return absl::OkStatus();
}

TierCounters BlockDirectory::Impl::CountersOf(TenantId tenant, TierIndex tier) const {
  const TierAccount& account = tenants_.at(tenant)->account(tier);
  TierCounters counters = account.counters;
  counters.used = account.Used();
  counters.capacity = account.budget;
  if (tier == kArenaTier) {
    const ArenaLedger::Usage usage = ledger_.UsageOf(tenant);
    counters.used = usage.writing + usage.ready + usage.dropped;
  }
  counters.price = account.price.last();
  return counters;
}

std::vector<BlockEvent> BlockDirectory::Impl::Snapshot() const {
  std::vector<BlockEvent> snapshot;
  for (const auto& [id, tenant] : tenants_) {
    const auto add = [&, id = id, &tenant = tenant](TierIndex tier, BlockHandle block) {
      snapshot.push_back({.sequence = events_.last(),
                          .kind = BlockEvent::Kind::kStored,
                          .tenant = id,
                          .tier = tier,
                          .key = tenant->tree().key(block)});
    };
    for (const BlockHandle block : tenant->tree().All()) {
      const PlacedBlock& placed = tenant->At(block);
      if (placed.ready()) add(kArenaTier, block);
      for (const Copy& copy : placed.copies) add(copy.tier, block);
    }
  }
  return snapshot;
}

BlockDirectory::BlockDirectory(const DirectoryOptions& options)
    : impl_(std::make_unique<Impl>(options)) {}
BlockDirectory::~BlockDirectory() = default;

std::vector<BlockAction> BlockDirectory::TakeActions() { return impl_->TakeActions(); }
absl::Status BlockDirectory::AddTenant(const BlockTenant& tenant, absl::Time now) {
  return impl_->AddTenant(tenant, now);
}
absl::Status BlockDirectory::SetCapacity(TierIndex tier, Bytes capacity, absl::Time now) {
  return impl_->SetCapacity(tier, capacity, now);
}
absl::Status BlockDirectory::SetBudget(TenantId tenant, TierIndex tier, Bytes budget,
                                       absl::Time now) {
  return impl_->SetBudget(tenant, tier, budget, now);
}
absl::Status BlockDirectory::SetRecompute(TenantId tenant, const RecomputeCost& cost) {
  return impl_->SetRecompute(tenant, cost);
}
absl::StatusOr<Trimmed> BlockDirectory::Trim(TenantId tenant, TierIndex tier, Bytes keep,
                                             absl::Time now) {
  return impl_->Trim(tenant, tier, keep, now);
}
absl::StatusOr<uint64_t> BlockDirectory::Purge(TenantId tenant, absl::Time now) {
  return impl_->Purge(tenant, now);
}
bool BlockDirectory::Purging(TenantId tenant) const { return impl_->Purging(tenant); }
absl::Status BlockDirectory::OpenSession(SessionId session, TenantId tenant, absl::Time now) {
  if ((session.value() & kOwn) != 0) {
    return absl::InvalidArgumentError("session ids with the highest bit are the directory's own");
  }
  return impl_->OpenSession(session, tenant, now);
}
absl::Status BlockDirectory::CloseSession(SessionId session, absl::Time now) {
  return impl_->CloseSession(session, now);
}
absl::Status BlockDirectory::Map(SessionId session, absl::Span<const ArenaChunkId> chunks) {
  return impl_->Map(session, chunks);
}
std::vector<ArenaChunkId> BlockDirectory::UnmapsOf(SessionId session) const {
  return impl_->UnmapsOf(session);
}
absl::StatusOr<AcquireReply> BlockDirectory::Acquire(SessionId session,
                                                     const AcquireRequest& request,
                                                     absl::Time now) {
  return impl_->Acquire(session, request, now);
}
void BlockDirectory::CancelWait(SessionId session, WaitId wait, absl::Time now) {
  impl_->CancelWait(session, wait, now);
}
absl::StatusOr<std::vector<Reserved>> BlockDirectory::Reserve(
    SessionId session, uint64_t request, absl::Span<const ArenaLedger::Wanted> wanted,
    absl::Time now) {
  return impl_->Reserve(session, request, wanted, now);
}
absl::Status BlockDirectory::Commit(SessionId session,
                                    absl::Span<const ArenaLedger::Committed> blocks,
                                    absl::Time now) {
  return impl_->Commit(session, blocks, now);
}
absl::Status BlockDirectory::Abort(SessionId session, absl::Span<const BlockKey> keys,
                                   absl::Time now) {
  return impl_->Abort(session, keys, now);
}
absl::Status BlockDirectory::Release(SessionId session, uint64_t request,
                                     absl::Span<const ArenaExtent> extents, absl::Time now) {
  return impl_->Release(session, request, extents, now);
}
absl::Status BlockDirectory::EndRequest(SessionId session, const RequestEnding& ending,
                                        absl::Time now) {
  return impl_->EndRequest(session, ending, now);
}
absl::StatusOr<size_t> BlockDirectory::Hint(SessionId session, const BlockHint& hint,
                                            absl::Time now) {
  return impl_->Hint(session, hint, now);
}
void BlockDirectory::OnChunkMade(ArenaChunkId chunk, const absl::Status& status, absl::Time now) {
  impl_->OnChunkMade(chunk, status, now);
}
void BlockDirectory::OnChunkRetired(ArenaChunkId chunk, absl::Time now) {
  impl_->OnChunkRetired(chunk, now);
}
absl::Status BlockDirectory::OnUnmapped(SessionId session, absl::Span<const ArenaChunkId> chunks,
                                        absl::Time now) {
  return impl_->OnUnmapped(session, chunks, now);
}
void BlockDirectory::OnLoaded(TransferId transfer, const absl::Status& status, absl::Time now) {
  impl_->OnLoaded(transfer, status, now);
}
void BlockDirectory::OnStoreDone(TransferId transfer, const absl::Status& status, absl::Time now) {
  impl_->OnStoreDone(transfer, status, now);
}
void BlockDirectory::OnPurged(PurgeId purge, const absl::Status& status, absl::Time now) {
  impl_->OnPurged(purge, status, now);
}
void BlockDirectory::OnTierState(TierIndex tier, const TierState& state, absl::Time now) {
  impl_->OnTierState(tier, state, now);
}
void BlockDirectory::OnRecovered(TierIndex tier, absl::Span<const BlockRecord> records,
                                 absl::Time now) {
  impl_->OnRecovered(tier, records, now);
}
void BlockDirectory::OnStored(TierIndex tier, const BlockRecord& record, absl::Time now) {
  impl_->OnStored(tier, record, now);
}
void BlockDirectory::OnForeign(TierIndex tier, const BlockRecord& record, absl::Time now) {
  impl_->OnForeign(tier, record, now);
}
void BlockDirectory::OnRemoved(TierIndex tier, const BlockRecord& record, absl::Time now) {
  impl_->OnRemoved(tier, record, now);
}
absl::Time BlockDirectory::Tick(absl::Time now) { return impl_->Tick(now); }
TierCounters BlockDirectory::CountersOf(TenantId tenant, TierIndex tier) const {
  return impl_->CountersOf(tenant, tier);
}
prefetch::PrefetchCounts BlockDirectory::PrefetchesOf(TenantId tenant) const {
  return impl_->PrefetchesOf(tenant);
}
size_t BlockDirectory::known(TenantId tenant) const { return impl_->known(tenant); }
const BlockEvents& BlockDirectory::events() const { return impl_->events(); }
std::vector<BlockEvent> BlockDirectory::Snapshot() const { return impl_->Snapshot(); }
const ArenaLedger& BlockDirectory::arena() const { return impl_->arena(); }
size_t BlockDirectory::loads() const { return impl_->loads(); }
size_t BlockDirectory::stores() const { return impl_->stores(); }
absl::Status BlockDirectory::CheckConsistency() const { return impl_->CheckConsistency(); }

}  // namespace palimpsest::blocks
