#include "worker/core/tier_one_parts.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "worker/core/check.h"

namespace palimpsest {

TierOneParts::TierOneParts(Options options, HeadMass profile)
    : options_(std::move(options)),
      profile_(std::move(profile)),
      limit_(options_.limit / options_.part_bytes),
      order_(options_.groups.size()) {
  PALIMPSEST_CHECK(groups() >= 1 && groups() <= size_t{kMostHeadGroups});
  PALIMPSEST_CHECK(options_.block_tokens > 0);
}

TierOneParts::Block* TierOneParts::Find(const BlockKey& key) const {
  const auto found = blocks_.find(key);
  return found == blocks_.end() ? nullptr : found->second.get();
}

TierOneParts::Path TierOneParts::PathTo(Block* block) {
  Path path;
  for (; block != nullptr; block = block->parent) path.push_back(block);
  std::reverse(path.begin(), path.end());
  return path;
}

void TierOneParts::Begin(uint64_t request, const BlockChain& chain) {
  if (chain.parent == options_.root) Continue(requests_[request], chain, 0);
}

void TierOneParts::Extend(uint64_t request, const BlockChain& chain, absl::Time now) {
  Block* const parent = Find(chain.parent);
  if (parent == nullptr && chain.parent != options_.root) return;
  const size_t at = parent == nullptr ? 0 : static_cast<size_t>(parent->position) + 1;
  const auto found = requests_.find(request);
  if (found != requests_.end()) {
    Path& path = found->second;
    if (at == 0 || (at <= path.size() && path[at - 1] == parent)) Continue(path, chain, at);
    return;
  }
  Path path = PathTo(parent);
  for (Block* block : path) Use(*block);
  Continue(path, chain, at);
  Idle(path, now);
}

void TierOneParts::Continue(Path& path, const BlockChain& chain, size_t at) {
  const auto size = static_cast<size_t>(options_.block_tokens);
  for (size_t i = 0; i < chain.keys.size(); ++i) {
    if (at + i < path.size()) {
      if (path[at + i]->key != chain.keys[i]) break;
      continue;
    }
    if (path.size() >= kMostPathBlocks) break;
    Block* const next = Next(path.empty() ? nullptr : path.back(), chain.keys[i],
                             absl::MakeConstSpan(chain.tokens).subspan(i * size, size));
    if (next == nullptr) break;
    Use(*next);
    path.push_back(next);
  }
  RelistTouched();
}

TierOneParts::Block* TierOneParts::Next(Block* parent, const BlockKey& key,
                                        absl::Span<const TokenId> tokens) {
  if (Block* const known = Find(key); known != nullptr) {
    return known->parent == parent && absl::MakeConstSpan(known->tokens) == tokens ? known
                                                                                   : nullptr;
  }
  if (!MakeRoom()) return nullptr;
  auto block = std::make_unique<Block>();
  block->key = key;
  block->parent = parent;
  block->tokens.assign(tokens.begin(), tokens.end());
  block->position = parent == nullptr ? 0 : parent->position + 1;
  block->below.resize(groups());
  if (parent != nullptr) ++parent->children;
  return blocks_.emplace(key, std::move(block)).first->second.get();
}

bool TierOneParts::MakeRoom() {
  const auto most = static_cast<size_t>(options_.most_parts) / groups();
  while (blocks_.size() >= most) {
    // On its last block no other hangs: it would be of a run that is older still.
    const auto oldest = runs_.begin();
    if (oldest == runs_.end()) return false;
    Run& run = oldest->second;
    Block* const last = run.last;
    PALIMPSEST_CHECK(last->children == 0);
    for (size_t group = 0; group < groups(); ++group) Set(*last, group, false);
    run.last = last->parent;
    if (last->parent != nullptr) --last->parent->children;
    blocks_.erase(last->key);
    if (--run.blocks == 0) Erase(oldest);
  }
  return true;
}

void TierOneParts::Use(Block& block) {
  ++block.users;
  if (block.run == 0) return;
  const auto found = runs_.find(block.run);
  Run& run = found->second;
  for (size_t group = 0; group < groups(); ++group) {
    if (!Has(block, group)) continue;
    Count(run, block, group, -1);
    if (run.shares[group].end == &block) run.shares[group].end = nullptr;
  }
  if (touched_.empty() || touched_.back() != block.run) touched_.push_back(block.run);
  block.run = 0;
  if (--run.blocks == 0) Erase(found);
}

void TierOneParts::RelistTouched() {
  for (const RunId id : touched_) {
    const auto run = runs_.find(id);
    if (run == runs_.end()) continue;
    for (size_t group = 0; group < groups(); ++group) Relist(id, run->second, group);
  }
  touched_.clear();
}

void TierOneParts::Erase(RunMap::iterator run) {
  for (size_t group = 0; group < groups(); ++group) {
    const std::optional<double>& key = run->second.shares[group].key;
    if (key.has_value()) order_[group].erase({*key, run->first});
  }
  runs_.erase(run);
}

void TierOneParts::End(uint64_t request, absl::Time now) {
  const auto found = requests_.find(request);
  if (found == requests_.end()) return;
  const Path path = std::move(found->second);
  requests_.erase(found);
  Idle(path, now);
}

void TierOneParts::Idle(const Path& path, absl::Time now) {
  RelistTouched();
  // What others use is the path's beginning.
  size_t first = path.size();
  for (size_t i = path.size(); i > 0; --i) {
    if (--path[i - 1]->users == 0) first = i - 1;
  }
  if (first == path.size()) return;
  if (epoch_ == absl::InfinitePast()) epoch_ = now;
  const RunId id = ++last_run_;
  Run& run = runs_[id];
  run.since = -options_.worth.LogRecency(now - epoch_);
  run.path = static_cast<int32_t>(path.size());
  run.last = path.back();
  run.blocks = static_cast<int32_t>(path.size() - first);
  run.shares.resize(groups());
  for (size_t i = first; i < path.size(); ++i) {
    Block& block = *path[i];
    PALIMPSEST_CHECK(block.users == 0);
    block.run = id;
    for (size_t group = 0; group < groups(); ++group) {
      if (!Has(block, group)) continue;
      Count(run, block, group, 1);
      if (block.below[group] == 0) run.shares[group].end = &block;
    }
  }
  for (size_t group = 0; group < groups(); ++group) Relist(id, run, group);
}

void TierOneParts::ForgetAll() {
  for (auto& order : order_) order.clear();
  runs_.clear();
  requests_.clear();
  blocks_.clear();
  parts_ = 0;
}

void TierOneParts::Came(const BlockKey& block, int32_t group) {
  Block* const found = Find(block);
  if (found != nullptr) Set(*found, static_cast<size_t>(group), true);
}

void TierOneParts::Left(const BlockKey& block, int32_t group) {
  Block* const found = Find(block);
  if (found != nullptr) Set(*found, static_cast<size_t>(group), false);
}

void TierOneParts::Set(Block& block, size_t group, bool in_tier_one) {
  if (Has(block, group) == in_tier_one) return;
  bool before = Occupied(block, group);
  block.in_tier_one ^= uint64_t{1} << group;
  const int32_t change = in_tier_one ? 1 : -1;
  parts_ += change;
  if (block.run != 0) Count(runs_.at(block.run), block, group, change);
  UpdateEnd(block, group);
  // Those that it hangs on, until one is as it was.
  for (Block* child = &block; child->parent != nullptr; child = child->parent) {
    if (Occupied(*child, group) == before) return;
    Block& parent = *child->parent;
    before = Occupied(parent, group);
    parent.below[group] += change;
    UpdateEnd(parent, group);
  }
}

double TierOneParts::NearnessIn(const Run& run, const Block& block) const {
  const int64_t behind = run.path - 1 - block.position;
  return options_.worth.Nearness(behind * options_.block_tokens);
}

void TierOneParts::Count(Run& run, const Block& block, size_t group, int32_t change) {
  Share& share = run.shares[group];
  share.parts += change;
  share.nearness = share.parts == 0 ? 0 : share.nearness + change * NearnessIn(run, block);
}

void TierOneParts::UpdateEnd(Block& block, size_t group) {
  if (block.run == 0) return;
  Run& run = runs_.at(block.run);
  Share& share = run.shares[group];
  if (Has(block, group) && block.below[group] == 0) {
    share.end = &block;
  } else if (share.end == &block) {
    share.end = nullptr;
  }
  Relist(block.run, run, group);
}

void TierOneParts::Relist(RunId id, Run& run, size_t group) {
  Share& share = run.shares[group];
  if (share.key.has_value()) order_[group].erase({*share.key, id});
  share.key.reset();
  if (share.end == nullptr) return;
  share.key = std::log2(share.nearness / share.parts) + run.since;
  order_[group].insert({*share.key, id});
}

std::vector<double> TierOneParts::LogMasses(const HeadMass* live) const {
  const bool enough = live != nullptr && live->samples() >= kEnoughSamples;
  const HeadMass& mass = enough ? *live : profile_;
  std::vector<double> masses;
  for (const std::vector<int32_t>& heads : options_.groups) {
    double sum = 0;
    for (const int32_t head : heads) sum += mass.mass(head);
    masses.push_back(HeadWorth::LogMass(sum / static_cast<double>(heads.size())));
  }
  return masses;
}

std::vector<TierOneParts::Demotion> TierOneParts::TakeDemotions(const HeadMass* live) {
  std::vector<Demotion> demotions;
  int64_t too_many = parts_ - limit_;
  if (too_many <= 0) return demotions;
  const std::vector<double> masses = LogMasses(live);
  while (too_many > 0 && demotions.size() < kMostDemotions) {
    std::optional<size_t> least;
    double worth = std::numeric_limits<double>::infinity();
    for (size_t group = 0; group < groups(); ++group) {
      if (order_[group].empty()) continue;
      const double log_worth = masses[group] + order_[group].begin()->first;
      if (log_worth >= worth) continue;
      worth = log_worth;
      least = group;
    }
    if (!least.has_value()) break;
    demotions.push_back(Take(order_[*least].begin()->second, *least, too_many));
  }
  return demotions;
}

TierOneParts::Demotion TierOneParts::Take(RunId id, size_t group, int64_t& too_many) {
  Share& share = runs_.at(id).shares[group];
  Demotion demotion = {.group = static_cast<int32_t>(group), .chain = {}, .first = 0};
  demotion.chain.parent = options_.root;
  for (const Block* block : PathTo(share.end)) {
    demotion.chain.keys.push_back(block->key);
    demotion.chain.tokens.insert(demotion.chain.tokens.end(), block->tokens.begin(),
                                 block->tokens.end());
  }
  for (; share.end != nullptr && too_many > 0; --too_many) {
    demotion.first = share.end->position;
    Set(*share.end, group, false);
  }
  return demotion;
}

}  // namespace palimpsest
