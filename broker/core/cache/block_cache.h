// Blocks of prompts cached up to a capacity, the victims chosen by an EvictionPolicy: the
// bookkeeping of one tier, and what the replay of traces runs. It moves no data.
//
// A request's hit is the longest prefix of its path that is cached: KV of a block is of use only
// behind the KV of all blocks before it.
//
// The cache owns the policy and the handles. A key's handle lasts while the block is cached and,
// then, while it is among the `history` blocks that were requested or evicted last.
//
// Complexity: a hash look-up and what the policy takes, for each block of a path. Threads: none.
// Broken requirements abort.
#ifndef PALIMPSEST_BROKER_CORE_CACHE_BLOCK_CACHE_H_
#define PALIMPSEST_BROKER_CORE_CACHE_BLOCK_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "broker/core/cache/block_list.h"
#include "broker/core/cache/eviction_policy.h"
#include "common/block_key.h"

namespace palimpsest::cache {

struct BlockCacheOptions {
  size_t capacity = 0;  // blocks, at least 1
  // Blocks that are known beyond the cached ones. With kPlain nothing is forgotten.
  size_t history = size_t{1} << 16;
  Discipline discipline = Discipline::kLeavesFirst;
  // Whether the policy may leave blocks unstored. Yes for a tier below; no for the pool in which
  // requests run.
  bool may_refuse = false;
  // Store what a request computed when it ends, not when it begins: a tier below gets blocks when
  // they are done with above, and can tell by then how the request ended. Only with kLeavesFirst.
  bool store_at_end = false;
  // Whether requests' blocks are stored by themselves. No for a tier that is given what the tiers
  // above evict (Admit): it hears of requests all the same, so that its policy knows the blocks.
  bool store_requests = true;
};

class BlockCache {
 public:
  BlockCache(const BlockCacheOptions& options, std::unique_ptr<EvictionPolicy> policy);

  struct Outcome {
    size_t cached = 0;   // leading blocks of the path that were cached: the hit
    size_t known = 0;    // leading blocks that were known
    size_t stored = 0;   // others that are cached now
    size_t evicted = 0;  // victims
    size_t wasted = 0;   // victims that no request has used since they were stored
  };

  // A request with a new id begins: finds its hit and stores the rest of its path as far as there
  // is room. `path` names no block twice, and equal keys follow equal keys. Until End nothing of
  // the path is evicted (kLeavesFirst).
  Outcome Begin(const RequestInfo& request, absl::Span<const BlockKey> path);

  // The running request computed one more block, behind what is stored of its path so far. Ignored
  // if a part of the path could not be stored: the block would be unreachable. Requires
  // kLeavesFirst, and that it is not in the path yet.
  Outcome Extend(RequestId request, absl::Time now, BlockKey key);

  // With store_at_end: the outcome of storing. Blocks of the path that were forgotten meanwhile,
  // and those behind them, are not stored.
  Outcome End(const RequestEnd& end);

  // Stores blocks although no request asks for it: what another tier evicts, or what is fetched
  // ahead. The blocks follow each other in a path, the first of them behind none or behind one that
  // is cached; otherwise, and behind a block that is not known or finds no room, nothing is stored.
  // Only with kLeavesFirst.
  Outcome Admit(absl::Time now, absl::Span<const BlockKey> path);

  // Victims of the last call, in the order in which they went. They are known still, unless the
  // history is full.
  absl::Span<const BlockKey> victims() const { return victims_; }
  // kNoBlock: not known.
  BlockHandle HandleOf(BlockKey key) const;
  // Of a known block; none if it is the first of its paths.
  std::optional<BlockKey> ParentOf(BlockHandle block) const;
  // Of a known block: how many stand before it in its paths.
  size_t PositionOf(BlockHandle block) const { return blocks_[block.value()].position; }

  size_t capacity() const { return options_.capacity; }
  size_t cached() const { return cached_; }
  size_t known() const { return handles_.size(); }
  bool IsCached(BlockKey key) const;
  const EvictionPolicy& policy() const { return *policy_; }
  EvictionPolicy& policy() { return *policy_; }

 private:
  struct Block {
    BlockKey key;
    BlockHandle parent = kNoBlock;
    // Cached children, and running requests whose stored path ends here.
    uint32_t holds = 0;
    uint32_t position = 0;
    bool cached = false;
    bool used = false;  // since it was stored
  };
  struct Running {
    BlockHandle tail = kNoBlock;  // last stored block of the path
    bool whole = true;            // all of it is stored
    std::vector<BlockKey> rest;   // what is to be stored at the end
    size_t announced = 0;         // so many of it the policy has been told of
  };

  Block& At(BlockHandle handle) { return blocks_[handle.value()]; }
  BlockHandle Allocate(BlockKey key, BlockHandle parent);
  // The rest of path_ as far as there is room; the first as kPlain, the second as kLeavesFirst.
  void StoreEach(const RequestInfo& request, Outcome& outcome);
  Running StorePrefix(const RequestInfo& request, Outcome& outcome);
  // Sets path_ to what is to be stored at the end, as far as it was not forgotten.
  void NameRest(RequestId request, const Running& running);
  void StoreRest(RequestId request, absl::Time now, Running& running, Outcome& outcome);
  // The running request's use moves on from its tail to `block`, which is cached.
  void MoveTail(Running& running, BlockHandle block);
  // Makes room and caches; false if the policy names no victim.
  bool Store(RequestId request, absl::Time now, BlockHandle handle, Outcome& outcome);
  void Evict(BlockHandle handle, Outcome& outcome);
  void Hold(BlockHandle handle);
  void Unhold(BlockHandle handle);
  void ForgetOldest();

  const BlockCacheOptions options_;
  const std::unique_ptr<EvictionPolicy> policy_;
  std::vector<Block> blocks_;  // by handle
  std::vector<BlockHandle> free_;
  absl::flat_hash_map<BlockKey, BlockHandle> handles_;
  absl::flat_hash_map<RequestId, Running> running_;
  std::vector<BlockHandle> path_;  // of the request in Begin
  std::vector<BlockKey> victims_;
  size_t cached_ = 0;
  // Known blocks that are not cached. A block's known children are all older than it, so the oldest
  // has none and may be forgotten (kLeavesFirst).
  BlockList history_;
};

}  // namespace palimpsest::cache

#endif  // PALIMPSEST_BROKER_CORE_CACHE_BLOCK_CACHE_H_
