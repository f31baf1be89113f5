// What lower tiers have behind a prefix, and who waits for it.
#include <algorithm>
#include <cassert>

#include "broker/core/blocks/block_directory_impl.h"

namespace palimpsest::blocks {

std::optional<TierIndex> BlockDirectory::Impl::BestCopy(TenantBlocks& tenant,
                                                        BlockHandle block) const {
  std::optional<TierIndex> best;
  const auto cost = [this](const Copy& copy) {
    const TierState& state = LowerOf(copy.tier).state;
    return state.serving ? state.load.Expect(copy.length) : absl::InfiniteDuration();
  };
  absl::Duration least = absl::InfiniteDuration();
  for (const Copy& copy : tenant.At(block).copies) {
    if (copy.leaving || (best.has_value() && cost(copy) >= least)) continue;
    best = copy.tier;
    least = cost(copy);
  }
  return best;
}

std::vector<Elsewhere> BlockDirectory::Impl::Behind(TenantBlocks& tenant,
                                                    absl::Span<const BlockIdentity> ids,
                                                    absl::Span<const BlockHandle> path) {
  std::vector<Elsewhere> runs;
  std::vector<Bytes> bytes(lower_.size() + 1);  // of the path so far, by tier
  absl::Duration expected = absl::ZeroDuration();
  for (size_t i = 0; i < path.size(); ++i) {
    const PlacedBlock& placed = tenant.At(path[i]);
    const std::optional<TierIndex> copy = BestCopy(tenant, path[i]);
    if (!placed.ready() && placed.load == TransferId() && !copy.has_value()) break;
    if (placed.id != nullptr && *placed.id != ids[i]) break;
    const TierIndex tier = placed.ready() ? kArenaTier : copy.value_or(kArenaTier);
    if (tier != kArenaTier) {
      const Tier& lower = LowerOf(tier);
      bytes[tier.value()] += tenant.At(path[i]).CopyIn(tier)->length;
      expected =
          lower.state.serving
              ? std::max(expected, lower.state.load.Expect(lower.loading + bytes[tier.value()]))
              : absl::InfiniteDuration();
    }
    if (runs.empty() || runs.back().tier != tier) runs.push_back({.tier = tier});
    ++runs.back().blocks;
    runs.back().expected = expected;
  }
  return runs;
}

bool BlockDirectory::Impl::Coming(TenantBlocks& tenant, BlockHandle block) {
  const PlacedBlock& placed = tenant.At(block);
  return placed.load != TransferId() || placed.load_queued;
}

void BlockDirectory::Impl::Promote(TenantBlocks& tenant, absl::Span<const BlockIdentity> ids,
                                   absl::Span<const BlockHandle> path, absl::Time deadline,
                                   absl::Time now) {
  for (size_t i = 0; i < path.size(); ++i) {
    const PlacedBlock& placed = tenant.At(path[i]);
    if (placed.ready() || Coming(tenant, path[i])) continue;
    const std::optional<TierIndex> from = BestCopy(tenant, path[i]);
    if (placed.arena != InArena::kNo || !from.has_value() || *placed.id != ids[i]) return;
    Tier& lower = LowerOf(*from);
    TierAccount& account = tenant.account(*from);
    const Bytes length = tenant.At(path[i]).CopyIn(*from)->length;
    if (!lower.state.serving) {
      account.Refuse(Refusal::kBroken);
      return;
    }
    if (now + lower.state.load.Expect(lower.loading + length) > deadline) {
      account.Refuse(Refusal::kLate);
      return;
    }
    if (load_queue_.size() >= options_.max_queued_loads) {
      account.Refuse(Refusal::kBusy);
      return;
    }
    QueueLoad(tenant, path[i]);
  }
}

WaitId BlockDirectory::Impl::AddWait(Session& session, Wait wait) {
  const WaitId added(++last_wait_);
  for (const BlockHandle block : wait.path) wait.tenant->tree().Retain(block);
  waiting_[{wait.tenant->id(), wait.path[wait.acquired.size()]}].push_back(added);
  wait_deadlines_.insert({wait.deadline, added});
  ++session.waits;
  session.requests.at(wait.request).waits.insert(added);
  waits_.emplace(added, std::move(wait));
  return added;
}

void BlockDirectory::Impl::Advance(WaitId id) {
  Wait& wait = waits_.at(id);
  Request& request = sessions_.at(wait.session).requests.at(wait.request);
  const size_t had = wait.acquired.size();
  const auto more = Pin(wait.session, request, absl::MakeConstSpan(wait.ids).subspan(had),
                        absl::MakeConstSpan(wait.path).subspan(had), true);
  wait.acquired.insert(wait.acquired.end(), more.begin(), more.end());
  const size_t has = wait.acquired.size();
  if (has == wait.path.size() || !Coming(*wait.tenant, wait.path[has])) {
    Answer(id);
    return;
  }
  // It is not in the list of the block that it waited for: WakeWaits took that.
  waiting_[{wait.tenant->id(), wait.path[has]}].push_back(id);
}

void BlockDirectory::Impl::Answer(WaitId id) {
  Wait& wait = waits_.at(id);
  const size_t has = wait.acquired.size();
  AcquireDone done = {.wait = id, .session = wait.session, .reply = {}};
  done.reply.elsewhere = Behind(*wait.tenant, absl::MakeConstSpan(wait.ids).subspan(has),
                                absl::MakeConstSpan(wait.path).subspan(has));
  done.reply.blocks = wait.acquired;
  ForgetWait(id);
  actions_.push_back(std::move(done));
}

void BlockDirectory::Impl::ForgetWait(WaitId id) {
  const auto found = waits_.find(id);
  Wait& wait = found->second;
  if (wait.acquired.size() < wait.path.size()) {
    const auto list = waiting_.find(std::pair(wait.tenant->id(), wait.path[wait.acquired.size()]));
    if (list != waiting_.end()) {
      std::erase(list->second, id);
      if (list->second.empty()) waiting_.erase(list);
    }
  }
  for (const BlockHandle block : wait.path) wait.tenant->tree().Release(block);
  wait_deadlines_.erase({wait.deadline, id});
  Session& session = sessions_.at(wait.session);
  --session.waits;
  session.requests.at(wait.request).waits.erase(id);
  waits_.erase(found);
}

void BlockDirectory::Impl::CancelWait(SessionId session, WaitId id, absl::Time now) {
  const auto found = waits_.find(id);
  if (found == waits_.end() || found->second.session != session) return;
  GiveUpWait(id);
  Pump(now);
}

void BlockDirectory::Impl::GiveUpWait(WaitId id) {
  const Wait& wait = waits_.at(id);
  const SessionId session = wait.session;
  Request& request = sessions_.at(session).requests.at(wait.request);
  const std::vector<ArenaLedger::Acquired> acquired = wait.acquired;
  ForgetWait(id);
  // Unless the session has released what it was never told of.
  for (const ArenaLedger::Acquired& block : acquired) {
    const auto pins = request.pins.find({block.extent.chunk.value(), block.extent.offset.count()});
    if (pins != request.pins.end() && pins->second.extent == block.extent) {
      Unpin(session, request, block.extent, 1);
    }
  }
}

void BlockDirectory::Impl::WakeWaits(TenantBlocks& tenant, BlockHandle block) {
  const auto found = waiting_.find(std::pair(tenant.id(), block));
  if (found == waiting_.end()) return;
  const std::vector<WaitId> woken = std::move(found->second);
  waiting_.erase(found);
  for (const WaitId id : woken) Advance(id);
}

absl::Time BlockDirectory::Impl::Tick(absl::Time now) {
  while (!wait_deadlines_.empty() && wait_deadlines_.begin()->first <= now) {
    Answer(wait_deadlines_.begin()->second);
  }
  for (auto& [id, purge] : purges_) {
    if (purge.again > now) continue;
    purge.again = absl::InfiniteFuture();
    SendPurge(id);
  }
  for (const auto& [chunk, since] : revoking_) {
    if (since + options_.unmap_deadline <= now) ReportOverdue(chunk);
  }
  DecayRetentions(now);
  for (const auto& [id, tenant] : tenants_) BeginPrefetches(*tenant, now);
  Pump(now);
  absl::Time next = absl::InfiniteFuture();
  for (const auto& [id, tenant] : tenants_) next = std::min(next, tenant->prefetcher().next());
  if (!wait_deadlines_.empty()) next = std::min(next, wait_deadlines_.begin()->first);
  for (const auto& [id, retention] : retentions_) next = std::min(next, retention.next);
  for (const auto& [id, purge] : purges_) next = std::min(next, purge.again);
  for (const auto& [chunk, since] : revoking_) {
    for (const absl::Duration after : {options_.unmap_deadline / 2, options_.unmap_deadline}) {
      if (since + after > now) next = std::min(next, since + after);
    }
  }
  return next;
}

}  // namespace palimpsest::blocks
