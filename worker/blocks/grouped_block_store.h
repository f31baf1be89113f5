// A block store whose blocks lie in another one in parts, one for each group of KV heads (DESIGN:
// tiering by head). Parts of one group form chains of their own, so that they move between tiers by
// themselves: when a request ends and more of them lie in tier 1 than are to, those that are worth
// least are sent below (tier_one_parts.h). Lossless: a block is given back when all its parts are
// there, and otherwise it is not.
//
// Places that the scheduler sees are in a staging area of this process, bounded; blocks are taken
// apart into the inner store's places, and put together from them, by a thread of this object
// (Start), loads first. Each part has a key and a checksum of its own and is checked when it is
// taken; the block's checksum is that of the whole.
//
// Not with sliding windows. Ownership: the inner store outlives this object, and is used by it
// alone.
// Threads: as kv_store.h, but for CopyOne, which is called on one thread, any: the one that
// Start starts, or a test's.
#ifndef PALIMPSEST_WORKER_BLOCKS_GROUPED_BLOCK_STORE_H_
#define PALIMPSEST_WORKER_BLOCKS_GROUPED_BLOCK_STORE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "common/bytes.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "worker/core/conversation_hints.h"
#include "worker/core/head_mass.h"
#include "worker/core/head_parts.h"
#include "worker/core/kv_store.h"
#include "worker/core/tier_one_parts.h"

namespace palimpsest {

class GroupedBlockStore final : public KvStore, public ConversationHints {
 public:
  struct Options {
    int32_t staging_blocks = 0;
  };

  // Which parts are to lie in tier 1. All functions are called on the engine's thread.
  struct TierOne {
    std::unique_ptr<TierOneParts> parts;  // null: the inner store alone decides
    const Clock* clock = nullptr;
    // What was sampled so far; null: nothing.
    std::function<const HeadMass*()> masses;
    // The inner store's blocks of the chain, from `first` on, are to go below tier 1; those that
    // somebody uses or that are not there stay as they are. What was committed before is there.
    std::function<void(const BlockChain& chain, int32_t first)> demote;
  };

  // Of parts, since the start.
  struct Counters {
    int64_t stored = 0;
    int64_t loaded = 0;
    int64_t corrupt = 0;  // did not have their checksums
  };

  // `inner` has blocks of parts.part_bytes(); `hints` goes with it, null: none are given.
  GroupedBlockStore(const Options& options, HeadParts parts, KvStore* inner,
                    ConversationHints* hints, TierOne tier_one);
  // Stops.
  ~GroupedBlockStore() override;

  void Start();
  // Copies that wait are not made; idempotent.
  void Stop();
  // One block's copy or what else is next; false if nothing is to be done.
  bool CopyOne();

  Counters counters() const;
  // Of the staging area, in use; as kv_store.h.
  int32_t staged_blocks() const {
    return options_.staging_blocks - static_cast<int32_t>(free_slots_.size());
  }

  bool available() const override { return inner_->available(); }
  double answer_seconds() const override { return inner_->answer_seconds(); }
  void Reserve(StoreCallId call, uint64_t request, BlockChain chain) override;
  void Commit(std::vector<WrittenBlock> blocks) override;
  void Abort(std::vector<WrittenBlock> blocks) override;
  void Acquire(StoreCallId call, StoreQuery query) override;
  void Release(std::vector<StorePlace> places) override;
  void EndRequest(const StoreRequestEnd& end) override;
  void SetRecompute(double first_seconds, double per_position_seconds) override;
  std::vector<StoreEvent> TakeEvents() override;
  void SetWakeup(std::function<void()> wakeup) override;
  // Of all parts together. Thread-safe.
  void Hint(uint64_t conversation, const CacheAction& action,
            std::function<void(absl::StatusOr<uint64_t>)> done) override;

 private:
  // What the groups have answered to a call; absent: not yet.
  struct ReserveCall {
    StoreCallId call;
    std::vector<BlockKey> keys;
    std::vector<std::optional<ReserveAnswer>> answers;
  };
  struct AcquireCall {
    StoreCallId call;
    std::vector<BlockKey> keys;  // behind the held blocks
    int32_t held = 0;
    std::vector<std::optional<AcquireAnswer>> answers;
  };
  // Which call and group an inner call is.
  struct Inner {
    uint64_t number = 0;
    size_t group = 0;
  };

  struct Part {
    int32_t group = 0;
    StorePlace place;
    uint64_t checksum = 0;  // loads: as it must be; stores: as it is
  };
  // A block in the staging area.
  struct Staged {
    size_t slot = 0;
    BlockKey key;
    std::vector<Part> parts;  // to be stored, or taken
  };
  // Something that is done in order. A load has an answer; the end of a request has no blocks.
  struct Job {
    std::vector<Staged> blocks;
    std::optional<AcquireAnswer> load;
    std::optional<StoreRequestEnd> end;
  };

  uint64_t RequestOf(uint64_t request, size_t group) const;
  BlockChain ChainOf(const BlockChain& chain, int32_t group) const;
  size_t groups() const { return static_cast<size_t>(parts_.count()); }
  std::byte* At(size_t slot) {
    return staging_.get() + slot * static_cast<size_t>(parts_.block_bytes().count());
  }

  void OnInner(ReserveAnswer answer);
  void OnInner(AcquireAnswer answer);
  void OnInner(PlacesWanted) {}  // places of the inner store are held for copies alone
  void OnInner(StoreLost event);
  void FinishReserve(ReserveCall call);
  ReservedBlock ReserveOne(const ReserveCall& call, size_t index);
  void NoteTierOne(const AcquireCall& call);
  void FinishAcquire(AcquireCall call);
  void FinishRequest(const StoreRequestEnd& ended);
  void Finish(Job job);
  std::optional<size_t> TakeSlot();
  void AbortParts(const std::vector<Staged>& blocks);
  void Push(Job job) ABSL_LOCKS_EXCLUDED(mu_);

  // By the copying thread, without the lock. False: a part is not what it must be.
  void TakeApart(Staged& block);
  bool PutTogether(const Staged& block, std::byte* scratch);

  const Options options_;
  const HeadParts parts_;
  KvStore* const inner_;
  ConversationHints* const hints_;
  const TierOne tier_one_;
  const std::unique_ptr<std::byte[]> staging_;

  // Of the engine's thread.
  uint64_t next_inner_call_ = 1;
  uint64_t next_call_ = 1;
  absl::flat_hash_map<StoreCallId, Inner> inner_calls_;
  absl::flat_hash_map<uint64_t, ReserveCall> reserves_;
  absl::flat_hash_map<uint64_t, AcquireCall> acquires_;
  std::vector<size_t> free_slots_;
  absl::flat_hash_map<uint64_t, Staged> staged_;  // by StorePlace.id: given to the scheduler
  uint64_t next_place_ = 1;
  std::vector<StoreEvent> events_;

  mutable Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  std::deque<Job> loads_ ABSL_GUARDED_BY(mu_);
  std::deque<Job> stores_ ABSL_GUARDED_BY(mu_);  // and ends of requests
  std::vector<Job> done_ ABSL_GUARDED_BY(mu_);
  Counters counters_ ABSL_GUARDED_BY(mu_);
  std::function<void()> wakeup_ ABSL_GUARDED_BY(mu_);
  bool waking_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_BLOCKS_GROUPED_BLOCK_STORE_H_
