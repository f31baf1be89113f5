// What operators ask of the block store.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "broker/blocks/block_store.h"

namespace palimpsest {

using blocks::TierIndex;

namespace {

absl::Status Stopped() { return absl::UnavailableError("the block store is shutting down"); }

}  // namespace

std::vector<std::string> BlockStore::tier_names() const {
  std::vector<std::string> names = {"dram"};
  for (const LowerTierConfig& tier : options_.tiers.lower) names.push_back(tier.name);
  return names;
}

std::vector<std::string> BlockStore::tenant_names() const {
  std::vector<std::string> names;
  for (const Tenant& tenant : options_.tenants) names.push_back(tenant.name);
  return names;
}

std::vector<Bytes> BlockStore::RetainedBytes() {
  MutexLock lock(&mu_);
  std::vector<Bytes> retained;
  for (uint32_t t = 0; t < options_.tenants.size(); ++t) {
    retained.push_back(directory_.CountersOf(TenantId(t), blocks::kArenaTier).retained);
  }
  return retained;
}

absl::StatusOr<BlockStore::Events> BlockStore::EventsAfter(uint64_t after, size_t limit) {
  MutexLock lock(&mu_);
  if (stopping_) return Stopped();
  Events result{.last = directory_.events().last(), .complete = true, .events = {}};
  auto events = directory_.events().After(after, limit);
  result.complete = events.has_value();
  if (events.has_value()) result.events = *std::move(events);
  return result;
}

absl::StatusOr<BlockStore::Events> BlockStore::EventSnapshot() {
  MutexLock lock(&mu_);
  if (stopping_) return Stopped();
  return Events{
      .last = directory_.events().last(), .complete = true, .events = directory_.Snapshot()};
}

absl::Status BlockStore::AddListener(std::weak_ptr<BlockEventListener> listener) {
  MutexLock lock(&mu_);
  std::erase_if(listeners_, [](const auto& known) { return known.expired(); });
  if (listeners_.size() >= kMostListeners) {
    return absl::ResourceExhaustedError(absl::StrCat(listeners_.size(),
                                                     " watch blocks, expected at most ",
                                                     kMostListeners, ": end one of them"));
  }
  listeners_.push_back(std::move(listener));
  return absl::OkStatus();
}

std::vector<BlockStore::Foreign> BlockStore::ForeignBlocks() {
  std::vector<Foreign> foreign;
  MutexLock lock(&mu_);
  for (size_t i = 0; i < options_.tiers.lower.size(); ++i) {
    const LowerTierConfig& tier = options_.tiers.lower[i];
    if (tier.store.foreign_blocks == 0) continue;
    for (uint32_t t = 0; t < options_.tenants.size(); ++t) {
      const blocks::TierCounters counters =
          directory_.CountersOf(TenantId(t), TierIndex(static_cast<uint8_t>(i + 1)));
      foreign.push_back({options_.tenants[t].name, tier.name, counters.foreign});
    }
  }
  return foreign;
}

absl::StatusOr<TierIndex> BlockStore::FindTier(absl::string_view name) const {
  const std::vector<std::string> names = tier_names();
  const auto found = std::find(names.begin(), names.end(), name);
  if (found != names.end()) return TierIndex(static_cast<uint8_t>(found - names.begin()));
  return absl::NotFoundError(absl::StrCat("no tier ", name, " is configured here; there are ",
                                          absl::StrJoin(names, ", ")));
}

Bytes BlockStore::SizeOf(TierIndex tier) const {
  return tier == blocks::kArenaTier ? options_.tiers.dram.bytes
                                    : options_.tiers.lower[tier.value() - 1].bytes;
}

absl::StatusOr<TenantId> BlockStore::FindTenant(absl::string_view name) const {
  for (uint32_t i = 0; i < options_.tenants.size(); ++i) {
    if (options_.tenants[i].name == name) return TenantId(i);
  }
  return absl::NotFoundError(absl::StrCat("no tenant ", name, " is configured here"));
}

absl::StatusOr<std::vector<TenantId>> BlockStore::Meant(const std::string& tenant) const {
  std::vector<TenantId> meant;
  if (tenant.empty()) {
    for (uint32_t i = 0; i < options_.tenants.size(); ++i) meant.push_back(TenantId(i));
    return meant;
  }
  const absl::StatusOr<TenantId> one = FindTenant(tenant);
  if (!one.ok()) return one.status();
  meant.push_back(*one);
  return meant;
}

absl::StatusOr<BlockStore::Used> BlockStore::SetLimit(TierIndex tier, const std::string& tenant,
                                                      Bytes limit) {
  const absl::StatusOr<std::vector<TenantId>> meant = Meant(tenant);
  if (!meant.ok()) return meant.status();
  if (limit > SizeOf(tier)) {
    return absl::InvalidArgumentError(absl::StrCat("the tier has ", SizeOf(tier).ToString(),
                                                   " in the configuration, expected at most that"));
  }
  if (tier == blocks::kArenaTier) limit = chunk_bytes() * (limit / chunk_bytes());
  absl::Status status = Stopped();
  Used used;
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    status = tenant.empty() ? directory_.SetCapacity(tier, limit, now)
                            : directory_.SetBudget(meant->front(), tier, limit, now);
    used.limit = limit;
    for (const TenantId id : *meant) {
      const blocks::TierCounters counters = directory_.CountersOf(id, tier);
      used.used += counters.used;
      if (!tenant.empty()) used.limit = counters.capacity;
    }
  });
  if (!status.ok()) return status;
  return used;
}

absl::StatusOr<blocks::Trimmed> BlockStore::Trim(std::optional<TierIndex> tier,
                                                 const std::string& tenant, Bytes keep) {
  const absl::StatusOr<std::vector<TenantId>> meant = Meant(tenant);
  if (!meant.ok()) return meant.status();
  absl::Status status = Stopped();
  blocks::Trimmed trimmed;
  Decide([&](absl::Time now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    status = absl::OkStatus();
    for (size_t i = 0; i <= options_.tiers.lower.size() && status.ok(); ++i) {
      const TierIndex one(static_cast<uint8_t>(i));
      if (tier.has_value() && *tier != one) continue;
      for (const TenantId id : *meant) {
        const absl::StatusOr<blocks::Trimmed> part = directory_.Trim(id, one, keep, now);
        status = part.status();
        if (!status.ok()) break;
        trimmed.blocks += part->blocks;
        trimmed.bytes += part->bytes;
      }
    }
  });
  if (!status.ok()) return status;
  return trimmed;
}

absl::StatusOr<uint64_t> BlockStore::Purge(const std::string& tenant, absl::Duration wait) {
  const absl::StatusOr<TenantId> id = FindTenant(tenant);
  if (!id.ok()) return id.status();
  absl::StatusOr<uint64_t> forgotten = Stopped();
  Decide([&](absl::Time now)
             ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) { forgotten = directory_.Purge(*id, now); });
  if (!forgotten.ok()) return forgotten;
  const absl::Time deadline = MonotonicNow() + wait;
  MutexLock lock(&mu_);
  while (directory_.Purging(*id) && !stopping_) {
    if (MonotonicNow() >= deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("not every tier has purged tenant ", tenant,
                       " yet; nothing of it is served, and the purge goes on: ask again to wait"));
    }
    changed_.WaitWithDeadline(&mu_, deadline);
  }
  if (stopping_) return Stopped();
  return forgotten;
}

absl::StatusOr<std::vector<BlockStore::CheckedTier>> BlockStore::CheckTiers(Bytes block,
                                                                            uint32_t blocks,
                                                                            absl::Duration wait) {
  if (block < Bytes(1) || block > kMostCheckBytes || blocks < 1 ||
      blocks > kMostCheckBytes / block) {
    return absl::InvalidArgumentError(absl::StrCat(blocks, " blocks of ", block.count(),
                                                   " bytes, expected at least one and together "
                                                   "at most ",
                                                   kMostCheckBytes.ToString()));
  }
  const TierCheckOptions options{block, blocks, wait, options_.tenants.front().name, check_keys_};
  std::vector<CheckedTier> checked;
  checked.push_back({"dram", "dram", CheckArena(clock_, options)});
  for (size_t i = 0; i < stores_.size(); ++i) {
    checked.push_back({options_.tiers.lower[i].name, stores_[i]->status().name,
                       CheckStore(*stores_[i], clock_, options)});
  }
  return checked;
}

absl::Status BlockStore::CheckConsistency() {
  {
    MutexLock lock(&mu_);
    if (absl::Status status = directory_.CheckConsistency(); !status.ok()) return status;
  }
  for (const auto& store : stores_) {
    if (absl::Status status = store->CheckConsistency(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

void BlockStore::FillStatus(v1::GetStatusResponse& status) {
  for (size_t i = 0; i <= stores_.size(); ++i) {
    const TierIndex tier(static_cast<uint8_t>(i));
    v1::TierMemory& out = *status.add_tiers();
    if (i == 0) {
      out.set_tier("dram");
      out.set_name("dram");
      out.set_serving(true);
      out.set_capacity_bytes(static_cast<uint64_t>(options_.tiers.dram.bytes.count()));
      out.set_used_bytes(uint64_t{arena_->chunks()} * static_cast<uint64_t>(chunk_bytes().count()));
    } else {
      const TierStatus store = stores_[i - 1]->status();
      out.set_tier(options_.tiers.lower[i - 1].name);
      out.set_name(store.name);
      out.set_breaker_openings(store.times_opened);
      out.set_last_failure(store.last_failure);
      out.set_capacity_bytes(static_cast<uint64_t>(store.capacity.count()));
      out.set_used_bytes(static_cast<uint64_t>(store.used.count()));
      out.set_quarantined_bytes(static_cast<uint64_t>(store.quarantined.count()));
      out.set_load_latency_seconds(absl::ToDoubleSeconds(store.load_latency));
      out.set_load_bytes_per_second(store.load_bandwidth);
      out.set_store_latency_seconds(absl::ToDoubleSeconds(store.store_latency));
      out.set_store_bytes_per_second(store.store_bandwidth);
      out.set_queued_loads(static_cast<uint32_t>(store.queued_loads));
      out.set_queued_stores(static_cast<uint32_t>(store.queued_stores));
      out.set_in_flight(static_cast<uint32_t>(store.in_flight));
      out.set_corrupt_blocks(store.counters.misses.corrupt + store.counters.unstored.corrupt);
    }
    MutexLock lock(&mu_);
    if (i > 0 && i <= states_.size()) out.set_serving(states_[i - 1].serving);
    for (uint32_t t = 0; t < options_.tenants.size(); ++t) {
      FillTenant(TenantId(t), tier, *out.add_tenants());
    }
  }
}

void BlockStore::FillTenant(TenantId tenant, TierIndex tier, v1::TenantTier& out) {
  const blocks::TierCounters counters = directory_.CountersOf(tenant, tier);
  const auto bytes = [](Bytes count) { return static_cast<uint64_t>(count.count()); };
  out.set_tenant(options_.tenants[tenant.value()].name);
  out.set_used_bytes(bytes(counters.used));
  out.set_limit_bytes(bytes(counters.capacity));
  out.set_blocks(counters.blocks);
  out.set_stored_blocks(counters.stored);
  out.set_removed_blocks(counters.removed);
  out.set_hit_blocks(counters.hits);
  out.set_hit_bytes(bytes(counters.hit_bytes));
  out.set_promoted_blocks(counters.promotions_done);
  out.set_failed_promotions(counters.promotions_failed);
  out.set_promoted_bytes(bytes(counters.promoted_bytes));
  out.set_promotion_seconds(absl::ToDoubleSeconds(counters.promotion_time));
  out.set_wasted_blocks(counters.promotions_wasted);
  out.set_wasted_bytes(bytes(counters.wasted_bytes));
  out.set_demoted_blocks(counters.demotions_done);
  out.set_failed_demotions(counters.demotions_failed);
  out.set_demoted_bytes(bytes(counters.demoted_bytes));
  out.set_price(counters.price);
  if (tier == blocks::kArenaTier) {
    const prefetch::PrefetchCounts prefetches = directory_.PrefetchesOf(tenant);
    out.set_prefetched_blocks(static_cast<uint64_t>(prefetches.fetched));
    out.set_prefetched_used_blocks(static_cast<uint64_t>(prefetches.used));
    out.set_prefetched_wasted_blocks(static_cast<uint64_t>(prefetches.wasted));
  }
  for (size_t i = 0; i < blocks::kRefusals; ++i) {
    if (counters.refusals[i] == 0) continue;
    v1::TierRefusals& refusals = *out.add_refusals();
    refusals.set_reason(std::string(RefusalName(static_cast<blocks::Refusal>(i))));
    refusals.set_blocks(counters.refusals[i]);
  }
}

}  // namespace palimpsest
