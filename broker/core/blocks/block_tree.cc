#include "broker/core/blocks/block_tree.h"

#include <algorithm>
#include <cassert>

namespace palimpsest::blocks {

BlockHandle BlockTree::Find(const BlockKey& key) const {
  const auto found = handles_.find(key);
  return found == handles_.end() ? kNoBlock : found->second;
}

BlockHandle BlockTree::Add(const BlockKey& key, BlockHandle parent) {
  if (free_.empty()) {
    free_.push_back(BlockHandle(static_cast<uint32_t>(nodes_.size())));
    nodes_.emplace_back();
  }
  const BlockHandle block = free_.back();
  free_.pop_back();
  const bool added = handles_.emplace(key, block).second;
  assert(added);
  static_cast<void>(added);
  At(block) = {.key = key, .known = true};
  history_.Push(block);
  if (parent != kNoBlock) Attach(block, parent);
  return block;
}

void BlockTree::Attach(BlockHandle block, BlockHandle parent) {
  Node& node = At(block);
  assert(node.parent == kNoBlock && parent != block);
  Node& above = At(parent);
  node.parent = parent;
  node.position = above.position + 1;
  node.next = above.first_child;
  if (node.next != kNoBlock) At(node.next).previous = block;
  above.first_child = block;
  history_.Remove(parent);
}

void BlockTree::Detach(BlockHandle block) {
  Node& node = At(block);
  if (node.parent == kNoBlock) return;
  Node& above = At(node.parent);
  (node.previous == kNoBlock ? above.first_child : At(node.previous).next) = node.next;
  if (node.next != kNoBlock) At(node.next).previous = node.previous;
  if (IsHistory(above)) history_.Push(node.parent);
}

std::vector<BlockHandle> BlockTree::PathTo(BlockHandle block) const {
  std::vector<BlockHandle> path;
  for (; block != kNoBlock; block = parent(block)) path.push_back(block);
  std::reverse(path.begin(), path.end());
  return path;
}

void BlockTree::Retain(BlockHandle block) {
  if (At(block).retained++ > 0) return;
  ++retained_;
  history_.Remove(block);
}

void BlockTree::Release(BlockHandle block) {
  Node& node = At(block);
  assert(node.retained > 0);
  if (--node.retained > 0) return;
  --retained_;
  if (IsHistory(node)) history_.Push(block);
}

void BlockTree::Touch(BlockHandle block) {
  if (IsHistory(At(block))) history_.Push(block);
}

void BlockTree::Trim(absl::FunctionRef<void(BlockHandle)> forget) {
  while (handles_.size() - retained_ > history_limit_ && history_.size() > 0) {
    const BlockHandle block = history_.oldest();
    forget(block);
    history_.Remove(block);
    handles_.erase(At(block).key);
    Detach(block);
    At(block) = {};
    free_.push_back(block);
  }
}

std::vector<BlockHandle> BlockTree::All() const {
  std::vector<BlockHandle> all;
  all.reserve(handles_.size());
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (nodes_[i].known) all.push_back(BlockHandle(static_cast<uint32_t>(i)));
  }
  return all;
}

}  // namespace palimpsest::blocks
