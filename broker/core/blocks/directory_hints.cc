// What clients say of blocks.
#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"
#include "broker/core/blocks/block_directory_impl.h"

namespace palimpsest::blocks {
namespace {

// That wait for copies under way; what hints name beyond that stays where it is.
constexpr size_t kMostQueuedDemotions = 1 << 16;

}  // namespace

absl::Status BlockDirectory::Impl::CheckAction(const CacheAction& action) {
  if (action.half_life > absl::ZeroDuration()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "a half-life of ", absl::FormatDuration(action.half_life), "; expected more than 0"));
}

absl::StatusOr<size_t> BlockDirectory::Impl::Hint(SessionId id, const BlockHint& hint,
                                                  absl::Time now) {
  absl::StatusOr<Session*> found = FindSession(id);
  if (!found.ok()) return found.status();
  TenantBlocks& tenant = *(*found)->tenant;
  std::vector<BlockHandle> path;
  if (hint.conversation != cache::ConversationId(0)) {
    path = tenant.prefetcher().PathOf(hint.conversation);
  } else {
    std::vector<const BlockIdentity*> ids;
    ids.reserve(hint.ids.size());
    for (const BlockIdentity& block : hint.ids) ids.push_back(&block);
    if (absl::Status status = CheckIdentities(tenant, ids); !status.ok()) return status;
    path = tenant.Find(hint.ids);
  }
  if (hint.first > hint.ids.size()) {
    return absl::InvalidArgumentError(absl::StrCat("a hint from block ", hint.first, " of ",
                                                   hint.ids.size(), " on; expected no more"));
  }
  if (absl::Status status = CheckAction(hint.action); !status.ok()) return status;
  const auto concerned = absl::MakeConstSpan(path).subspan(std::min(hint.first, path.size()));
  const size_t done = Act(tenant, path, concerned, hint.action, now);
  Pump(now);
  return done;
}

size_t BlockDirectory::Impl::Act(TenantBlocks& tenant, absl::Span<const BlockHandle> path,
                                 absl::Span<const BlockHandle> concerned, const CacheAction& action,
                                 absl::Time now) {
  switch (action.kind) {
    case CacheAction::Kind::kRetain:
      return Retain(tenant, concerned, action, now);
    case CacheAction::Kind::kDemote:
      return Demote(tenant, concerned, now);
    case CacheAction::Kind::kPrefetch:
      return PrefetchPath(tenant, path,
                          {.trigger = prefetch::Trigger::kAnnounced,
                           .start = now,
                           .deadline = std::max(now, action.until)},
                          now);
    case CacheAction::Kind::kRelease:
      return Forsake(tenant, concerned);
  }
  return 0;
}

// Those before others first, since what follows is of no use without them.
size_t BlockDirectory::Impl::Retain(TenantBlocks& tenant, absl::Span<const BlockHandle> path,
                                    const CacheAction& action, absl::Time now) {
  if (action.until <= now) return 0;
  const uint64_t id = ++last_retention_;
  Retention retention = {.tenant = &tenant,
                         .priority = action.priority,
                         .until = std::min(action.until, now + options_.longest_retention),
                         .half_life = action.half_life};
  Bytes bytes;
  for (const BlockHandle block : path) {
    const PlacedBlock& placed = tenant.At(block);
    if (!placed.ready() || placed.retention != 0) continue;
    const Bytes length = tenant.account(kArenaTier).Rounded(placed.length);
    if (bytes + length > action.budget || !MakeRetainable(tenant, length, action.priority)) break;
    tenant.Retain(block, id);
    bytes += length;
    retention.blocks.push_back(block);
  }
  const size_t count = retention.blocks.size();
  if (count == 0) return 0;
  retention.next = std::min(now + retention.half_life, retention.until);
  retentions_.emplace(id, std::move(retention));
  by_priority_.insert({tenant.id(), action.priority, id});
  return count;
}

bool BlockDirectory::Impl::MakeRetainable(TenantBlocks& tenant, Bytes bytes, uint32_t priority) {
  const Bytes budget = tenant.account(kArenaTier).budget;
  const Bytes all(
      static_cast<int64_t>(options_.retain_share * static_cast<double>(budget.count())));
  while (tenant.retained_bytes() + bytes > all) {
    const auto least = by_priority_.lower_bound({tenant.id(), 0, 0});
    if (least == by_priority_.end()) return false;
    const auto [owner, lowest, id] = *least;
    if (owner != tenant.id() || lowest >= priority) return false;
    Retention& retention = retentions_.at(id);
    UnretainLast(id, retention);
    if (retention.blocks.empty()) EndRetention(id);
  }
  return true;
}

void BlockDirectory::Impl::UnretainLast(uint64_t id, Retention& retention) {
  const BlockHandle block = retention.blocks.back();
  retention.blocks.pop_back();
  // Otherwise it was dropped meanwhile.
  if (retention.tenant->At(block).retention == id) retention.tenant->Unretain(block);
}

void BlockDirectory::Impl::EndRetention(uint64_t id) {
  const auto ended = retentions_.find(id);
  by_priority_.erase({ended->second.tenant->id(), ended->second.priority, id});
  retentions_.erase(ended);
}

void BlockDirectory::Impl::DecayRetentions(absl::Time now) {
  std::vector<uint64_t> over;
  for (auto& [id, retention] : retentions_) {
    while (retention.next <= now && !retention.blocks.empty()) {
      const size_t stay = retention.next >= retention.until ? 0 : retention.blocks.size() / 2;
      while (retention.blocks.size() > stay) UnretainLast(id, retention);
      retention.next = std::min(retention.next + retention.half_life, retention.until);
    }
    if (retention.blocks.empty()) over.push_back(id);
  }
  for (const uint64_t id : over) EndRetention(id);
}

size_t BlockDirectory::Impl::Demote(TenantBlocks& tenant, absl::Span<const BlockHandle> path,
                                    absl::Time now) {
  size_t done = 0;
  for (size_t i = path.size(); i > 0; --i) {
    const BlockHandle block = path[i - 1];
    if (demotions_.empty() && MayDemote(tenant, block)) {
      if (!tenant.rank(kArenaTier).IsCandidate(block)) continue;
      LetGo(tenant, block, now);
    } else if (tenant.At(block).arena != InArena::kRanked ||
               tenant.rank(kArenaTier).pins(block) > 0 ||
               demotions_.size() >= kMostQueuedDemotions) {
      continue;
    } else {
      tenant.tree().Retain(block);
      demotions_.emplace_back(&tenant, block);
    }
    ++done;
  }
  return done;
}

// Without room for its copy a block would be dropped.
bool BlockDirectory::Impl::MayDemote(TenantBlocks& tenant, BlockHandle block) const {
  const PlacedBlock& placed = tenant.At(block);
  return placed.HasCopy() || placed.store != TransferId() || stores_.size() < options_.max_stores;
}

void BlockDirectory::Impl::DemoteQueued(absl::Time now) {
  while (!demotions_.empty()) {
    const auto [tenant, block] = demotions_.front();
    if (!MayDemote(*tenant, block)) return;
    demotions_.pop_front();
    // Somebody may use it again.
    if (tenant->rank(kArenaTier).IsCandidate(block)) LetGo(*tenant, block, now);
    tenant->tree().Release(block);
  }
}

// Nothing that somebody uses, or on which other blocks hang.
size_t BlockDirectory::Impl::Forsake(TenantBlocks& tenant, absl::Span<const BlockHandle> path) {
  size_t done = 0;
  for (size_t i = path.size(); i > 0; --i) {
    const BlockHandle block = path[i - 1];
    bool any = false;
    if (tenant.rank(kArenaTier).IsCandidate(block)) {
      Drop(tenant, block);
      any = true;
    }
    for (size_t j = 1; j < tenant.tiers(); ++j) {
      const TierIndex tier(static_cast<uint8_t>(j));
      if (tenant.At(block).load != TransferId() || !tenant.rank(tier).IsCandidate(block)) continue;
      tenant.LeaveTier(block, tier);
      actions_.push_back(RemoveBlock{.tier = tier, .key = tenant.tree().key(block)});
      any = true;
    }
    done += any ? 1 : 0;
  }
  return done;
}

}  // namespace palimpsest::blocks
