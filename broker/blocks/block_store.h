// The block store of a node: the block directory behind a lock, with what carries out its
// decisions: the chunks of T1 (DramArena), the stores of the tiers below, the blocks on their way
// (BlockMover), and the sessions that hear of chunks to unmap.
//
// Locking: one lock guards the directory and the sessions. Every event is decided under it; what
// follows is queued under it, in the directory's order, or done after it was released, on the
// thread that caused it. What it led to comes back as the next event.
//
// Threads: all methods are thread-safe. None blocks but Open, Stop, Purge and CheckTiers. Callbacks
// are called without locks. Legal order: Open, anything, Stop.
#ifndef PALIMPSEST_BROKER_BLOCKS_BLOCK_STORE_H_
#define PALIMPSEST_BROKER_BLOCKS_BLOCK_STORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/blocks/block_mover.h"
#include "broker/blocks/open_tier.h"
#include "broker/blocks/staging_pool.h"
#include "broker/blocks/tier_check.h"
#include "broker/blocks/tiers_config.h"
#include "broker/core/blocks/block_directory.h"
#include "broker/server/block_sessions.h"
#include "broker/server/hand_over.h"
#include "broker/tier/dram_arena.h"
#include "broker/tier/tier_store.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/random.h"

namespace palimpsest {

// Hears that there are new events. Called without locks, on any thread; must not block.
class BlockEventListener {
 public:
  virtual ~BlockEventListener() = default;
  // Also when the store has stopped.
  virtual void OnBlockEvents() = 0;
};

class BlockStore : public BlockSessions, private BlockMover::Listener {
 public:
  struct Tenant {
    std::string name;
    // Of T1, then of the tiers below it (ShareBudgets).
    std::vector<Bytes> budgets;
    // Of its model, on all ranks together.
    Bytes block_bytes;
  };
  struct Options {
    TiersConfig tiers;
    std::vector<Tenant> tenants;  // by TenantId
    // How long the descriptors of chunks can be fetched.
    absl::Duration token_lifetime = absl::Seconds(30);
    // After the machine had no memory for a chunk none is made for so long.
    absl::Duration memory_back_off = absl::Seconds(10);
    // Makes the memory of chunks; DramArena's own by default.
    DramArena::Maker chunk_maker;
    // Null outside of tests.
    TierWrapper tier_wrapper;
    // Events that are remembered.
    size_t events = size_t{1} << 16;
  };

  static constexpr size_t kTokenBytes = 16;

  // Opens every tier and learns what earlier processes left in them. `clock` and `hand_overs`
  // outlive it. Errors say which tier, or what does not fit.
  static absl::StatusOr<std::unique_ptr<BlockStore>> Open(Options options, const Clock& clock,
                                                          HandOverTable& hand_overs);
  // Closes the tiers.
  ~BlockStore() override;

  // Answers all who wait, and whoever asks later, with Unavailable; moves nothing any more.
  // Idempotent.
  void Stop();

  // BlockSessions:
  std::string Attached(const Session& session) override;
  void ChunksUnmapped(SessionId session, const SessionStream& stream,
                      absl::Span<const uint32_t> chunks) override;
  void Ended(SessionId session) override;
  void FillStatus(v1::GetStatusResponse& status) override;

  // What workers ask. One attachment of a session; void, with Unauthenticated, as soon as the
  // session ended or attached again.
  struct Caller {
    SessionId session;
    std::string tenant;  // its name, as in BlockIdentity
    std::string token;
  };
  absl::StatusOr<Caller> Identify(SessionId session, absl::string_view token);

  // As BlockDirectory.
  absl::StatusOr<std::vector<blocks::Reserved>> Reserve(
      const Caller& caller, uint64_t request, absl::Span<const ArenaLedger::Wanted> wanted);
  absl::Status Commit(const Caller& caller, absl::Span<const ArenaLedger::Committed> blocks);
  absl::Status Abort(const Caller& caller, absl::Span<const BlockKey> keys);
  absl::Status Release(const Caller& caller, uint64_t request,
                       absl::Span<const ArenaExtent> extents);
  absl::Status EndRequest(const Caller& caller, const blocks::RequestEnding& ending);
  absl::StatusOr<size_t> Hint(const Caller& caller, const blocks::BlockHint& hint);
  // What times of hints count from.
  absl::Time Now() const { return clock_.Now(); }
  absl::Status SetRecompute(const Caller& caller, const blocks::RecomputeCost& cost);

  struct ChunkOffer {
    Token token;
    absl::Duration lifetime;
    Bytes chunk_bytes;
  };
  // Offers the chunks' descriptors to the caller's descriptor connection.
  absl::StatusOr<ChunkOffer> MapChunks(const Caller& caller, absl::Span<const uint32_t> chunks);

  // `done` is called once, from within or later. `request.deadline` is not looked at: `wait` from
  // now. The id of one that waits is for CancelWait.
  using AcquireDone = absl::AnyInvocable<void(absl::StatusOr<blocks::AcquireReply>)>;
  std::optional<blocks::WaitId> Acquire(const Caller& caller, blocks::AcquireRequest request,
                                        absl::Duration wait, AcquireDone done);
  // False if `done` was called or is about to be; otherwise it never is.
  bool CancelWait(const Caller& caller, blocks::WaitId wait);

  // What operators ask. Tiers: T1, then those that are configured, from the top.

  struct Used {
    Bytes limit;
    Bytes used;
  };
  // `tenant`: empty for all of them together. InvalidArgument for more than the configuration gives
  // the tier.
  absl::StatusOr<Used> SetLimit(blocks::TierIndex tier, const std::string& tenant, Bytes limit);
  // `tier`: nothing for all; `tenant`: empty for all. `keep`: of each tenant in each tier.
  absl::StatusOr<blocks::Trimmed> Trim(std::optional<blocks::TierIndex> tier,
                                       const std::string& tenant, Bytes keep);
  // How many blocks were forgotten. DeadlineExceeded if some tier has not purged by then; it goes
  // on.
  absl::StatusOr<uint64_t> Purge(const std::string& tenant, absl::Duration wait);
  struct CheckedTier {
    std::string tier;  // as in the configuration
    std::string name;  // what the tier calls itself
    TierCheck check;
  };
  // A round trip of `blocks` blocks through every tier. InvalidArgument for more than
  // kMostCheckBytes.
  static constexpr Bytes kMostCheckBytes = MiB(32);
  absl::StatusOr<std::vector<CheckedTier>> CheckTiers(Bytes block, uint32_t blocks,
                                                      absl::Duration wait);

  // Events of blocks (block_events.h). Unavailable once stopped.

  static constexpr size_t kMostListeners = 16;
  struct Events {
    uint64_t last = 0;     // number of the last one that there was
    bool complete = true;  // false: some behind `after` are gone, or have not been yet
    std::vector<blocks::BlockEvent> events;
  };
  absl::StatusOr<Events> EventsAfter(uint64_t after, size_t limit);
  // All blocks in all tiers, as of `last`. O(blocks), also in memory.
  absl::StatusOr<Events> EventSnapshot();
  // Numbers of events count from this on: another one for each store.
  uint64_t event_generation() const { return event_generation_; }
  // As long as it lives. ResourceExhausted.
  absl::Status AddListener(std::weak_ptr<BlockEventListener> listener);

  // Blocks of other nodes that are known, in each tier that they share.
  struct Foreign {
    std::string tenant;
    std::string tier;  // as in the configuration
    uint64_t blocks = 0;
  };
  std::vector<Foreign> ForeignBlocks();

  // Of the tier with that name in the configuration; NotFound.
  absl::StatusOr<blocks::TierIndex> FindTier(absl::string_view name) const;
  // Where other nodes find the memory that is lent to them; empty if none is.
  std::string lending_address() const { return lent_ == nullptr ? "" : lent_->address(); }
  // By TierIndex, as in the configuration.
  std::vector<std::string> tier_names() const;
  // By TenantId.
  std::vector<std::string> tenant_names() const;
  // By TenantId: of T1, what clients' hints keep there.
  std::vector<Bytes> RetainedBytes();
  Bytes chunk_bytes() const { return options_.tiers.dram.chunk_bytes; }

  // The directory's recount, and that of each store. For tests.
  absl::Status CheckConsistency();

 private:
  // Hears of one tier's blocks.
  class Observer : public TierStore::Observer {
   public:
    Observer(BlockStore& store, blocks::TierIndex tier) : store_(store), tier_(tier) {}
    void OnStored(const BlockRecord& record) override { store_.OnStored(tier_, record); }
    void OnForeign(const BlockRecord& record) override { store_.OnForeign(tier_, record); }
    void OnRemoved(const BlockRecord& record) override { store_.OnRemoved(tier_, record); }
    void OnFreed(Bytes) override {}

   private:
    BlockStore& store_;
    const blocks::TierIndex tier_;
  };
  struct Known {
    Session session;
    std::string token;
  };
  struct Waiter {
    SessionId session;
    AcquireDone done;
  };
  using Effect = absl::AnyInvocable<void()>;

  BlockStore(Options options, const Clock& clock, HandOverTable& hand_overs);

  absl::Status OpenTiers();
  absl::Status AddTenants();
  // Runs `event` under the lock, then does what it led to. False, with nothing done, once stopped.
  template <typename Event>
  bool Decide(Event event) {
    std::vector<Effect> effects;
    {
      MutexLock lock(&mu_);
      if (stopping_) return false;
      const absl::Time now = clock_.Now();
      if constexpr (std::is_invocable_v<Event, absl::Time, std::vector<Effect>&>) {
        event(now, effects);
      } else {
        event(now);
      }
      Collect(now, effects);
    }
    for (Effect& effect : effects) effect();
    return true;
  }
  // As Decide, for a caller whose attachment stands.
  template <typename Event>
  absl::Status DecideFor(const Caller& caller, Event event);
  absl::Status CheckCaller(const Caller& caller) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Queues what the directory wants of the mover; the rest is for after the lock.
  void Collect(absl::Time now, std::vector<Effect>& effects) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Take(blocks::BlockAction action, std::vector<Effect>& effects)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Effect Answer(blocks::AcquireDone done) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Effect AskToUnmap(const blocks::UnmapChunks& unmap) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Effect KillOverdue(const blocks::SessionOverdue& overdue) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The session's attachment is void.
  void Close(SessionId session, absl::Time now, std::vector<Effect>& effects)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  Effect Announce() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void TickLoop();
  void PollTiers();
  // What the configuration gives it.
  Bytes SizeOf(blocks::TierIndex tier) const;
  absl::StatusOr<TenantId> FindTenant(absl::string_view name) const;
  // The tenants that an operator means: one, or all.
  absl::StatusOr<std::vector<TenantId>> Meant(const std::string& tenant) const;
  void FillTenant(TenantId tenant, blocks::TierIndex tier, v1::TenantTier& out)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  void OnStored(blocks::TierIndex tier, const BlockRecord& record);
  void OnForeign(blocks::TierIndex tier, const BlockRecord& record);
  void OnRemoved(blocks::TierIndex tier, const BlockRecord& record);
  // BlockMover::Listener:
  void OnChunkMade(ArenaChunkId chunk, const absl::Status& status) override;
  void OnChunkRetired(ArenaChunkId chunk) override;
  void OnLoaded(blocks::TransferId transfer, const absl::Status& status) override;
  void OnStoreDone(blocks::TransferId transfer, const absl::Status& status) override;
  void OnPurged(blocks::PurgeId purge, const absl::Status& status) override;

  const Options options_;
  const Clock& clock_;
  // High half of the keys of blocks that CheckTiers sends around: not the directory's.
  const uint64_t check_keys_ = RandomSeed();
  const uint64_t event_generation_ = RandomSeed();
  HandOverTable& hand_overs_;
  std::unique_ptr<DramArena> arena_;
  std::unique_ptr<StagingPool> staging_;
  std::unique_ptr<PeerMemory> lent_;  // null if none is
  std::vector<std::unique_ptr<Observer>> observers_;
  std::vector<std::unique_ptr<TierStore>> stores_;
  std::unique_ptr<BlockMover> mover_;
  std::thread ticker_;

  Mutex mu_;
  // Until the tiers are open nothing that the directory wants is done.
  bool open_ ABSL_GUARDED_BY(mu_) = false;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  blocks::BlockDirectory directory_ ABSL_GUARDED_BY(mu_);
  // What the directory was told of the lower tiers last.
  std::vector<blocks::TierState> states_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<SessionId, Known> sessions_ ABSL_GUARDED_BY(mu_);
  absl::flat_hash_map<blocks::WaitId, Waiter> waiters_ ABSL_GUARDED_BY(mu_);
  std::vector<std::weak_ptr<BlockEventListener>> listeners_ ABSL_GUARDED_BY(mu_);
  uint64_t announced_ ABSL_GUARDED_BY(mu_) = 0;  // the last event that they were told of
  // When the directory wants to hear of time again.
  absl::Time next_tick_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
  // That changed, the store stops, or a purge may be done.
  CondVar changed_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_BLOCKS_BLOCK_STORE_H_
