// Carries out what the block directory decides about bytes: makes and retires chunks of T1, and
// moves blocks between T1 and the tiers below, through staging memory.
//
// Queue calls never block and may be made under the caller's lock; stores into a tier and its
// purges reach the tier's store in the order in which they were queued. How many moves there are is
// bounded by the directory. Every result is told to the listener once, on a thread of the mover or
// of a store, without locks; after Stop none is.
//
// Threads: thread-safe.
#ifndef PALIMPSEST_BROKER_BLOCKS_BLOCK_MOVER_H_
#define PALIMPSEST_BROKER_BLOCKS_BLOCK_MOVER_H_

#include <atomic>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "broker/blocks/staging_pool.h"
#include "broker/core/blocks/block_actions.h"
#include "broker/tier/dram_arena.h"
#include "broker/tier/tier_store.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/task_queue.h"

namespace palimpsest {

class BlockMover {
 public:
  // As the functions of BlockDirectory with these names.
  class Listener {
   public:
    virtual ~Listener() = default;
    virtual void OnChunkMade(ArenaChunkId chunk, const absl::Status& status) = 0;
    virtual void OnChunkRetired(ArenaChunkId chunk) = 0;
    virtual void OnLoaded(blocks::TransferId transfer, const absl::Status& status) = 0;
    virtual void OnStoreDone(blocks::TransferId transfer, const absl::Status& status) = 0;
    virtual void OnPurged(blocks::PurgeId purge, const absl::Status& status) = 0;
  };

  struct Options {
    // That begin moves, and as many that end them.
    int threads = 2;
    // For a purge of one tier; after that it is tried again.
    absl::Duration purge_deadline = absl::Seconds(30);
  };

  // All outlive it. `stores`: the tiers below T1, from the top.
  struct Parts {
    const Clock& clock;
    DramArena& arena;
    StagingPool& staging;
    std::vector<TierStore*> stores;
    Listener& listener;
  };

  BlockMover(const Options& options, Parts parts);
  ~BlockMover() { Stop(); }
  BlockMover(const BlockMover&) = delete;
  BlockMover& operator=(const BlockMover&) = delete;

  void Queue(const blocks::MakeChunk& make);
  void Queue(const blocks::RetireChunk& retire);
  void Queue(const blocks::LoadBlock& load);
  void Queue(const blocks::StoreBlock& store);
  void Queue(const blocks::RemoveBlock& remove);
  // Of the tenant with that name.
  void Queue(const blocks::PurgeTier& purge, const std::string& tenant);

  // Joins the threads and drops what waits. Completions that stores report later are ignored.
  // Idempotent.
  void Stop();

 private:
  // What stores report may come after the mover is gone.
  struct Shared {
    Mutex mu;
    BlockMover* mover ABSL_GUARDED_BY(mu) = nullptr;
  };
  struct Tier {
    explicit Tier(TierStore* of) : store(of) {}
    TierStore* const store;
    Mutex mu;
    // Purges queued so far, by tenant: a store that was queued before one and has not reached the
    // tier's store when it does is given up.
    std::map<std::string, uint64_t> purges ABSL_GUARDED_BY(mu);
  };
  // A store and the purges before it.
  struct Storing {
    blocks::StoreBlock block;
    uint64_t purges = 0;
  };

  Tier& At(blocks::TierIndex tier) { return *tiers_[tier.value() - 1]; }
  absl::Duration Patience(absl::Time deadline) const;
  void Load(const blocks::LoadBlock& load);
  // It is in the buffer.
  void Arrive(const blocks::LoadBlock& load, const PinnedBytes<std::byte>& from);
  void Store(const Storing& storing);
  void HandOver(const Storing& storing, PinnedBytes<std::byte> from);
  void Purge(const blocks::PurgeTier& purge, const std::string& tenant);
  // A completion that runs `then` on a thread of ending_, if the mover is still there.
  TierStore::Done Then(absl::AnyInvocable<void(BlockMover&, absl::Status)> then);

  const Options options_;
  const Parts parts_;
  std::vector<std::unique_ptr<Tier>> tiers_;
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
  TaskQueue chunks_{1};
  TaskQueue beginning_;
  TaskQueue ending_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_BLOCK_MOVER_H_
