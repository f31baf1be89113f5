// Which KV blocks go down to a block store, and when: write-through, in the background.
//
// Blocks are offered when they are full and their sequence has ended, was preempted, is through
// with its prompt or does not see them any more. They wait in a bounded queue that holds no memory:
// a block that the prefix cache evicts before its turn is dropped, the least recently used one
// first, and so is the oldest when the queue is full. A batch of consecutive blocks is reserved at
// a time; what the store has already needs no copy. A block is referenced only while it is copied,
// and so many are copied at once.
//
//   queued -> reserving -> copying -> stored
//     ^  \________|  \_________\_____-> forgotten (evicted, refused, failed)
//     |           v
//     '-------- no room
//
// What is forgotten may be offered again, which a sequence does that comes to use it. Blocks for
// which there was no room wait until an answer says that there is some, and go back into the queue
// then, a few times. A stored block is not offered again in the same era, which ends when the store
// is lost, unless the store says that it has lost that block.
//
// Not thread-safe. Does not block.
#ifndef PALIMPSEST_WORKER_CORE_OFFLOADER_H_
#define PALIMPSEST_WORKER_CORE_OFFLOADER_H_

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "common/block_key.h"
#include "worker/core/block_manager.h"
#include "worker/core/kv_store.h"
#include "worker/core/prefix_cache.h"
#include "worker/core/swap_copier.h"

namespace palimpsest {

class Offloader {
 public:
  struct Limits {
    int32_t queued_blocks = 16384;
    int32_t batch_blocks = 64;
    int32_t copying_blocks = 64;
    // How often a block is offered for which there is no room.
    int32_t tries = 3;
    // A block is of use although the store lacks one before it: it may lie left of the window.
    bool windowed = false;
  };

  struct Counters {
    int64_t stored = 0;   // blocks copied and committed
    int64_t present = 0;  // the store had them
    int64_t refused = 0;  // by the store
    int64_t dropped = 0;  // before their turn
    int64_t failed = 0;   // calls and copies
    int64_t retried = 0;  // offered again when there was room
    int64_t lost = 0;     // offered again because the store had lost them
  };

  // All must outlive it. `root`: the key before a sequence's first block.
  Offloader(BlockManager* blocks, KvStore* store, const BlockKey& root, const Limits& limits);

  // The blocks of this chain that have not been offered, from its first to `last`, which is pinned.
  // `request`: whose they are.
  void Offer(PrefixCache::Node* last, uint64_t request);
  // The store has lost those of the `count` blocks that end with `last`, which is pinned, that it
  // had: they are offered again.
  void OfferLost(PrefixCache::Node* last, int32_t count, uint64_t request);

  // Reserves the next batch if there is a place for it; `call` is that call's.
  bool Pump(StoreCallId call);

  // Whether the answer is for this object.
  bool Awaits(StoreCallId call) const { return batch_.has_value() && batch_->call == call; }
  // What is to be copied by a transfer with this id, unless it is nothing: the blocks are
  // referenced until OnCopied.
  std::vector<SwapMove> OnReserved(const ReserveAnswer& answer, SwapId transfer);
  void OnCopied(const SwapEnded& ended);

  // Blocks that were offered for this request have not come to an end yet.
  bool Busy(uint64_t request) const { return open_.contains(request); }

  // Nothing counts as stored any more.
  void ForgetStored();

  // Blocks that nothing but copies holds.
  int32_t held_blocks() const;
  const Counters& counters() const { return counters_; }

 private:
  struct Entry {
    PrefixCache::Node* node;  // pinned
    uint64_t request;
    int32_t tries = 0;
  };
  struct Batch {
    StoreCallId call;
    uint32_t era = 0;
    uint64_t request = 0;
    std::vector<PrefixCache::Node*> nodes;  // consecutive; pinned
    std::vector<int32_t> tries;             // of each
  };
  struct Copy {
    uint32_t era = 0;
    uint64_t request = 0;
    std::vector<PrefixCache::Node*> nodes;  // pinned
    std::vector<BlockId> held;
    std::vector<WrittenBlock> written;
  };

  // A node's mark is the era in which it was offered, or that plus one once it is stored.
  bool Offered(const PrefixCache::Node* node) const { return Stored(node) || Queued(node); }
  bool Queued(const PrefixCache::Node* node) const { return node->offered() == era_; }
  bool Stored(const PrefixCache::Node* node) const { return node->offered() == era_ + 1; }
  void Enqueue(const std::vector<PrefixCache::Node*>& deepest_first, uint64_t request);
  // Unpins it, and lets it be offered again.
  void Forget(PrefixCache::Node* node, uint32_t era);
  // The store has it; unpins it.
  void Settle(PrefixCache::Node* node, uint32_t era);
  void DropOldest();
  // One of its blocks has come to an end.
  void Close(uint64_t request);
  // There was no room for these and what continues them.
  void Postpone(const Batch& batch, size_t first);
  // There is room: what waits for it goes into the queue.
  void Retry();
  // The next blocks of one chain, as many as may be copied now.
  Batch NextBatch();

  BlockManager* const blocks_;
  KvStore* const store_;
  const BlockKey root_;
  const Limits limits_;
  uint32_t era_ = 1;  // odd
  std::deque<Entry> queue_;
  std::deque<Entry> no_room_;   // parents before their children
  std::optional<Batch> batch_;  // being reserved
  absl::flat_hash_map<SwapId, Copy> copies_;
  int32_t copying_blocks_ = 0;
  absl::flat_hash_map<uint64_t, int32_t> open_;  // blocks on their way, by request
  Counters counters_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_OFFLOADER_H_
