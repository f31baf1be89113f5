#include "worker/core/prefix_cache.h"

#include "worker/core/check.h"

namespace palimpsest {

PrefixCache::Node* PrefixCache::Find(const Node* parent, const BlockKey& key,
                                     absl::Span<const TokenId> tokens) const {
  const auto found = nodes_.find(key);
  if (found == nodes_.end()) return nullptr;
  Node* const node = found->second.get();
  return node->parent_ == parent && node->tokens_ == tokens ? node : nullptr;
}

PrefixCache::Node* PrefixCache::FindOrAdd(Node* parent, const BlockKey& key,
                                          absl::Span<const TokenId> tokens) {
  std::unique_ptr<Node>& slot = nodes_[key];
  if (slot == nullptr) {
    slot = std::make_unique<Node>();
    slot->key_ = key;
    slot->parent_ = parent;
    slot->tokens_.assign(tokens.begin(), tokens.end());
    if (parent != nullptr) ++parent->uses_;
    return slot.get();
  }
  return slot->parent_ == parent && slot->tokens_ == tokens ? slot.get() : nullptr;
}

void PrefixCache::Unpin(Node* node) {
  PALIMPSEST_CHECK(node->uses_ > 0);
  --node->uses_;
  Collect(node);
}

void PrefixCache::SetBlock(Node* node, BlockId block) {
  PALIMPSEST_CHECK(node->block_ == kNullBlock && block != kNullBlock);
  node->block_ = block;
}

void PrefixCache::ClearBlock(Node* node) {
  node->block_ = kNullBlock;
  Collect(node);
}

void PrefixCache::Collect(Node* node) {
  while (node != nullptr && node->uses_ == 0 && node->block_ == kNullBlock) {
    Node* const parent = node->parent_;
    const BlockKey key = node->key_;
    nodes_.erase(key);
    if (parent != nullptr) --parent->uses_;
    node = parent;
  }
}

void PrefixCache::CheckInvariants() const {
  absl::flat_hash_map<const Node*, int32_t> children;
  for (const auto& [key, node] : nodes_) {
    PALIMPSEST_CHECK(node->key_ == key);
    PALIMPSEST_CHECK(node->uses_ > 0 || node->block_ != kNullBlock);
    if (node->parent_ == nullptr) continue;
    const auto parent = nodes_.find(node->parent_->key_);
    PALIMPSEST_CHECK(parent != nodes_.end() && parent->second.get() == node->parent_);
    ++children[node->parent_];
  }
  for (const auto& [node, count] : children) PALIMPSEST_CHECK(node->uses_ >= count);
}

}  // namespace palimpsest
