// Who leaves a tier and where it goes; transfers and what becomes of them.
#include <algorithm>
#include <cassert>

#include "broker/core/blocks/block_directory_impl.h"

namespace palimpsest::blocks {
namespace {

// So many victims at most for one tier and call, or for one block beside those that are copied: the
// rest waits for the next call.
constexpr int kMostVictims = 64;

}  // namespace

// What a tier would make of the block, above its price; none if it does not take it. Without
// predictions all blocks look alike, and the tier's policy decides alone.
std::optional<double> BlockDirectory::Impl::ExcessIn(TenantBlocks& tenant, BlockHandle block,
                                                     TierIndex tier, Bytes length, absl::Time now) {
  TierAccount& account = tenant.account(tier);
  const Tier& lower = LowerOf(tier);
  const Bytes bytes = account.Rounded(length);
  if (account.budget == Bytes(0) || tenant.At(block).CopyIn(tier) != nullptr) return std::nullopt;
  if (!lower.state.serving) {
    account.Refuse(Refusal::kBroken);
    return std::nullopt;
  }
  const absl::Duration move = lower.state.store.Expect(length) * lower.use.ShareAt(now);
  const double rate = tenant.RateOf(block, length, lower.state.load.Expect(length), move, now);
  if (rate <= 0) {
    account.Refuse(Refusal::kWorthless);
    return std::nullopt;
  }
  // Where there is room nothing has to go for it.
  const double tight = 1 - 2 * options_.low_water;
  const auto fills = [&](Bytes used, Bytes all) {
    return static_cast<double>((used + bytes).count()) > tight * static_cast<double>(all.count());
  };
  const bool scarce =
      fills(account.Staying(), account.budget) || fills(Staying(tier), lower.config.capacity);
  const bool priced = scarce && tenant.Predicts(block, now);
  const double excess = rate - (priced ? account.price.At(now) : 0);
  if (account.Used() + bytes > account.budget || Used(tier) + bytes > lower.config.capacity ||
      excess <= 0) {
    account.Refuse(Refusal::kNoRoom);
    return std::nullopt;
  }
  return excess;
}

std::optional<TierIndex> BlockDirectory::Impl::ChooseTier(TenantBlocks& tenant, BlockHandle block,
                                                          TierIndex from, Bytes length,
                                                          absl::Time now) {
  std::optional<TierIndex> best;
  double most = 0;
  for (size_t i = from.value() + size_t{1}; i <= lower_.size(); ++i) {
    const TierIndex tier(static_cast<uint8_t>(i));
    const std::optional<double> excess = ExcessIn(tenant, block, tier, length, now);
    if (!excess.has_value() || *excess <= most) continue;
    best = tier;
    most = *excess;
  }
  if (best.has_value() && stores_.size() >= options_.max_stores) {
    tenant.account(*best).Refuse(Refusal::kBusy);
    best.reset();
    most = 0;
  }
  if (tenant.Predicts(block, now)) {
    const absl::Duration load =
        from == kArenaTier ? absl::ZeroDuration() : LowerOf(from).state.load.Expect(length);
    const double here = tenant.RateOf(block, length, load, absl::ZeroDuration(), now);
    tenant.account(from).price.OnEvicted(std::max(0.0, here - most), now);
  }
  return best;
}

void BlockDirectory::Impl::LetGo(TenantBlocks& tenant, BlockHandle block, absl::Time now) {
  const PlacedBlock& placed = tenant.At(block);
  if (placed.store != TransferId()) {  // a copy is on its way since an earlier time
    tenant.Leave(block, InArena::kLeaving);
    return;
  }
  std::optional<TierIndex> tier;
  if (!placed.HasCopy()) tier = ChooseTier(tenant, block, kArenaTier, placed.length, now);
  tenant.Leave(block, tier.has_value() ? InArena::kLeaving : InArena::kSpare);
  if (tier.has_value()) BeginStore(tenant, block, kArenaTier, *tier, now);
}

void BlockDirectory::Impl::LetGoBelow(TenantBlocks& tenant, TierIndex tier, BlockHandle block,
                                      absl::Time now) {
  PlacedBlock& placed = tenant.At(block);
  const Bytes length = placed.CopyIn(tier)->length;
  tenant.LeaveTier(block, tier);
  if (placed.arena == InArena::kNo && !placed.HasCopy() && placed.store == TransferId() &&
      LowerOf(tier).state.serving) {
    const std::optional<TierIndex> next = ChooseTier(tenant, block, tier, length, now);
    if (next.has_value()) {
      BeginStore(tenant, block, tier, *next, now);
      return;
    }
  }
  actions_.push_back(RemoveBlock{.tier = tier, .key = tenant.tree().key(block)});
}

void BlockDirectory::Impl::Drop(TenantBlocks& tenant, BlockHandle block) {
  const bool dropped = ledger_.Drop(tenant.id(), tenant.tree().key(block));
  assert(dropped);
  static_cast<void>(dropped);
  tenant.Dropped(block);
}

// Does not wait for copies: once there are as many under way as may be, victims are dropped.
Reservation BlockDirectory::Impl::MakeRoom(TenantBlocks& tenant, BlockHandle block, Bytes length,
                                           bool may_refuse, absl::Time now) {
  if (ledger_.Fits(tenant.id(), length)) return Reservation::kReserved;
  // What it hangs on must not go for it.
  TierRank& rank = tenant.rank(kArenaTier);
  const BlockHandle parent = tenant.tree().parent(block);
  const bool pinned = parent != kNoBlock && rank.Contains(parent);
  if (pinned) rank.Pin(parent);
  Reservation result = Reservation::kNoRoom;
  const int most = kMostVictims + static_cast<int>(options_.max_stores);
  for (int i = 0; i < most && !ledger_.Fits(tenant.id(), length); ++i) {
    if (tenant.oldest_spare() != kNoBlock) {
      Drop(tenant, tenant.oldest_spare());
      continue;
    }
    if (CanGrow(tenant, now)) break;
    const std::optional<BlockHandle> victim = rank.ChooseVictim(now, block, may_refuse);
    if (!victim.has_value()) {
      if (rank.candidates() > 0) result = Reservation::kUnwanted;
      break;
    }
    LetGo(tenant, *victim, now);
  }
  if (pinned) rank.Unpin(parent);
  return ledger_.Fits(tenant.id(), length) ? Reservation::kReserved : result;
}

// Where a lower tier could take what goes, victims are chosen before their room is needed.
void BlockDirectory::Impl::KeepArenaFree(TenantBlocks& tenant, absl::Time now) {
  const bool below = std::any_of(lower_.begin(), lower_.end(),
                                 [](const Tier& tier) { return tier.state.serving; });
  if (!below || CanGrow(tenant, now)) return;
  const ArenaLedger::Usage usage = ledger_.UsageOf(tenant.id());
  const double all = static_cast<double>((ledger_.chunk_bytes() * usage.chunks).count());
  const Bytes wanted(static_cast<int64_t>(options_.low_water * all));
  for (int i = 0; i < kMostVictims && stores_.size() < options_.max_stores &&
                  usage.free + tenant.spare_bytes() + tenant.leaving_bytes() < wanted;
       ++i) {
    const std::optional<BlockHandle> victim =
        tenant.rank(kArenaTier).ChooseVictim(now, kNoBlock, false);
    if (!victim.has_value()) return;
    LetGo(tenant, *victim, now);
  }
}

void BlockDirectory::Impl::KeepTierFree(TierIndex tier, absl::Time now) {
  const auto over = [this](Bytes staying, Bytes all) {
    return static_cast<double>(staying.count()) >
           (1 - options_.low_water) * static_cast<double>(all.count());
  };
  const auto fullness = [tier](const TenantBlocks& tenant) {
    const TierAccount& account = tenant.account(tier);
    return static_cast<double>(account.Staying().count()) /
           static_cast<double>(std::max<int64_t>(account.budget.count(), 1));
  };
  int left = kMostVictims;
  const auto evict = [&](TenantBlocks& tenant) {
    const std::optional<BlockHandle> victim = tenant.rank(tier).ChooseVictim(now, kNoBlock, false);
    if (!victim.has_value() || left-- <= 0) return false;
    LetGoBelow(tenant, tier, *victim, now);
    return true;
  };
  for (const auto& [id, tenant] : tenants_) {
    const TierAccount& account = tenant->account(tier);
    while (over(account.Staying(), account.budget) && evict(*tenant)) {
    }
  }
  while (over(Staying(tier), LowerOf(tier).config.capacity)) {
    TenantBlocks* fullest = nullptr;
    for (const auto& [id, tenant] : tenants_) {
      if (tenant->rank(tier).candidates() == 0) continue;
      if (fullest == nullptr || fullness(*tenant) > fullness(*fullest)) fullest = tenant.get();
    }
    if (fullest == nullptr || !evict(*fullest)) return;
  }
}

void BlockDirectory::Impl::BeginStore(TenantBlocks& tenant, BlockHandle block, TierIndex from,
                                      TierIndex to, absl::Time now) {
  PlacedBlock& placed = tenant.At(block);
  Store store = {.tenant = &tenant, .block = block, .from = from, .to = to};
  BlockRecord record;
  if (from == kArenaTier) {
    const std::optional<ArenaLedger::Found> found =
        ledger_.Find(tenant.id(), tenant.tree().key(block));
    record = {.id = *found->id, .length = found->extent.length, .checksum = found->checksum};
    const auto pinned = ledger_.Acquire(OwnSession(tenant), {record.id});
    assert(pinned.ok() && pinned->size() == 1);
    store.extent = pinned->front().extent;
  } else {
    const Copy* const copy = placed.CopyIn(from);
    record = {.id = *placed.id,
              .length = copy->length,
              .checksum = copy->checksum,
              .expiry = copy->expiry};
  }
  store.length = record.length;
  TierAccount& account = tenant.account(to);
  account.writing += account.Rounded(store.length);
  ++account.counters.demotions_started;
  const TransferId id(++last_transfer_);
  placed.store = id;
  tenant.tree().Retain(block);
  const BlockHandle parent = tenant.tree().parent(block);
  if (parent != kNoBlock) tenant.At(parent).at_least = tenant.OutlookOf(block, now);
  actions_.push_back(StoreBlock{.transfer = id,
                                .from = from,
                                .extent = store.extent,
                                .to = to,
                                .record = std::move(record),
                                .deadline = now + options_.transfer_deadline});
  stores_.emplace(id, store);
}

void BlockDirectory::Impl::OnStoreDone(TransferId transfer, const absl::Status& status,
                                       absl::Time now) {
  const auto found = stores_.find(transfer);
  if (found == stores_.end()) return;
  const Store store = found->second;
  stores_.erase(found);
  TenantBlocks& tenant = *store.tenant;
  PlacedBlock& placed = tenant.At(store.block);
  TierAccount& account = tenant.account(store.to);
  account.writing -= account.Rounded(store.length);
  if (status.ok()) {
    ++account.counters.demotions_done;
    account.counters.demoted_bytes += store.length;
  } else if (absl::IsAlreadyExists(status)) {
    // Another node has stored it in a tier that they share, and accounts for it.
    ++account.counters.demotions_done;
  } else {
    ++account.counters.demotions_failed;
  }
  if (placed.store == transfer) placed.store = TransferId();
  if (store.extent.has_value()) {
    const std::optional<ArenaLedger::Found> source = ledger_.At(*store.extent);
    // Its bytes are not those that were committed: nobody gets them any more.
    if (absl::IsDataLoss(status) && !source->dropped) Drop(tenant, store.block);
    if (placed.arena == InArena::kLeaving && placed.store == TransferId()) {
      tenant.Spare(store.block);
    }
    MustSucceed(ledger_.Release(OwnSession(tenant), {*store.extent}));
  } else if (const Copy* copy = placed.CopyIn(store.from); copy != nullptr && copy->leaving) {
    actions_.push_back(RemoveBlock{.tier = store.from, .key = tenant.tree().key(store.block)});
  }
  tenant.tree().Release(store.block);
  Pump(now);
}

void BlockDirectory::Impl::QueueLoad(TenantBlocks& tenant, BlockHandle block) {
  PlacedBlock& placed = tenant.At(block);
  assert(!placed.load_queued && placed.load == TransferId());
  placed.load_queued = true;
  tenant.tree().Retain(block);
  const TierIndex from = *BestCopy(tenant, block);
  const Bytes length = placed.CopyIn(from)->length;
  LowerOf(from).loading += length;
  load_queue_.push_back({&tenant, block, from, length});
}

// Loads for which there is no room wait for a chunk that is being made for their tenant; those of
// others pass them.
void BlockDirectory::Impl::BeginQueued(absl::Time now) {
  std::deque<QueuedLoad> held;
  while (!load_queue_.empty() && loads_.size() < options_.max_loads) {
    const QueuedLoad next = load_queue_.front();
    load_queue_.pop_front();
    if (!ledger_.Fits(next.tenant->id(), next.length)) {
      Grow(*next.tenant, true, now);
      if (Making(*next.tenant)) {
        held.push_back(next);
        continue;
      }
    }
    LowerOf(next.from).loading -= next.length;
    next.tenant->At(next.block).load_queued = false;
    if (!BeginLoad(*next.tenant, next.block, now)) {
      next.tenant->At(next.block).prefetched.reset();
      WakeWaits(*next.tenant, next.block);
    }
    next.tenant->tree().Release(next.block);
  }
  load_queue_.insert(load_queue_.begin(), held.begin(), held.end());
}

void BlockDirectory::Impl::SetPrefetchBudgets() {
  for (const auto& [id, tenant] : tenants_) {
    for (size_t i = 0; i < lower_.size(); ++i) {
      const TierState& state = lower_[i].state;
      const double share = options_.prefetch_share / static_cast<double>(tenants_.size());
      tenant->prefetcher().planner().SetBudget(
          i, {.latency = state.load.latency,
              .bytes_per_second = state.serving ? share * state.load.bytes_per_second : 0});
    }
  }
}

void BlockDirectory::Impl::BeginPrefetches(TenantBlocks& tenant, absl::Time now) {
  while (const std::optional<Prefetcher::Due> due = tenant.prefetcher().TakeDue(now)) {
    PrefetchPath(tenant, due->path, due->wish, now);
  }
}

// What is not in T1, block by block as long as each can be there in time.
size_t BlockDirectory::Impl::PrefetchPath(TenantBlocks& tenant, absl::Span<const BlockHandle> path,
                                          const prefetch::Wish& wish, absl::Time now) {
  size_t begun = 0;
  for (const BlockHandle block : path) {
    if (tenant.At(block).ready() || Coming(tenant, block)) continue;
    const std::optional<TierIndex> from = BestCopy(tenant, block);
    if (tenant.At(block).arena != InArena::kNo || !from.has_value() ||
        load_queue_.size() >= options_.max_queued_loads) {
      break;
    }
    const Bytes length = tenant.At(block).CopyIn(*from)->length;
    const auto grant =
        tenant.prefetcher().planner().Begin(now, from->value() - size_t{1}, 1, length, wish);
    if (grant.blocks == 0) break;
    QueueLoad(tenant, block);
    tenant.At(block).prefetched = wish.trigger;
    ++begun;
  }
  return begun;
}

bool BlockDirectory::Impl::BeginLoad(TenantBlocks& tenant, BlockHandle block, absl::Time now) {
  PlacedBlock& placed = tenant.At(block);
  const std::optional<TierIndex> from = BestCopy(tenant, block);
  if (placed.arena != InArena::kNo || !from.has_value()) return false;
  TierAccount& account = tenant.account(*from);
  if (!LowerOf(*from).state.serving) {
    account.Refuse(Refusal::kBroken);
    return false;
  }
  const Copy copy = *placed.CopyIn(*from);
  const ArenaLedger::Wanted wanted = {.id = *placed.id, .length = copy.length};
  if (copy.length > ledger_.chunk_bytes() ||
      MakeRoom(tenant, block, copy.length, false, now) != Reservation::kReserved) {
    account.Refuse(Refusal::kNoRoom);
    return false;
  }
  const auto reserved = ledger_.Reserve(OwnSession(tenant), {wanted});
  assert(reserved.ok() && reserved->front().result == ArenaLedger::Reservation::kReserved);
  tenant.Reserved(block, copy.length);
  const TransferId id(++last_transfer_);
  placed.load = id;
  tenant.tree().Retain(block);
  ++account.counters.promotions_started;
  LowerOf(*from).loading += copy.length;
  LowerOf(*from).use.OnLoad(LowerOf(*from).state.load.Expect(copy.length), now);
  loads_.emplace(id, Load{.tenant = &tenant,
                          .block = block,
                          .from = *from,
                          .length = copy.length,
                          .checksum = copy.checksum,
                          .began = now});
  actions_.push_back(LoadBlock{.transfer = id,
                               .from = *from,
                               .record = {.id = wanted.id,
                                          .length = copy.length,
                                          .checksum = copy.checksum,
                                          .expiry = copy.expiry},
                               .to = reserved->front().extent,
                               .deadline = now + options_.transfer_deadline});
  return true;
}

void BlockDirectory::Impl::OnLoaded(TransferId transfer, const absl::Status& status,
                                    absl::Time now) {
  const auto found = loads_.find(transfer);
  if (found == loads_.end()) return;
  const Load load = found->second;
  loads_.erase(found);
  LowerOf(load.from).loading -= load.length;
  TenantBlocks& tenant = *load.tenant;
  TierCounters& counters = tenant.account(load.from).counters;
  const BlockKey key = tenant.tree().key(load.block);
  tenant.At(load.block).load = TransferId();
  if (status.ok() && !load.doomed) {
    MustSucceed(ledger_.Commit(OwnSession(tenant), {{key, load.checksum}}));
    tenant.Committed(load.block, load.from);
    ++counters.promotions_done;
    counters.promoted_bytes += load.length;
    counters.promotion_time += now - load.began;
  } else {
    MustSucceed(ledger_.Abort(OwnSession(tenant), {key}));
    tenant.Unreserved(load.block);
    ++counters.promotions_failed;
  }
  WakeWaits(tenant, load.block);
  tenant.tree().Release(load.block);
  Pump(now);
}

}  // namespace palimpsest::blocks
