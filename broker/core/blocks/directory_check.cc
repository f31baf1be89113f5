#include "absl/strings/str_cat.h"
#include "broker/core/blocks/block_directory_impl.h"

namespace palimpsest::blocks {

absl::Status BlockDirectory::Impl::CheckConsistency() const {
  if (absl::Status status = ledger_.CheckConsistency(); !status.ok()) return status;
  for (const auto& [id, tenant] : tenants_) {
    if (absl::Status status = tenant->CheckConsistency(); !status.ok()) return status;
  }
  if (absl::Status status = CheckTransfers(); !status.ok()) return status;
  return CheckSessions();
}

absl::Status BlockDirectory::Impl::CheckTransfers() const {
  const auto wrong = [](absl::string_view what) { return absl::InternalError(what); };
  absl::flat_hash_map<std::pair<TenantId, uint8_t>, uint64_t> loads, stores;
  absl::flat_hash_map<std::pair<TenantId, uint8_t>, Bytes> writing;
  std::vector<Bytes> loading(lower_.size() + 1);
  for (const auto& [id, load] : loads_) {
    const PlacedBlock& placed = load.tenant->At(load.block);
    if (placed.load != id || placed.arena != InArena::kWriting) {
      return wrong("a block is loaded twice, or into nothing");
    }
    ++loads[{load.tenant->id(), load.from.value()}];
    loading[load.from.value()] += load.length;
  }
  for (const QueuedLoad& load : load_queue_) {
    if (!load.tenant->At(load.block).load_queued) return wrong("a load is queued unknown");
    loading[load.from.value()] += load.length;
  }
  for (const auto& [id, store] : stores_) {
    if (store.tenant->At(store.block).store != id) return wrong("a block is stored twice at once");
    if (store.extent.has_value() && !ledger_.At(*store.extent).has_value()) {
      return wrong("what a store reads is gone");
    }
    ++stores[{store.tenant->id(), store.to.value()}];
    writing[{store.tenant->id(), store.to.value()}] +=
        store.tenant->account(store.to).Rounded(store.length);
  }
  for (const auto& [id, tenant] : tenants_) {
    for (size_t i = 1; i < tenant->tiers(); ++i) {
      const auto tier = static_cast<uint8_t>(i);
      const TierAccount& account = tenant->account(TierIndex(tier));
      const TierCounters& counters = account.counters;
      if (counters.promotions_started !=
              counters.promotions_done + counters.promotions_failed + loads[{id, tier}] ||
          counters.demotions_started !=
              counters.demotions_done + counters.demotions_failed + stores[{id, tier}] ||
          account.writing != writing[{id, tier}]) {
        return wrong(absl::StrCat("transfers of tier ", i, " are counted wrongly"));
      }
    }
  }
  for (size_t i = 1; i <= lower_.size(); ++i) {
    if (lower_[i - 1].loading != loading[i]) return wrong("bytes on their way up do not add up");
  }
  return absl::OkStatus();
}

absl::Status BlockDirectory::Impl::CheckSessions() const {
  const auto wrong = [](absl::string_view what) { return absl::InternalError(what); };
  absl::flat_hash_map<std::pair<TenantId, BlockHandle>, uint32_t> pins;
  size_t waits = 0;
  for (const auto& [id, session] : sessions_) {
    size_t own = 0;
    for (const auto& [number, request] : session.requests) {
      own += request.waits.size();
      for (const auto& [place, pin] : request.pins) {
        const std::optional<ArenaLedger::Found> block = ledger_.At(pin.extent);
        if (!block.has_value() || !block->ready || block->extent != pin.extent ||
            block->pins < pin.count) {
          return wrong("a request pins what is not there");
        }
        if (!block->dropped) pins[{session.tenant->id(), pin.block}] += pin.count;
      }
    }
    if (own != session.waits) return wrong("a session's waits are counted wrongly");
    waits += own;
  }
  for (const auto& [id, tenant] : tenants_) {
    for (const BlockHandle block : tenant->tree().All()) {
      const PlacedBlock& placed = tenant->At(block);
      const uint32_t counted =
          placed.arena == InArena::kRanked
              ? tenant->rank(kArenaTier).pins(block) - (placed.retention != 0 ? 1 : 0)
              : 0;
      const auto found = pins.find({id, block});
      if (counted != (found == pins.end() ? 0 : found->second)) {
        return wrong("a block's pins are not those of requests");
      }
      const std::optional<ArenaLedger::Found> known = ledger_.Find(id, tenant->tree().key(block));
      if (known.has_value() != (placed.arena != InArena::kNo) ||
          (known.has_value() && known->ready != placed.ready())) {
        return wrong("a block is in the arena and not in the directory, or the other way round");
      }
    }
  }
  size_t listed = 0;
  for (const auto& [block, list] : waiting_) listed += list.size();
  if (waits != waits_.size() || wait_deadlines_.size() != waits || listed != waits) {
    return wrong("waits are counted wrongly");
  }
  return absl::OkStatus();
}

}  // namespace palimpsest::blocks
