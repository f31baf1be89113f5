// Hands out the KV blocks of one worker: which are usable (all their slabs are mapped), which are
// in use, which are kept because another request may start with the same tokens.
//
// No block is usable while a slab of the null block is missing, and these slabs are given away
// last. Kernels may address the null block for what lies beside a sequence's tokens: nothing
// depends on what is there, but a GPU takes it as an illegal access if nothing is
// (fused_decode_kernel.cuh).
//
// A block is
//   UNUSABLE   a slab that it touches is not mapped;
//   FREE       usable, content worthless;
//   LIVE       referenced by at least one sequence;
//   CACHED     unreferenced, but its KV can be found by its token prefix; evicted when needed,
//              least recently used first;
//   DISPLACED  referenced, but one of its slabs is being given away: it must be moved or released
//              before the slabs are given.
// Legal transitions: UNUSABLE→FREE, FREE→LIVE, LIVE→{FREE, CACHED, DISPLACED}, CACHED→{LIVE, FREE},
// DISPLACED→UNUSABLE, {FREE, CACHED}→UNUSABLE. Low ids are handed out first, so that high slabs
// empty out and cost nothing to give back.
//
// A block that is released may still be used by steps in flight: whoever gets it next must come
// after them. Before BeginGive they must be done.
//
// Not thread-safe. Does not block.
#ifndef PALIMPSEST_WORKER_CORE_BLOCK_MANAGER_H_
#define PALIMPSEST_WORKER_CORE_BLOCK_MANAGER_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/types/span.h"
#include "common/ids.h"
#include "worker/core/kv_geometry.h"
#include "worker/core/prefix_cache.h"

namespace palimpsest {

// The KV in `from` must be copied to `to` before the slabs of `from` are unmapped.
struct BlockMove {
  BlockId from;
  BlockId to;
};

struct SlabCounts {
  int32_t used = 0;    // hold at least one referenced block
  int32_t cached = 0;  // hold cached blocks, no referenced one
  int32_t free = 0;

  int32_t mapped() const { return used + cached + free; }
};

class BlockManager {
 public:
  explicit BlockManager(const KvGeometry& geometry);

  const KvGeometry& geometry() const { return geometry_; }

  // Requires that none of them is mapped.
  void OnSlabsMapped(absl::Span<const RegionIndex> slabs);

  // A block with one reference and worthless content; evicts a cached block if none is free. Empty
  // if nothing is available.
  std::optional<BlockId> Allocate();
  // Requires a live or a cached block.
  void AddReference(BlockId block);
  // The block becomes cached or free with its last reference.
  void Release(BlockId block);

  // What the cache has for the start of a token sequence.
  struct Match {
    // Entries before the sliding window are the null block.
    std::vector<BlockId> blocks;
    // The last matched node; null if there is none.
    PrefixCache::Node* node = nullptr;
    // How many of `blocks` are cached, not live: acquiring them leaves so many fewer available.
    int32_t cached_blocks = 0;
  };

  // The longest prefix of whole blocks whose KV is there as far as the next token sees it. `keys`
  // are the chain keys of `tokens`, block by block; tokens beyond them are ignored. `window`:
  // tokens that a token sees, itself included; 0 for all. Valid until the next call that is not
  // const.
  Match FindPrefix(absl::Span<const BlockKey> keys, absl::Span<const TokenId> tokens,
                   int32_t window) const;

  // Does without the match's blocks before block `first`.
  void Narrow(Match& match, int32_t first) const;

  // References the match's blocks and pins its node.
  void Acquire(const Match& match);

  struct Published {
    // The block to use from now on: `block`, or an older one with the same content.
    BlockId block;
    // The new end of the chain, pinned; the parent's pin is gone. Null if it can't be cached.
    PrefixCache::Node* node = nullptr;
  };

  // Makes a live block, now full, findable. `parent` is the pinned node of the block before it
  // (null for the first block of a sequence).
  Published Publish(PrefixCache::Node* parent, const BlockKey& key,
                    absl::Span<const TokenId> tokens, BlockId block);
  // As Publish for a block whose KV is not there, so that those behind it can be published.
  PrefixCache::Node* Connect(PrefixCache::Node* parent, const BlockKey& key,
                             absl::Span<const TokenId> tokens);
  void Pin(PrefixCache::Node* node) { cache_.Pin(node); }
  void Unpin(PrefixCache::Node* node);

  // Up to `count` mapped slabs, those with the fewest referenced blocks first; the null block's
  // last.
  std::vector<RegionIndex> CheapestSlabs(int32_t count) const;
  // The mapped slabs that would not be needed for as many slabs in a region without holes.
  std::vector<RegionIndex> SlabsBehindHoles() const;

  // Blocks that stay usable without these slabs.
  int32_t UsableWithout(absl::Span<const RegionIndex> slabs) const;

  // Takes mapped slabs out of use and drops what they cache. Until FinishGive only Release, Pin
  // and Unpin may be called; they must bring displaced_blocks() down to available_blocks(), which
  // is 0 if a slab of the null block goes.
  void BeginGive(absl::Span<const RegionIndex> slabs);
  // Moves the displaced blocks; references follow them. The caller replaces `from` by `to` in every
  // block table and copies the content.
  std::vector<BlockMove> FinishGive();

  int32_t live_blocks() const { return counts_[kLive]; }
  int32_t cached_blocks() const { return counts_[kCached]; }
  int32_t free_blocks() const { return counts_[kFree]; }
  int32_t displaced_blocks() const { return counts_[kDisplaced]; }
  int32_t available_blocks() const { return free_blocks() + cached_blocks(); }
  int32_t usable_blocks() const { return available_blocks() + live_blocks(); }
  int32_t mapped_slabs() const { return mapped_slabs_; }
  SlabCounts CountSlabs() const;

  int32_t references(BlockId block) const { return blocks_[block.value()].references; }
  // Nobody will read what is in it.
  bool free(BlockId block) const { return blocks_[block.value()].state == kFree; }
  bool usable(BlockId block) const { return blocks_[block.value()].missing_slabs == 0; }

  // Aborts if a count, a list or a link is wrong.
  void CheckInvariants() const;

 private:
  enum State { kUnusable, kFree, kLive, kCached, kDisplaced, kStates };

  struct Block {
    State state = kUnusable;
    int32_t references = 0;
    int32_t missing_slabs = 0;
    PrefixCache::Node* node = nullptr;
    // Neighbours in the list of cached blocks; 0 ends it.
    uint32_t older = 0;
    uint32_t newer = 0;
  };

  struct Slab {
    bool mapped = false;
    bool open = false;        // mapped, as is the null block: its blocks may be used
    int32_t live_blocks = 0;  // displaced ones included
    int32_t cached_blocks = 0;
  };

  // The one place where a block changes state: counts, lists and slabs follow.
  void SetState(uint32_t id, State state);
  void Open(RegionIndex index);
  void Close(RegionIndex index);
  bool NullBlockMapped() const;
  void CountInSlabs(uint32_t id, State state, int32_t change);
  void LinkNewest(uint32_t id);
  void Unlink(uint32_t id);
  void Forget(uint32_t id);
  uint32_t LowestFree();
  static bool LegalTransition(State from, State to);

  const KvGeometry geometry_;
  std::vector<Block> blocks_;
  std::vector<Slab> slabs_;
  int32_t counts_[kStates] = {};
  int32_t mapped_slabs_ = 0;
  uint32_t oldest_ = 0;
  uint32_t newest_ = 0;
  std::vector<uint64_t> free_bits_;
  size_t first_free_word_ = 0;  // no free block in the words before it
  PrefixCache cache_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_BLOCK_MANAGER_H_
