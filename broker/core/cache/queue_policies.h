// The policies that keep cached blocks in several queues: ARC, S3-FIFO and W-TinyLFU, with their
// papers' parameters. Sources and formulas: docs/policies.md.
//
// The papers know no blocks that must stay. Here a block that is not evictable counts in the size
// of its queue but is passed over, as if it were not there, when the oldest of a queue is looked
// for. Under Discipline::kPlain nothing is passed over.
//
// What they know of blocks that are not cached ends at the papers' limits, or with OnForget.
// Complexity and threads: EvictionPolicy's.
#ifndef PALIMPSEST_BROKER_CORE_CACHE_QUEUE_POLICIES_H_
#define PALIMPSEST_BROKER_CORE_CACHE_QUEUE_POLICIES_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "broker/core/cache/block_list.h"
#include "broker/core/cache/eviction_policy.h"
#include "broker/core/cache/indexed_heap.h"

namespace palimpsest::cache {

// Which queue each cached block is in, and its age there.
class QueuePolicy : public EvictionPolicy {
 public:
  void OnRequest(const RequestInfo& request, const Access& access) final;
  void OnEvictable(BlockHandle block) final;
  void OnPinned(BlockHandle block) final;

 protected:
  static constexpr size_t kQueues = 3;
  static constexpr uint8_t kNotCached = kQueues;

  // A block of a request's path, cached or not.
  virtual void OnUse(BlockHandle block) = 0;

  uint8_t QueueOf(BlockHandle block) const;
  size_t SizeOf(uint8_t queue) const { return queues_[queue].size; }
  // The evictable block that has been in the queue for longest.
  std::optional<BlockHandle> Oldest(uint8_t queue) const;
  // The oldest of the first queue that has one.
  std::optional<BlockHandle> OldestOf(uint8_t first, uint8_t second) const;
  // Makes it the newest there; kNotCached takes it out of its queue.
  void Move(BlockHandle block, uint8_t queue);

 private:
  struct Queue {
    size_t size = 0;
    IndexedHeap<uint64_t> evictable;  // by the number of the move that brought it
  };
  struct State {
    uint64_t moved = 0;
    uint8_t queue = kNotCached;
    bool evictable = false;
  };

  std::vector<State> states_;  // by handle
  std::array<Queue, kQueues> queues_;
  uint64_t clock_ = 0;
};

// Adapts the share of blocks used once by hits among those evicted lately.
class ArcPolicy : public QueuePolicy {
 public:
  explicit ArcPolicy(size_t capacity) : capacity_(capacity) {}

  absl::string_view name() const override { return "arc"; }
  void OnInsert(RequestId request, BlockHandle block, BlockHandle parent) override;
  std::optional<BlockHandle> ChooseVictim(absl::Time now, BlockHandle block,
                                          bool may_refuse) override;
  void OnEvict(BlockHandle block) override;
  void OnForget(BlockHandle block) override;

 protected:
  void OnUse(BlockHandle block) override;

 private:
  static constexpr uint8_t kOnce = 0, kOften = 1;  // T1, T2

  const size_t capacity_;
  double target_ = 0;                       // p: of the size of T1
  BlockList once_evicted_, often_evicted_;  // B1, B2
};

// A small queue from which blocks that are not used again leave soon, before a main one with second
// chances.
class S3FifoPolicy : public QueuePolicy {
 public:
  explicit S3FifoPolicy(size_t capacity);

  absl::string_view name() const override { return "s3fifo"; }
  void OnInsert(RequestId request, BlockHandle block, BlockHandle parent) override;
  std::optional<BlockHandle> ChooseVictim(absl::Time now, BlockHandle block,
                                          bool may_refuse) override;
  void OnEvict(BlockHandle block) override;
  void OnForget(BlockHandle block) override { evicted_.Remove(block); }

 protected:
  void OnUse(BlockHandle block) override;

 private:
  static constexpr uint8_t kSmall = 0, kMain = 1;
  static constexpr uint8_t kMostUses = 3;

  // The oldest that gets no second chance; those that do move.
  std::optional<BlockHandle> FromSmall();
  std::optional<BlockHandle> FromMain();

  const size_t small_limit_;
  const size_t evicted_limit_;
  std::vector<uint8_t> uses_;  // by handle
  BlockList evicted_;          // G
};

// A window of new blocks before a segmented LRU that they enter only if they were requested more
// often than what they displace.
class TinyLfuPolicy : public QueuePolicy {
 public:
  explicit TinyLfuPolicy(size_t capacity);

  absl::string_view name() const override { return "tinylfu"; }
  void OnInsert(RequestId request, BlockHandle block, BlockHandle parent) override;
  std::optional<BlockHandle> ChooseVictim(absl::Time now, BlockHandle block,
                                          bool may_refuse) override;
  void OnEvict(BlockHandle block) override { Move(block, kNotCached); }
  void OnForget(BlockHandle block) override;

 protected:
  void OnUse(BlockHandle block) override;

 private:
  static constexpr uint8_t kWindow = 0, kProbation = 1, kProtected = 2;
  static constexpr uint32_t kMostUses = 15;
  // Exact where the paper has a sketch: handles are as good as its hashes.
  struct Count {
    uint32_t uses = 0;
    uint32_t halvings = 0;  // as of which `uses` is
  };

  uint32_t Uses(BlockHandle block) const;

  const size_t window_limit_;
  const size_t protected_limit_;
  const size_t sample_;  // uses after which all counts are halved
  size_t used_ = 0;
  uint32_t halvings_ = 0;
  std::vector<Count> counts_;  // by handle
};

}  // namespace palimpsest::cache

#endif  // PALIMPSEST_BROKER_CORE_CACHE_QUEUE_POLICIES_H_
