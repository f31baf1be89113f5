#include "worker/core/block_manager.h"

#include <algorithm>
#include <bit>
#include <tuple>
#include <utility>

#include "worker/core/check.h"

namespace palimpsest {

BlockManager::BlockManager(const KvGeometry& geometry)
    : geometry_(geometry),
      blocks_(std::max<uint32_t>(1, geometry.block_count())),
      slabs_(geometry.region_slabs),
      free_bits_((blocks_.size() + 63) / 64) {
  counts_[kUnusable] = static_cast<int32_t>(blocks_.size()) - 1;
  for (uint32_t id = 1; id < blocks_.size(); ++id) {
    const auto slabs = geometry_.SlabsOf(BlockId(id));
    blocks_[id].missing_slabs = static_cast<int32_t>(slabs.end - slabs.begin);
  }
}

bool BlockManager::LegalTransition(State from, State to) {
  switch (from) {
    case kUnusable:
      return to == kFree;
    case kFree:
      return to == kLive || to == kUnusable;
    case kLive:
      return to == kFree || to == kCached || to == kDisplaced;
    case kCached:
      return to == kLive || to == kFree || to == kUnusable;
    case kDisplaced:
      return to == kUnusable;
    case kStates:
      break;
  }
  return false;
}

void BlockManager::SetState(uint32_t id, State state) {
  Block& block = blocks_[id];
  PALIMPSEST_CHECK(LegalTransition(block.state, state));
  if (block.state == kFree) free_bits_[id / 64] &= ~(uint64_t{1} << (id % 64));
  if (block.state == kCached) Unlink(id);
  CountInSlabs(id, block.state, -1);
  --counts_[block.state];
  block.state = state;
  ++counts_[state];
  CountInSlabs(id, state, +1);
  if (state == kCached) LinkNewest(id);
  if (state == kFree) {
    free_bits_[id / 64] |= uint64_t{1} << (id % 64);
    first_free_word_ = std::min<size_t>(first_free_word_, id / 64);
  }
}

void BlockManager::CountInSlabs(uint32_t id, State state, int32_t change) {
  if (state == kUnusable || state == kFree) return;
  const auto range = geometry_.SlabsOf(BlockId(id));
  for (uint32_t slab = range.begin; slab < range.end; ++slab) {
    (state == kCached ? slabs_[slab].cached_blocks : slabs_[slab].live_blocks) += change;
  }
}

void BlockManager::LinkNewest(uint32_t id) {
  blocks_[id].older = newest_;
  blocks_[id].newer = 0;
  (newest_ == 0 ? oldest_ : blocks_[newest_].newer) = id;
  newest_ = id;
}

void BlockManager::Unlink(uint32_t id) {
  const Block& block = blocks_[id];
  (block.older == 0 ? oldest_ : blocks_[block.older].newer) = block.newer;
  (block.newer == 0 ? newest_ : blocks_[block.newer].older) = block.older;
}

void BlockManager::Forget(uint32_t id) {
  PrefixCache::Node* const node = blocks_[id].node;
  if (node == nullptr) return;
  blocks_[id].node = nullptr;
  cache_.ClearBlock(node);
}

uint32_t BlockManager::LowestFree() {
  while (free_bits_[first_free_word_] == 0) ++first_free_word_;
  return static_cast<uint32_t>(first_free_word_ * 64 +
                               std::countr_zero(free_bits_[first_free_word_]));
}

bool BlockManager::NullBlockMapped() const {
  const auto range = geometry_.SlabsOf(kNullBlock);
  return std::all_of(slabs_.begin(), slabs_.begin() + std::min<size_t>(range.end, slabs_.size()),
                     [](const Slab& slab) { return slab.mapped; });
}

void BlockManager::Open(RegionIndex index) {
  if (std::exchange(slabs_[index.value()].open, true)) return;
  const auto range = geometry_.BlocksOf(index);
  for (uint32_t id = range.begin; id < range.end; ++id) {
    if (--blocks_[id].missing_slabs == 0) SetState(id, kFree);
  }
}

void BlockManager::Close(RegionIndex index) {
  if (!std::exchange(slabs_[index.value()].open, false)) return;
  const auto range = geometry_.BlocksOf(index);
  for (uint32_t id = range.begin; id < range.end; ++id) {
    if (blocks_[id].missing_slabs++ > 0) continue;
    if (blocks_[id].state == kCached) Forget(id);
    SetState(id, blocks_[id].state == kLive ? kDisplaced : kUnusable);
  }
}

void BlockManager::OnSlabsMapped(absl::Span<const RegionIndex> slabs) {
  const bool usable = NullBlockMapped();
  for (RegionIndex index : slabs) {
    PALIMPSEST_CHECK(!std::exchange(slabs_.at(index.value()).mapped, true));
    ++mapped_slabs_;
  }
  if (!NullBlockMapped()) return;
  if (usable) {
    for (RegionIndex index : slabs) Open(index);
    return;
  }
  for (uint32_t i = 0; i < slabs_.size(); ++i) {
    if (slabs_[i].mapped) Open(RegionIndex(i));
  }
}

std::optional<BlockId> BlockManager::Allocate() {
  uint32_t id = 0;
  if (free_blocks() > 0) {
    id = LowestFree();
  } else if (oldest_ != 0) {
    id = oldest_;
    Forget(id);
    SetState(id, kFree);
  } else {
    return std::nullopt;
  }
  SetState(id, kLive);
  blocks_[id].references = 1;
  return BlockId(id);
}

void BlockManager::AddReference(BlockId id) {
  Block& block = blocks_[id.value()];
  if (block.state == kCached) SetState(id.value(), kLive);
  PALIMPSEST_CHECK(block.state == kLive);
  ++block.references;
}

void BlockManager::Release(BlockId block) {
  const uint32_t id = block.value();
  PALIMPSEST_CHECK(blocks_[id].references > 0);
  if (--blocks_[id].references > 0) return;
  if (blocks_[id].state == kDisplaced) {
    Forget(id);
    SetState(id, kUnusable);
  } else {
    SetState(id, blocks_[id].node != nullptr ? kCached : kFree);
  }
}

BlockManager::Match BlockManager::FindPrefix(absl::Span<const BlockKey> keys,
                                             absl::Span<const TokenId> tokens,
                                             int32_t window) const {
  const int32_t size = geometry_.block_tokens;
  std::vector<PrefixCache::Node*> path;
  size_t matched = 0;  // blocks of the best match so far
  size_t present = 0;  // blocks at the end of the path that are there
  PrefixCache::Node* node = nullptr;
  for (const BlockKey& key : keys) {
    node = cache_.Find(node, key, tokens.subspan(path.size() * size, size));
    if (node == nullptr) break;
    path.push_back(node);
    present = node->block() == kNullBlock ? 0 : present + 1;
    // The next token, at position path.size() * size, sees window - 1 tokens before it.
    const size_t seen =
        window == 0 ? path.size() : std::min<size_t>(path.size(), geometry_.WindowBlocks(window));
    if (present >= seen) matched = path.size();
    if (present < seen && window == 0) break;
  }
  Match match;
  if (matched == 0) return match;
  match.node = path[matched - 1];
  match.blocks.assign(matched, kNullBlock);
  const size_t seen =
      window == 0 ? matched : std::min<size_t>(matched, geometry_.WindowBlocks(window));
  for (size_t i = matched - seen; i < matched; ++i) {
    match.blocks[i] = path[i]->block();
    if (blocks_[match.blocks[i].value()].state == kCached) ++match.cached_blocks;
  }
  return match;
}

void BlockManager::Narrow(Match& match, int32_t first) const {
  const auto end = match.blocks.begin() +
                   std::min<ptrdiff_t>(first, static_cast<ptrdiff_t>(match.blocks.size()));
  for (auto block = match.blocks.begin(); block < end; ++block) {
    if (blocks_[block->value()].state == kCached) --match.cached_blocks;
    *block = kNullBlock;
  }
}

void BlockManager::Acquire(const Match& match) {
  for (BlockId id : match.blocks) {
    if (id != kNullBlock) AddReference(id);
  }
  if (match.node != nullptr) cache_.Pin(match.node);
}

BlockManager::Published BlockManager::Publish(PrefixCache::Node* parent, const BlockKey& key,
                                              absl::Span<const TokenId> tokens, BlockId block) {
  PALIMPSEST_CHECK(blocks_[block.value()].state == kLive && blocks_[block.value()].node == nullptr);
  Published result{block, cache_.FindOrAdd(parent, key, tokens)};
  if (result.node != nullptr) {
    cache_.Pin(result.node);
    if (result.node->block() == kNullBlock) {
      cache_.SetBlock(result.node, block);
      blocks_[block.value()].node = result.node;
    } else {
      result.block = result.node->block();
      AddReference(result.block);
      Release(block);
    }
  }
  if (parent != nullptr) cache_.Unpin(parent);
  return result;
}

PrefixCache::Node* BlockManager::Connect(PrefixCache::Node* parent, const BlockKey& key,
                                         absl::Span<const TokenId> tokens) {
  PrefixCache::Node* const node = cache_.FindOrAdd(parent, key, tokens);
  if (node != nullptr) cache_.Pin(node);
  if (parent != nullptr) cache_.Unpin(parent);
  return node;
}

void BlockManager::Unpin(PrefixCache::Node* node) { cache_.Unpin(node); }

std::vector<RegionIndex> BlockManager::CheapestSlabs(int32_t count) const {
  std::vector<uint32_t> order;
  for (uint32_t i = 0; i < slabs_.size(); ++i) {
    if (slabs_[i].mapped) order.push_back(i);
  }
  const size_t chosen = std::min<size_t>(std::max(count, 0), order.size());
  const uint32_t first = geometry_.SlabsOf(kNullBlock).end;
  // Among equals the highest: holes at the end of the region cut the fewest straddling blocks.
  std::partial_sort(
      order.begin(), order.begin() + chosen, order.end(), [&](uint32_t a, uint32_t b) {
        return std::tuple(a < first, slabs_[a].live_blocks, slabs_[a].cached_blocks, b) <
               std::tuple(b < first, slabs_[b].live_blocks, slabs_[b].cached_blocks, a);
      });
  std::vector<RegionIndex> result;
  for (size_t i = 0; i < chosen; ++i) result.push_back(RegionIndex(order[i]));
  return result;
}

std::vector<RegionIndex> BlockManager::SlabsBehindHoles() const {
  std::vector<RegionIndex> result;
  for (auto i = static_cast<uint32_t>(mapped_slabs_); i < slabs_.size(); ++i) {
    if (slabs_[i].mapped) result.push_back(RegionIndex(i));
  }
  return result;
}

int32_t BlockManager::UsableWithout(absl::Span<const RegionIndex> slabs) const {
  std::vector<bool> cut(blocks_.size(), false);
  int32_t usable = usable_blocks();
  for (RegionIndex index : slabs) {
    if (index.value() < geometry_.SlabsOf(kNullBlock).end) return 0;
    const auto range = geometry_.BlocksOf(index);
    for (uint32_t id = range.begin; id < range.end; ++id) {
      if (!cut[id] && blocks_[id].missing_slabs == 0) --usable;
      cut[id] = true;
    }
  }
  return usable;
}

void BlockManager::BeginGive(absl::Span<const RegionIndex> slabs) {
  PALIMPSEST_CHECK(displaced_blocks() == 0);
  for (RegionIndex index : slabs) {
    PALIMPSEST_CHECK(std::exchange(slabs_.at(index.value()).mapped, false));
    --mapped_slabs_;
    Close(index);
  }
  if (NullBlockMapped()) return;
  for (uint32_t i = 0; i < slabs_.size(); ++i) Close(RegionIndex(i));
}

std::vector<BlockMove> BlockManager::FinishGive() {
  PALIMPSEST_CHECK(displaced_blocks() <= available_blocks());
  std::vector<BlockMove> moves;
  for (uint32_t id = 1; displaced_blocks() > 0; ++id) {
    if (blocks_[id].state != kDisplaced) continue;
    const BlockId to = *Allocate();
    Block& target = blocks_[to.value()];
    target.references = std::exchange(blocks_[id].references, 0);
    target.node = std::exchange(blocks_[id].node, nullptr);
    if (target.node != nullptr) cache_.MoveBlock(target.node, to);
    SetState(id, kUnusable);
    moves.push_back({BlockId(id), to});
  }
  return moves;
}

SlabCounts BlockManager::CountSlabs() const {
  SlabCounts counts;
  for (const Slab& slab : slabs_) {
    if (!slab.mapped) continue;
    ++(slab.live_blocks > 0 ? counts.used : slab.cached_blocks > 0 ? counts.cached : counts.free);
  }
  return counts;
}

void BlockManager::CheckInvariants() const {
  cache_.CheckInvariants();
  int32_t counts[kStates] = {};
  std::vector<Slab> slabs(slabs_.size());
  for (uint32_t id = 1; id < blocks_.size(); ++id) {
    const Block& block = blocks_[id];
    ++counts[block.state];
    int32_t missing = 0;
    const auto range = geometry_.SlabsOf(BlockId(id));
    for (uint32_t slab = range.begin; slab < range.end; ++slab) {
      missing += !slabs_[slab].open;
      slabs[slab].live_blocks += block.state == kLive || block.state == kDisplaced;
      slabs[slab].cached_blocks += block.state == kCached;
    }
    PALIMPSEST_CHECK(block.missing_slabs == missing);
    PALIMPSEST_CHECK((block.state == kUnusable || block.state == kDisplaced) == (missing > 0));
    PALIMPSEST_CHECK((block.state == kLive || block.state == kDisplaced) == (block.references > 0));
    PALIMPSEST_CHECK(block.state != kCached || block.node != nullptr);
    PALIMPSEST_CHECK((block.state != kFree && block.state != kUnusable) || block.node == nullptr);
    PALIMPSEST_CHECK(block.node == nullptr || block.node->block() == BlockId(id));
    const bool bit = free_bits_[id / 64] >> (id % 64) & 1;
    PALIMPSEST_CHECK(bit == (block.state == kFree));
    PALIMPSEST_CHECK(!bit || id / 64 >= first_free_word_);
  }
  PALIMPSEST_CHECK(std::equal(counts, counts + kStates, counts_));
  int32_t mapped = 0;
  const bool null_block_mapped = NullBlockMapped();
  for (size_t i = 0; i < slabs.size(); ++i) {
    mapped += slabs_[i].mapped;
    PALIMPSEST_CHECK(slabs_[i].open == (slabs_[i].mapped && null_block_mapped));
    PALIMPSEST_CHECK(slabs[i].live_blocks == slabs_[i].live_blocks);
    PALIMPSEST_CHECK(slabs[i].cached_blocks == slabs_[i].cached_blocks);
  }
  PALIMPSEST_CHECK(mapped == mapped_slabs_);
  int32_t listed = 0;
  uint32_t before = 0;
  for (uint32_t id = oldest_; id != 0; before = id, id = blocks_[id].newer, ++listed) {
    PALIMPSEST_CHECK(blocks_[id].older == before && blocks_[id].state == kCached);
    PALIMPSEST_CHECK(listed < counts_[kCached]);
  }
  PALIMPSEST_CHECK(before == newest_ && listed == counts_[kCached]);
}

}  // namespace palimpsest
