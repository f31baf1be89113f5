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

PathPart BlockDirectory::Impl::Longest(const Wait& wait, absl::FunctionRef<bool(size_t)> there) {
  const size_t count = wait.path.size();
  if (wait.window == 0) return {0, count};
  PathPart longest;
  size_t present = wait.held;  // blocks at the end of the path that are there
  for (size_t i = 0; i < count; ++i) {
    present = there(i) ? present + 1 : 0;
    if (present >= std::min(wait.window, wait.held + i + 1)) longest.end = i + 1;
  }
  longest.begin = longest.end - std::min(longest.end, wait.window);
  return longest;
}

PathPart BlockDirectory::Impl::LongestReady(const Wait& wait) const {
  return Longest(wait, [&](size_t i) {
    const auto found = ledger_.Find(wait.tenant->id(), wait.ids[i].key);
    return found.has_value() && found->ready && *found->id == wait.ids[i];
  });
}

bool BlockDirectory::Impl::CanBeHad(TenantBlocks& tenant, const BlockIdentity& id,
                                    BlockHandle block) {
  const PlacedBlock& placed = tenant.At(block);
  if (placed.ready() || Coming(tenant, block)) {
    const auto found = ledger_.Find(tenant.id(), id.key);
    return found.has_value() ? *found->id == id : placed.id != nullptr && *placed.id == id;
  }
  const std::optional<TierIndex> copy = BestCopy(tenant, block);
  return placed.arena == InArena::kNo && copy.has_value() && LowerOf(*copy).state.serving &&
         *placed.id == id;
}

PathPart BlockDirectory::Impl::LongestAnywhere(const Wait& wait) {
  return Longest(wait, [&](size_t i) { return CanBeHad(*wait.tenant, wait.ids[i], wait.path[i]); });
}

TierIndex BlockDirectory::Impl::AddLoad(TenantBlocks& tenant, BlockHandle block, Loads& loads) {
  loads.bytes.resize(lower_.size() + 1);
  PlacedBlock& placed = tenant.At(block);
  const TierIndex tier = placed.ready() ? kArenaTier : BestCopy(tenant, block).value_or(kArenaTier);
  if (tier == kArenaTier) return tier;
  const Tier& lower = LowerOf(tier);
  Bytes& bytes = loads.bytes[tier.value()];
  bytes += placed.CopyIn(tier)->length;
  loads.expected = lower.state.serving
                       ? std::max(loads.expected, lower.state.load.Expect(lower.loading + bytes))
                       : absl::InfiniteDuration();
  return tier;
}

std::vector<Elsewhere> BlockDirectory::Impl::Behind(const Wait& wait) {
  if (wait.window > 0) return BehindWindow(wait);
  std::vector<Elsewhere> runs;
  Loads loads;
  for (size_t i = wait.next(); i < wait.path.size(); ++i) {
    const PlacedBlock& placed = wait.tenant->At(wait.path[i]);
    if (!placed.ready() && placed.load == TransferId() &&
        !BestCopy(*wait.tenant, wait.path[i]).has_value()) {
      break;
    }
    if (placed.id != nullptr && *placed.id != wait.ids[i]) break;
    const TierIndex tier = AddLoad(*wait.tenant, wait.path[i], loads);
    if (runs.empty() || runs.back().tier != tier) runs.push_back({.tier = tier});
    ++runs.back().blocks;
    runs.back().expected = loads.expected;
  }
  return runs;
}

std::vector<Elsewhere> BlockDirectory::Impl::BehindWindow(const Wait& wait) {
  const PathPart longest = LongestAnywhere(wait);
  if (longest.end <= wait.next()) return {};
  Loads loads;
  Elsewhere run = {.tier = kArenaTier, .blocks = static_cast<uint32_t>(longest.end - wait.next())};
  for (size_t i = longest.begin; i < longest.end; ++i) {
    run.tier = std::max(run.tier, AddLoad(*wait.tenant, wait.path[i], loads));
  }
  run.expected = loads.expected;
  return {run};
}

void BlockDirectory::Impl::PinPart(Wait& wait, bool waited) {
  Request& request = sessions_.at(wait.session).requests.at(wait.request);
  const PathPart missing = {wait.next(), wait.part.end};
  const auto more =
      Pin(wait.session, request, wait.ids.subspan(missing.begin, missing.size()),
          absl::MakeConstSpan(wait.path).subspan(missing.begin, missing.size()), waited);
  wait.acquired.insert(wait.acquired.end(), more.begin(), more.end());
}

void BlockDirectory::Impl::UnpinAcquired(Wait& wait) {
  Request& request = sessions_.at(wait.session).requests.at(wait.request);
  for (const ArenaLedger::Acquired& block : std::exchange(wait.acquired, {})) {
    const auto pins = request.pins.find({block.extent.chunk.value(), block.extent.offset.count()});
    // Unless the session has released what it was never told of.
    if (pins != request.pins.end() && pins->second.extent == block.extent) {
      Unpin(wait.session, request, block.extent, 1);
    }
  }
}

AcquireReply BlockDirectory::Impl::Conclude(Wait& wait) {
  // Half of a window is of no use, but a shorter prefix may be.
  if (wait.window > 0 && wait.next() < wait.part.end) {
    UnpinAcquired(wait);
    wait.part = LongestReady(wait);
    PinPart(wait, false);
  }
  AcquireReply reply = {.first = wait.held + wait.part.begin, .kept = wait.kept};
  reply.elsewhere = Behind(wait);
  reply.blocks = std::move(wait.acquired);
  return reply;
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
  wait.kept_ids.assign(wait.ids.begin(), wait.ids.end());
  wait.ids = wait.kept_ids;
  for (const BlockHandle block : wait.path) wait.tenant->tree().Retain(block);
  waiting_[{wait.tenant->id(), wait.path[wait.next()]}].push_back(added);
  wait_deadlines_.insert({wait.deadline, added});
  ++session.waits;
  session.requests.at(wait.request).waits.insert(added);
  waits_.emplace(added, std::move(wait));
  return added;
}

void BlockDirectory::Impl::Advance(WaitId id) {
  Wait& wait = waits_.at(id);
  PinPart(wait, true);
  if (wait.next() == wait.part.end || !Coming(*wait.tenant, wait.path[wait.next()])) {
    Answer(id);
    return;
  }
  // It is not in the list of the block that it waited for: WakeWaits took that.
  waiting_[{wait.tenant->id(), wait.path[wait.next()]}].push_back(id);
}

AcquireDone BlockDirectory::Impl::NoAnswer(WaitId id) const {
  const Wait& wait = waits_.at(id);
  return {.wait = id, .session = wait.session, .reply = {.first = wait.held}};
}

void BlockDirectory::Impl::Answer(WaitId id) {
  Wait wait = TakeWait(id);
  AcquireDone done = {.wait = id, .session = wait.session, .reply = Conclude(wait)};
  ReleasePath(wait);
  actions_.push_back(std::move(done));
}

BlockDirectory::Impl::Wait BlockDirectory::Impl::TakeWait(WaitId id) {
  const auto found = waits_.find(id);
  Wait wait = std::move(found->second);
  waits_.erase(found);
  if (wait.next() < wait.part.end) {
    const auto list = waiting_.find(std::pair(wait.tenant->id(), wait.path[wait.next()]));
    if (list != waiting_.end()) {
      std::erase(list->second, id);
      if (list->second.empty()) waiting_.erase(list);
    }
  }
  wait_deadlines_.erase({wait.deadline, id});
  Session& session = sessions_.at(wait.session);
  --session.waits;
  session.requests.at(wait.request).waits.erase(id);
  return wait;
}

void BlockDirectory::Impl::ReleasePath(const Wait& wait) {
  for (const BlockHandle block : wait.path) wait.tenant->tree().Release(block);
}

void BlockDirectory::Impl::ForgetWait(WaitId id) { ReleasePath(TakeWait(id)); }

void BlockDirectory::Impl::CancelWait(SessionId session, WaitId id, absl::Time now) {
  const auto found = waits_.find(id);
  if (found == waits_.end() || found->second.session != session) return;
  GiveUpWait(id);
  Pump(now);
}

void BlockDirectory::Impl::GiveUpWait(WaitId id) {
  Wait wait = TakeWait(id);
  UnpinAcquired(wait);
  ReleasePath(wait);
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
