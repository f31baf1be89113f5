// A list of blocks from the oldest to the newest; each is in it once at most. O(1) a call, but for
// growth by handle. Threads: none.
#ifndef PALIMPSEST_BROKER_CORE_CACHE_BLOCK_LIST_H_
#define PALIMPSEST_BROKER_CORE_CACHE_BLOCK_LIST_H_

#include <cassert>
#include <cstddef>
#include <vector>

#include "broker/core/cache/eviction_policy.h"

namespace palimpsest::cache {

class BlockList {
 public:
  size_t size() const { return size_; }
  BlockHandle oldest() const { return oldest_; }  // kNoBlock: empty

  bool Contains(BlockHandle block) const {
    return block == oldest_ || (block.value() < links_.size() && At(block).older != kNoBlock);
  }

  // As the newest, wherever it was before.
  void Push(BlockHandle block) {
    assert(block != kNoBlock);
    if (block.value() >= links_.size()) links_.resize(block.value() + size_t{1});
    Remove(block);
    At(block).older = newest_;
    (newest_ == kNoBlock ? oldest_ : At(newest_).newer) = block;
    newest_ = block;
    ++size_;
  }

  // Nothing if it is not in the list.
  void Remove(BlockHandle block) {
    if (!Contains(block)) return;
    const Link link = At(block);
    (link.older == kNoBlock ? oldest_ : At(link.older).newer) = link.newer;
    (link.newer == kNoBlock ? newest_ : At(link.newer).older) = link.older;
    At(block) = {};
    --size_;
  }

 private:
  struct Link {
    BlockHandle older = kNoBlock;
    BlockHandle newer = kNoBlock;
  };

  Link& At(BlockHandle block) { return links_[block.value()]; }
  const Link& At(BlockHandle block) const { return links_[block.value()]; }

  std::vector<Link> links_;  // by handle
  BlockHandle oldest_ = kNoBlock;
  BlockHandle newest_ = kNoBlock;
  size_t size_ = 0;
};

}  // namespace palimpsest::cache

#endif  // PALIMPSEST_BROKER_CORE_CACHE_BLOCK_LIST_H_
