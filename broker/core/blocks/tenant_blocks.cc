#include "broker/core/blocks/tenant_blocks.h"

#include <algorithm>
#include <cassert>
#include <utility>

#include "absl/strings/str_cat.h"
#include "broker/core/reuse/predictive_policy.h"

namespace palimpsest::blocks {
namespace {

// How long a block is held that a policy without predictions chose to keep, and how often such
// blocks are used again before the tenant's own blocks have told: one of two.
constexpr double kGuessedSeconds = 600;

std::unique_ptr<cache::EvictionPolicy> MakePolicy(const PolicyMaker& maker, TierIndex tier) {
  if (maker != nullptr) return maker(tier);
  return std::make_unique<reuse::PredictivePolicy>();
}

}  // namespace

Copy* PlacedBlock::CopyIn(TierIndex tier) {
  const auto found = std::find_if(copies.begin(), copies.end(),
                                  [tier](const Copy& copy) { return copy.tier == tier; });
  return found == copies.end() ? nullptr : &*found;
}

bool PlacedBlock::HasCopy() const {
  return std::any_of(copies.begin(), copies.end(), [](const Copy& copy) { return !copy.leaving; });
}

TenantBlocks::TenantBlocks(const BlockTenant& tenant, const DirectoryOptions& options,
                           BlockEvents& events)
    : tenant_(tenant),
      history_(options.history),
      events_(events),
      tree_(options.history),
      prefetcher_(tree_, options.lower.size()) {
  for (size_t i = 0; i <= options.lower.size(); ++i) {
    const TierIndex tier(static_cast<uint8_t>(i));
    ranks_.push_back(std::make_unique<TierRank>(tree_, MakePolicy(tenant.policy, tier)));
    TierAccount account;
    const Bytes all = i == 0 ? options.arena.chunk_bytes * options.arena.max_chunks
                             : options.lower[i - 1].capacity;
    account.budget = i < tenant.budgets.size() ? tenant.budgets[i] : all;
    account.unit = i == 0 ? options.arena.unit : options.lower[i - 1].unit;
    accounts_.push_back(account);
  }
}

PlacedBlock& TenantBlocks::At(BlockHandle block) {
  if (block.value() >= blocks_.size()) blocks_.resize(block.value() + size_t{1});
  return blocks_[block.value()];
}

bool TenantBlocks::Crowded() const {
  size_t lie_somewhere = 0;
  for (const TierAccount& account : accounts_) lie_somewhere += account.counters.blocks;
  return tree_.size() >= lie_somewhere + 2 * history_;
}

std::vector<BlockHandle> TenantBlocks::Name(absl::Span<const BlockIdentity> ids, size_t& known) {
  std::vector<BlockHandle> path;
  path.reserve(ids.size());
  known = 0;
  BlockHandle parent = kNoBlock;
  for (const BlockIdentity& id : ids) {
    BlockHandle block = tree_.Find(id.key);
    if (block == kNoBlock) {
      if (Crowded()) break;
      block = tree_.Add(id.key, parent);
    } else {
      if (tree_.parent(block) == kNoBlock && parent != kNoBlock) {
        tree_.Attach(block, parent);
        for (const auto& rank : ranks_) rank->OnAttach(block);
      }
      if (tree_.parent(block) != parent) break;
      if (known == path.size()) ++known;
    }
    tree_.SetPosition(block, static_cast<uint32_t>(path.size()));
    path.push_back(block);
    parent = block;
  }
  return path;
}

std::vector<BlockHandle> TenantBlocks::Find(absl::Span<const BlockIdentity> ids) const {
  std::vector<BlockHandle> path;
  for (const BlockIdentity& id : ids) {
    const BlockHandle block = tree_.Find(id.key);
    if (block == kNoBlock) break;
    path.push_back(block);
  }
  return path;
}

cache::RequestId TenantBlocks::Begin(const AcquireRequest& request,
                                     absl::Span<const BlockHandle> path, size_t known,
                                     absl::Time now) {
  const cache::RequestInfo info = {.id = cache::RequestId(++last_request_),
                                   .arrival = now,
                                   .conversation = request.conversation,
                                   .input_tokens = request.input_tokens,
                                   .types = request.types};
  for (const auto& rank : ranks_) {
    size_t cached = 0;
    while (cached < path.size() && rank->Contains(path[cached])) ++cached;
    rank->policy().OnRequest(info, {path, cached, std::max(known, cached)});
  }
  for (size_t i = path.size(); i > 0; --i) {
    tree_.Touch(path[i - 1]);
    At(path[i - 1]).at_least = {};
  }
  return info.id;
}

void TenantBlocks::Extend(cache::RequestId request, BlockHandle block) {
  for (const auto& rank : ranks_) rank->policy().OnExtend(request, block);
  tree_.Touch(block);
}

cache::RequestEnd TenantBlocks::End(cache::RequestId request, const RequestEnding& ending,
                                    absl::Time now) {
  const cache::RequestEnd end = {.id = request,
                                 .time = now,
                                 .how = ending.how,
                                 .output_tokens = ending.output_tokens,
                                 .expected_idle = ending.expected_idle,
                                 .last_turn = ending.last_turn};
  for (const auto& rank : ranks_) rank->policy().OnRequestEnd(end);
  return end;
}

void TenantBlocks::NameStrangers(absl::Span<const BlockHandle> path, absl::Time now) {
  if (path.empty()) return;
  End(Begin({}, path, 0, now), {}, now);
}

void TenantBlocks::ForgetOldest() {
  tree_.Trim([this](BlockHandle block) {
    for (const auto& rank : ranks_) rank->policy().OnForget(block);
    At(block) = {};
  });
}

// Without predictions: blocks that leave the arena are used again as often as those before them.
cache::Outlook TenantBlocks::Guess() const {
  uint64_t hits = 0, stored = 0;
  for (size_t i = 1; i < accounts_.size(); ++i) {
    const TierCounters& counters = accounts_[i].counters;
    hits += counters.hits - counters.foreign_hits;
    stored += counters.stored - counters.foreign_stored;
  }
  const double reuse =
      std::min(1.0, static_cast<double>(hits + 1) / static_cast<double>(stored + 2));
  return {.reuse = reuse, .hits_per_second = reuse / kGuessedSeconds};
}

cache::Outlook TenantBlocks::OutlookOf(BlockHandle block, absl::Time now) {
  cache::Outlook outlook = rank(kArenaTier).policy().OutlookOf(now, block).value_or(Guess());
  const cache::Outlook& at_least = At(block).at_least;
  outlook.reuse = std::max(outlook.reuse, at_least.reuse);
  outlook.hits_per_second = std::max(outlook.hits_per_second, at_least.hits_per_second);
  return outlook;
}

double TenantBlocks::RateOf(BlockHandle block, Bytes length, absl::Duration load,
                            absl::Duration move, absl::Time now) {
  return WorthRate(
      OutlookOf(block, now),
      {.otherwise = tenant_.recompute.At(tree_.position(block)), .load = load, .move = move},
      length);
}

void TenantBlocks::Count(BlockEvent::Kind kind, TierIndex tier, BlockHandle block) {
  TierCounters& counters = account(tier).counters;
  if (kind == BlockEvent::Kind::kStored) {
    ++counters.stored;
    ++counters.blocks;
  } else {
    ++counters.removed;
    --counters.blocks;
  }
  events_.Add(kind, tenant_.id, tier, tree_.key(block));
}

void TenantBlocks::Reserved(BlockHandle block, Bytes length) {
  PlacedBlock& placed = At(block);
  assert(placed.arena == InArena::kNo);
  placed.arena = InArena::kWriting;
  placed.doomed = false;
  placed.length = length;
  tree_.Retain(block);
}

void TenantBlocks::Unreserved(BlockHandle block) {
  assert(At(block).arena == InArena::kWriting);
  At(block).arena = InArena::kNo;
  At(block).prefetched.reset();
  tree_.Release(block);
}

void TenantBlocks::Committed(BlockHandle block, TierIndex from) {
  PlacedBlock& placed = At(block);
  assert(placed.arena == InArena::kWriting);
  placed.arena = InArena::kRanked;
  const Copy* const source = from == kArenaTier ? nullptr : placed.CopyIn(from);
  placed.promoted_from = from.value();
  placed.promoted_foreign = source != nullptr && source->foreign;
  if (placed.prefetched.has_value()) {
    prefetcher_.planner().OnFetched(tree_.key(block), *placed.prefetched);
    placed.prefetched.reset();
  }
  rank(kArenaTier).Insert(block);
  Count(BlockEvent::Kind::kStored, kArenaTier, block);
}

void TenantBlocks::Leave(BlockHandle block, InArena to) {
  PlacedBlock& placed = At(block);
  assert(placed.arena == InArena::kRanked && placed.retention == 0);
  rank(kArenaTier).Remove(block);
  placed.arena = InArena::kLeaving;
  leaving_bytes_ += account(kArenaTier).Rounded(placed.length);
  if (to == InArena::kSpare) Spare(block);
}

void TenantBlocks::Spare(BlockHandle block) {
  PlacedBlock& placed = At(block);
  assert(placed.arena == InArena::kLeaving);
  placed.arena = InArena::kSpare;
  const Bytes bytes = account(kArenaTier).Rounded(placed.length);
  leaving_bytes_ -= bytes;
  spare_bytes_ += bytes;
  spare_.Push(block);
}

void TenantBlocks::ComeBack(BlockHandle block) {
  PlacedBlock& placed = At(block);
  if (placed.arena == InArena::kRanked) return;
  assert(placed.arena == InArena::kLeaving || placed.arena == InArena::kSpare);
  const Bytes bytes = account(kArenaTier).Rounded(placed.length);
  (placed.arena == InArena::kSpare ? spare_bytes_ : leaving_bytes_) -= bytes;
  spare_.Remove(block);
  placed.arena = InArena::kRanked;
  rank(kArenaTier).Insert(block);
}

void TenantBlocks::Retain(BlockHandle block, uint64_t retention) {
  PlacedBlock& placed = At(block);
  assert(placed.retention == 0 && retention != 0);
  ComeBack(block);
  placed.retention = retention;
  TierAccount& account = this->account(kArenaTier);
  account.counters.retained += account.Rounded(placed.length);
  rank(kArenaTier).Pin(block);
}

void TenantBlocks::Unretain(BlockHandle block) {
  PlacedBlock& placed = At(block);
  assert(placed.retention != 0);
  placed.retention = 0;
  TierAccount& account = this->account(kArenaTier);
  account.counters.retained -= account.Rounded(placed.length);
  rank(kArenaTier).Unpin(block);
}

void TenantBlocks::Pinned(BlockHandle block, bool waited) {
  PlacedBlock& placed = At(block);
  ComeBack(block);
  rank(kArenaTier).Pin(block);
  prefetcher_.planner().OnUsed(tree_.key(block));
  const TierIndex from(placed.promoted_from);
  placed.promoted_from = 0;
  TierCounters& counters = account(waited ? from : kArenaTier).counters;
  ++counters.hits;
  counters.hit_bytes += placed.length;
  if (waited && from != kArenaTier && placed.promoted_foreign) ++counters.foreign_hits;
}

void TenantBlocks::Dropped(BlockHandle block) {
  PlacedBlock& placed = At(block);
  const Bytes bytes = account(kArenaTier).Rounded(placed.length);
  if (placed.retention != 0) Unretain(block);
  if (placed.arena == InArena::kRanked) {
    rank(kArenaTier).Remove(block);
  } else {
    assert(placed.arena == InArena::kLeaving || placed.arena == InArena::kSpare);
    (placed.arena == InArena::kSpare ? spare_bytes_ : leaving_bytes_) -= bytes;
    spare_.Remove(block);
  }
  if (placed.promoted_from != 0) {
    TierCounters& counters = account(TierIndex(placed.promoted_from)).counters;
    ++counters.promotions_wasted;
    counters.wasted_bytes += placed.length;
    placed.promoted_from = 0;
  }
  prefetcher_.planner().OnGone(tree_.key(block));
  placed.arena = InArena::kNo;
  Count(BlockEvent::Kind::kRemoved, kArenaTier, block);
  tree_.Release(block);
}

void TenantBlocks::Stored(BlockHandle block, TierIndex tier, const BlockRecord& record,
                          bool foreign) {
  PlacedBlock& placed = At(block);
  assert(placed.CopyIn(tier) == nullptr);
  if (placed.copies.empty()) placed.id = std::make_unique<BlockIdentity>(record.id);
  placed.copies.push_back({.tier = tier,
                           .length = record.length,
                           .checksum = record.checksum,
                           .expiry = record.expiry,
                           .foreign = foreign});
  tree_.Retain(block);
  if (foreign) {
    ++account(tier).counters.foreign;
    ++account(tier).counters.foreign_stored;
  } else {
    account(tier).copies += account(tier).Rounded(record.length);
    rank(tier).Insert(block);
  }
  Count(BlockEvent::Kind::kStored, tier, block);
}

void TenantBlocks::LeaveTier(BlockHandle block, TierIndex tier) {
  Copy* const copy = At(block).CopyIn(tier);
  assert(copy != nullptr && !copy->leaving && !copy->foreign);
  copy->leaving = true;
  account(tier).leaving += account(tier).Rounded(copy->length);
  rank(tier).Remove(block);
}

void TenantBlocks::Removed(BlockHandle block, TierIndex tier) {
  PlacedBlock& placed = At(block);
  const Copy* const copy = placed.CopyIn(tier);
  TierAccount& account = this->account(tier);
  if (copy->foreign) {
    --account.counters.foreign;
  } else {
    if (!copy->leaving) LeaveTier(block, tier);
    const Bytes bytes = account.Rounded(copy->length);
    account.leaving -= bytes;
    account.copies -= bytes;
  }
  placed.copies.erase(placed.copies.begin() + (copy - placed.copies.data()));
  if (placed.copies.empty()) placed.id.reset();
  Count(BlockEvent::Kind::kRemoved, tier, block);
  tree_.Release(block);
}

absl::Status TenantBlocks::CheckConsistency() const {
  std::vector<uint64_t> blocks(tiers()), foreign(tiers());
  std::vector<Bytes> copies(tiers()), leaving(tiers());
  Bytes spare, arena_leaving, retained;
  const auto wrong = [this](absl::string_view what) {
    return absl::InternalError(absl::StrCat("tenant ", tenant_.name, ": ", what));
  };
  for (const BlockHandle block : tree_.All()) {
    if (block.value() >= blocks_.size()) continue;
    const PlacedBlock& placed = blocks_[block.value()];
    const Bytes bytes = account(kArenaTier).Rounded(placed.length);
    const bool ready = placed.arena != InArena::kNo && placed.arena != InArena::kWriting;
    blocks[0] += ready ? 1 : 0;
    if (placed.arena == InArena::kSpare) spare += bytes;
    if (placed.arena == InArena::kLeaving) arena_leaving += bytes;
    if (placed.retention != 0) retained += bytes;
    if (placed.retention != 0 && placed.arena != InArena::kRanked) {
      return wrong("a block is retained where it is not");
    }
    if (spare_.Contains(block) != (placed.arena == InArena::kSpare)) {
      return wrong("the list of spare blocks is not that of their states");
    }
    if (ranks_[0]->Contains(block) != (placed.arena == InArena::kRanked)) {
      return wrong("a block is ranked in T1 and not there, or the other way round");
    }
    if (placed.promoted_from != 0 && !ready) return wrong("a promoted block is not there");
    for (const Copy& copy : placed.copies) {
      const size_t tier = copy.tier.value();
      ++blocks[tier];
      if (copy.foreign) {
        ++foreign[tier];
        if (copy.leaving || ranks_[tier]->Contains(block)) {
          return wrong("a block of another node is ranked, or about to be removed");
        }
        continue;
      }
      copies[tier] += accounts_[tier].Rounded(copy.length);
      if (copy.leaving) leaving[tier] += accounts_[tier].Rounded(copy.length);
      if (ranks_[tier]->Contains(block) == copy.leaving) {
        return wrong("a block is ranked in a lower tier and not there, or the other way round");
      }
    }
    const uint32_t holds =
        (placed.arena != InArena::kNo ? 1 : 0) + static_cast<uint32_t>(placed.copies.size());
    if (tree_.retained(block) < holds) return wrong("a block that lies somewhere may be forgotten");
  }
  if (spare != spare_bytes_ || arena_leaving != leaving_bytes_ || retained != retained_bytes()) {
    return wrong("bytes on their way out, or retained, are counted wrongly");
  }
  for (size_t i = 0; i < tiers(); ++i) {
    const TierAccount& account = accounts_[i];
    if (account.copies != copies[i] || account.leaving != leaving[i] ||
        account.counters.blocks != blocks[i] || account.counters.foreign != foreign[i] ||
        account.counters.stored - account.counters.removed != blocks[i]) {
      return wrong(absl::StrCat("the sums of tier ", i, " are wrong"));
    }
    if (absl::Status status = ranks_[i]->CheckConsistency(); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace palimpsest::blocks
