// The tree of token prefixes whose KV blocks may be shared. A node stands for one full block: the
// path from the root to it spells every token before and in the block. Nodes find each other by a
// 128-bit key over the parent's key and the tokens; the tokens and the parent are compared as well,
// so two prefixes with equal keys are a miss, never a wrong hit.
//
// A node may have no block: it then only connects the nodes below it, and gets a block again when
// somebody computes that prefix anew. A node exists while it has a block, a child or a pin.
//
// Ownership: the cache owns its nodes. Not thread-safe. Does not block.
#ifndef PALIMPSEST_WORKER_CORE_PREFIX_CACHE_H_
#define PALIMPSEST_WORKER_CORE_PREFIX_CACHE_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "common/block_key.h"
#include "common/ids.h"
#include "worker/core/kv_geometry.h"

namespace palimpsest {

class PrefixCache {
 public:
  class Node {
   public:
    const BlockKey& key() const { return key_; }
    Node* parent() const { return parent_; }
    absl::Span<const TokenId> tokens() const { return tokens_; }
    // The null block if the KV is not there.
    BlockId block() const { return block_; }
    // For who offers blocks to a block store (offloader.h).
    uint32_t offered() const { return offered_; }
    void set_offered(uint32_t era) { offered_ = era; }

   private:
    friend class PrefixCache;
    BlockKey key_;
    Node* parent_ = nullptr;
    std::vector<TokenId> tokens_;
    BlockId block_;
    int32_t uses_ = 0;  // children and pins
    uint32_t offered_ = 0;
  };

  // The child of `parent` (null: of the root) with this key, or null if there is none or another
  // prefix has the key.
  Node* Find(const Node* parent, const BlockKey& key, absl::Span<const TokenId> tokens) const;

  // As Find, but makes the node if the key is not in use. The node comes without a block and
  // without a pin; it must be given one of them before the next call. Null if another prefix has
  // the key.
  Node* FindOrAdd(Node* parent, const BlockKey& key, absl::Span<const TokenId> tokens);

  void Pin(Node* node) { ++node->uses_; }
  // Deletes the node, and then its ancestors, as far as nothing needs them any more.
  void Unpin(Node* node);

  // Requires a node without a block.
  void SetBlock(Node* node, BlockId block);
  // The node's KV is gone; may delete the node as Unpin does.
  void ClearBlock(Node* node);
  // The node's KV was copied to `block`.
  void MoveBlock(Node* node, BlockId block) { node->block_ = block; }

  size_t size() const { return nodes_.size(); }

  // Aborts unless every node is needed and linked to its parent.
  void CheckInvariants() const;

 private:
  void Collect(Node* node);

  absl::flat_hash_map<BlockKey, std::unique_ptr<Node>> nodes_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_PREFIX_CACHE_H_
