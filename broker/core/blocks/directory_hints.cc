// What clients say of blocks.
#include <algorithm>
#include <cassert>

#include "absl/strings/str_cat.h"
#include "broker/core/blocks/block_directory_impl.h"

namespace palimpsest::blocks {

absl::StatusOr<size_t> BlockDirectory::Impl::Hint(SessionId id, const BlockHint& hint,
                                                  absl::Time now) {
  absl::StatusOr<Session*> found = FindSession(id);
  if (!found.ok()) return found.status();
  TenantBlocks& tenant = *(*found)->tenant;
  std::vector<const BlockIdentity*> ids;
  ids.reserve(hint.ids.size());
  for (const BlockIdentity& block : hint.ids) ids.push_back(&block);
  if (absl::Status status = CheckIdentities(tenant, ids); !status.ok()) return status;
  if (hint.first > ids.size() || hint.half_life <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "a hint from block ", hint.first, " of ", ids.size(), " on with a half-life of ",
        absl::FormatDuration(hint.half_life), "; expected no more, and more than 0"));
  }
  const std::vector<BlockHandle> path = tenant.Find(hint.ids);
  const auto concerned = absl::MakeConstSpan(path).subspan(std::min(hint.first, path.size()));
  size_t done = 0;
  switch (hint.kind) {
    case BlockHint::Kind::kRetain:
      done = Retain(tenant, concerned, hint, now);
      break;
    case BlockHint::Kind::kDemote:
      done = Demote(tenant, concerned, now);
      break;
    case BlockHint::Kind::kPrefetch:
      done = PrefetchPath(tenant, path,
                          {.trigger = prefetch::Trigger::kAnnounced,
                           .start = now,
                           .deadline = std::max(now, hint.until)},
                          now);
      break;
    case BlockHint::Kind::kRelease:
      done = Forsake(tenant, concerned);
      break;
  }
  Pump(now);
  return done;
}

// Those before others first, since what follows is of no use without them.
size_t BlockDirectory::Impl::Retain(TenantBlocks& tenant, absl::Span<const BlockHandle> path,
                                    const BlockHint& hint, absl::Time now) {
  if (hint.until <= now) return 0;
  const Bytes budget = tenant.account(kArenaTier).budget;
  const Bytes all(
      static_cast<int64_t>(options_.retain_share * static_cast<double>(budget.count())));
  const uint64_t id = ++last_retention_;
  Retention retention = {.tenant = &tenant,
                         .until = std::min(hint.until, now + options_.longest_retention),
                         .half_life = hint.half_life};
  Bytes bytes;
  for (const BlockHandle block : path) {
    const PlacedBlock& placed = tenant.At(block);
    if (!placed.ready() || placed.retention != 0) continue;
    const Bytes length = tenant.account(kArenaTier).Rounded(placed.length);
    if (bytes + length > hint.budget || tenant.retained_bytes() + length > all) break;
    tenant.Retain(block, id);
    bytes += length;
    retention.blocks.push_back(block);
  }
  const size_t count = retention.blocks.size();
  if (count == 0) return 0;
  retention.next = std::min(now + retention.half_life, retention.until);
  retentions_.emplace(id, std::move(retention));
  return count;
}

void BlockDirectory::Impl::DecayRetentions(absl::Time now) {
  for (auto entry = retentions_.begin(); entry != retentions_.end();) {
    auto& [id, retention] = *entry;
    while (retention.next <= now && !retention.blocks.empty()) {
      const bool over = retention.next >= retention.until;
      const size_t stay = over ? 0 : retention.blocks.size() / 2;
      for (; retention.blocks.size() > stay; retention.blocks.pop_back()) {
        const BlockHandle block = retention.blocks.back();
        // Otherwise it was dropped meanwhile.
        if (retention.tenant->At(block).retention == id) retention.tenant->Unretain(block);
      }
      retention.next = std::min(retention.next + retention.half_life, retention.until);
    }
    if (retention.blocks.empty()) {
      entry = retentions_.erase(entry);
    } else {
      ++entry;
    }
  }
}

size_t BlockDirectory::Impl::Demote(TenantBlocks& tenant, absl::Span<const BlockHandle> path,
                                    absl::Time now) {
  size_t done = 0;
  for (size_t i = path.size(); i > 0; --i) {
    if (!tenant.rank(kArenaTier).IsCandidate(path[i - 1])) continue;
    LetGo(tenant, path[i - 1], now);
    ++done;
  }
  return done;
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
