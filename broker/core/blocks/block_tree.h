// The blocks of one tenant that the broker knows, as a tree: each hangs on the block before it in
// its sequence. Who they are and how they hang together, not where they lie.
//
// A block stays known while somebody retains it or a block that hangs on it is known, and then
// while it is among the `history` others that were touched last. Its handle lasts as long.
//
// Complexity: O(1) a call, O(blocks forgotten) for Trim, O(length) for PathTo. Threads: none.
// Broken requirements abort.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_TREE_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_TREE_H_

#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "broker/core/cache/block_list.h"
#include "broker/core/cache/eviction_policy.h"
#include "common/block_key.h"

namespace palimpsest::blocks {

using cache::BlockHandle;
using cache::kNoBlock;

class BlockTree {
 public:
  explicit BlockTree(size_t history) : history_limit_(history) {}

  // kNoBlock: not known.
  BlockHandle Find(const BlockKey& key) const;
  // A key that is not known, behind `parent`; kNoBlock: what is before it is not known, or nothing
  // is. As if touched.
  BlockHandle Add(const BlockKey& key, BlockHandle parent);
  // `block` hangs on nothing: it hangs on `parent` from now on. Requires that this makes no ring.
  void Attach(BlockHandle block, BlockHandle parent);

  void Retain(BlockHandle block);
  void Release(BlockHandle block);
  // The newest of the history, if it is in it.
  void Touch(BlockHandle block);
  // Forgets the oldest of the history beyond the limit; tells of each just before.
  void Trim(absl::FunctionRef<void(BlockHandle)> forget);

  // From the first block that is known to `block`; empty for kNoBlock.
  std::vector<BlockHandle> PathTo(BlockHandle block) const;
  const BlockKey& key(BlockHandle block) const { return At(block).key; }
  BlockHandle parent(BlockHandle block) const { return At(block).parent; }
  BlockHandle first_child(BlockHandle block) const { return At(block).first_child; }
  BlockHandle next_sibling(BlockHandle block) const { return At(block).next; }
  uint32_t retained(BlockHandle block) const { return At(block).retained; }
  // Blocks before it, as far as they are known.
  uint32_t position(BlockHandle block) const { return At(block).position; }
  void SetPosition(BlockHandle block, uint32_t position) { At(block).position = position; }

  size_t size() const { return handles_.size(); }
  // All known blocks, by handle.
  std::vector<BlockHandle> All() const;

 private:
  struct Node {
    BlockKey key;
    BlockHandle parent = kNoBlock;
    BlockHandle first_child = kNoBlock;
    BlockHandle next = kNoBlock, previous = kNoBlock;  // siblings
    uint32_t retained = 0;
    uint32_t position = 0;
    bool known = false;
  };

  Node& At(BlockHandle block) { return nodes_[block.value()]; }
  const Node& At(BlockHandle block) const { return nodes_[block.value()]; }
  bool IsHistory(const Node& node) const {
    return node.retained == 0 && node.first_child == kNoBlock;
  }
  void Detach(BlockHandle block);

  const size_t history_limit_;
  std::vector<Node> nodes_;  // by handle
  std::vector<BlockHandle> free_;
  absl::flat_hash_map<BlockKey, BlockHandle> handles_;
  size_t retained_ = 0;       // nodes
  cache::BlockList history_;  // those that nobody retains and on which nothing hangs
};

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_TREE_H_
