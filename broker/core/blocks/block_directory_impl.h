// The directory's inside, shared by its source files: block_directory.cc (tenants, limits, what
// there is to see), directory_sessions.cc (sessions and requests), directory_waits.cc (who waits
// for promotions), directory_moves.cc (victims, transfers), directory_tiers.cc (what lower tiers
// say, purges), directory_chunks.cc (memory that comes and goes), directory_hints.cc,
// directory_check.cc.
//
// Each call changes what it is about and then calls Pump, which looks at the whole state and begins
// what is due: nothing is remembered as a promise.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_DIRECTORY_IMPL_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_DIRECTORY_IMPL_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"
#include "broker/core/blocks/block_directory.h"
#include "broker/core/blocks/tenant_blocks.h"

namespace palimpsest::blocks {

// Half-open range of what an Acquire asks for behind the held blocks.
struct PathPart {
  size_t begin = 0, end = 0;
  size_t size() const { return end - begin; }
};

class BlockDirectory::Impl {
 public:
  explicit Impl(const DirectoryOptions& options);

  std::vector<BlockAction> TakeActions() { return std::exchange(actions_, {}); }
  absl::Status AddTenant(const BlockTenant& tenant, absl::Time now);
  absl::Status SetCapacity(TierIndex tier, Bytes capacity, absl::Time now);
  absl::Status SetBudget(TenantId tenant, TierIndex tier, Bytes budget, absl::Time now);
  absl::Status SetRecompute(TenantId tenant, const RecomputeCost& cost);
  absl::StatusOr<Trimmed> Trim(TenantId tenant, TierIndex tier, Bytes keep, absl::Time now);
  absl::StatusOr<uint64_t> Purge(TenantId tenant, absl::Time now);
  bool Purging(TenantId tenant) const;
  absl::Status OpenSession(SessionId session, TenantId tenant, absl::Time now);
  absl::Status CloseSession(SessionId session, absl::Time now);
  absl::Status Map(SessionId session, absl::Span<const ArenaChunkId> chunks);
  std::vector<ArenaChunkId> UnmapsOf(SessionId session) const;
  absl::StatusOr<AcquireReply> Acquire(SessionId session, const AcquireRequest& request,
                                       absl::Time now);
  void CancelWait(SessionId session, WaitId wait, absl::Time now);
  absl::StatusOr<std::vector<Reserved>> Reserve(SessionId session, uint64_t request,
                                                absl::Span<const ArenaLedger::Wanted> wanted,
                                                absl::Time now);
  absl::Status Commit(SessionId session, absl::Span<const ArenaLedger::Committed> blocks,
                      absl::Time now);
  absl::Status Abort(SessionId session, absl::Span<const BlockKey> keys, absl::Time now);
  absl::Status Release(SessionId session, uint64_t request, absl::Span<const ArenaExtent> extents,
                       absl::Time now);
  absl::Status EndRequest(SessionId session, const RequestEnding& ending, absl::Time now);
  absl::StatusOr<size_t> Hint(SessionId session, const BlockHint& hint, absl::Time now);
  void OnChunkMade(ArenaChunkId chunk, const absl::Status& status, absl::Time now);
  void OnChunkRetired(ArenaChunkId chunk, absl::Time now);
  absl::Status OnUnmapped(SessionId session, absl::Span<const ArenaChunkId> chunks, absl::Time now);
  void OnLoaded(TransferId transfer, const absl::Status& status, absl::Time now);
  void OnStoreDone(TransferId transfer, const absl::Status& status, absl::Time now);
  void OnPurged(PurgeId purge, const absl::Status& status, absl::Time now);
  void OnTierState(TierIndex tier, const TierState& state, absl::Time now);
  void OnRecovered(TierIndex tier, absl::Span<const BlockRecord> records, absl::Time now);
  void OnStored(TierIndex tier, const BlockRecord& record, absl::Time now);
  void OnForeign(TierIndex tier, const BlockRecord& record, absl::Time now);
  void OnRemoved(TierIndex tier, const BlockRecord& record, absl::Time now);
  absl::Time Tick(absl::Time now);
  TierCounters CountersOf(TenantId tenant, TierIndex tier) const;
  prefetch::PrefetchCounts PrefetchesOf(TenantId tenant) const {
    return tenants_.at(tenant)->prefetcher().planner().all();
  }
  size_t known(TenantId tenant) const { return tenants_.at(tenant)->tree().size(); }
  const BlockEvents& events() const { return events_; }
  std::vector<BlockEvent> Snapshot() const;
  const ArenaLedger& arena() const { return ledger_; }
  size_t loads() const { return loads_.size() + load_queue_.size(); }
  size_t stores() const { return stores_.size(); }
  absl::Status CheckConsistency() const;

 private:
  // Of an extent.
  using Place = std::pair<uint32_t, int64_t>;
  struct Pins {
    uint32_t count = 0;
    BlockHandle block = kNoBlock;
    ArenaExtent extent;
  };
  struct Request {
    cache::RequestId id;
    cache::ConversationId conversation;
    BlockHandle tail = kNoBlock;  // the last block of its path, retained
    absl::btree_map<Place, Pins> pins;
    absl::btree_set<WaitId> waits;
  };
  struct Session {
    TenantBlocks* tenant = nullptr;
    absl::btree_map<uint64_t, Request> requests;
    absl::btree_set<ArenaChunkId> unmaps;  // asked for
    size_t waits = 0;
    bool overdue = false;
  };
  // An Acquire, while it is answered or waits.
  struct Wait {
    SessionId session;
    uint64_t request = 0;
    TenantBlocks* tenant = nullptr;
    size_t held = 0, kept = 0, window = 0;  // as in AcquireRequest and AcquireReply
    // What is asked for behind the held blocks, the caller's unless somebody waits. Of it `part` is
    // awaited; the first `acquired.size()` of that are pinned.
    absl::Span<const BlockIdentity> ids;
    std::vector<BlockIdentity> kept_ids;  // of one who waits; moved, not copied
    std::vector<BlockHandle> path;        // retained
    PathPart part;
    std::vector<ArenaLedger::Acquired> acquired;
    absl::Time deadline;

    size_t next() const { return part.begin + acquired.size(); }
  };
  struct QueuedLoad {
    TenantBlocks* tenant = nullptr;
    BlockHandle block = kNoBlock;  // retained
    TierIndex from;
    Bytes length;
  };
  struct Load {
    TenantBlocks* tenant = nullptr;
    BlockHandle block = kNoBlock;
    TierIndex from;
    Bytes length;
    uint64_t checksum = 0;
    absl::Time began;
    bool doomed = false;
  };
  struct Store {
    TenantBlocks* tenant = nullptr;
    BlockHandle block = kNoBlock;
    TierIndex from, to;
    std::optional<ArenaExtent> extent;
    Bytes length;
    bool doomed = false;
  };
  struct Tier {
    LowerTier config;
    TierState state;
    Bytes loading;  // under way and queued
    LinkUse use;
  };
  struct Retention {
    TenantBlocks* tenant = nullptr;
    uint32_t priority = 0;
    absl::Time until;
    absl::Duration half_life;
    absl::Time next;                  // when some of them go
    std::vector<BlockHandle> blocks;  // those before others first
  };
  struct OpenPurge {
    TenantBlocks* tenant = nullptr;
    TierIndex tier;
    absl::Time again = absl::InfiniteFuture();  // when it failed
  };

  // Tenants (block_directory.cc).
  absl::StatusOr<TenantBlocks*> FindTenant(TenantId tenant);
  absl::Status CheckTier(TierIndex tier) const;
  SessionId OwnSession(const TenantBlocks& tenant) const;
  Tier& LowerOf(TierIndex tier) { return lower_[tier.value() - size_t{1}]; }
  const Tier& LowerOf(TierIndex tier) const { return lower_[tier.value() - size_t{1}]; }
  Bytes Staying(TierIndex tier) const;
  Bytes Used(TierIndex tier) const;
  // Begins what is due.
  void Pump(absl::Time now);

  // Sessions and requests (directory_sessions.cc).
  absl::StatusOr<Session*> FindSession(SessionId session);
  absl::Status CheckIdentities(const TenantBlocks& tenant,
                               absl::Span<const BlockIdentity* const> ids) const;
  absl::Status CheckAcquire(const Session& session, const AcquireRequest& request,
                            absl::Time now) const;
  // Pins the longest ready prefix for the request.
  std::vector<ArenaLedger::Acquired> Pin(SessionId session, Request& request,
                                         absl::Span<const BlockIdentity> ids,
                                         absl::Span<const BlockHandle> path, bool waited);
  // In T1 or in a lower tier, or on its way to one of them.
  bool LiesSomewhere(TenantBlocks& tenant, BlockHandle block);
  // What `Pins.count` counts, of one extent.
  void Unpin(SessionId session, Request& request, const ArenaExtent& extent, uint32_t count);
  // How it ended, as the policies were told.
  cache::RequestEnd FinishRequest(SessionId id, Session& session, uint64_t request,
                                  const RequestEnding& ending, absl::Time now);
  void SetTail(TenantBlocks& tenant, Request& request, BlockHandle block);
  std::vector<BlockHandle> NameWritten(TenantBlocks& tenant, Request* request,
                                       absl::Span<const ArenaLedger::Wanted> wanted,
                                       absl::Time now);
  Reserved ReserveOne(SessionId session, TenantBlocks& tenant, const ArenaLedger::Wanted& wanted,
                      BlockHandle block, absl::Time now);

  // Waits (directory_waits.cc).
  // What the longest prefix needs of the blocks that are asked for, where `there` says which of
  // them are to be had. Without a window as many as there are, if `there` is what Pin finds.
  static PathPart Longest(const Wait& wait, absl::FunctionRef<bool(size_t)> there);
  PathPart LongestReady(const Wait& wait) const;
  PathPart LongestAnywhere(const Wait& wait);
  bool CanBeHad(TenantBlocks& tenant, const BlockIdentity& id, BlockHandle block);
  // What is there now: pins it unless that was done, and gives back what is of no use.
  AcquireReply Conclude(Wait& wait);
  void PinPart(Wait& wait, bool waited);
  void UnpinAcquired(Wait& wait);
  // When the block could be in T1, if those before it that were added come first.
  struct Loads {
    std::vector<Bytes> bytes;  // by tier
    absl::Duration expected = absl::ZeroDuration();
  };
  // The tier that it comes from.
  TierIndex AddLoad(TenantBlocks& tenant, BlockHandle block, Loads& loads);
  std::vector<Elsewhere> Behind(const Wait& wait);
  std::vector<Elsewhere> BehindWindow(const Wait& wait);
  // Whether it is ready, or will be unless something fails.
  bool Coming(TenantBlocks& tenant, BlockHandle block);
  void Promote(TenantBlocks& tenant, absl::Span<const BlockIdentity> ids,
               absl::Span<const BlockHandle> path, absl::Time deadline, absl::Time now);
  WaitId AddWait(Session& session, Wait wait);
  // Pins what has become ready; answers if nothing more is coming, else waits for the next block.
  void Advance(WaitId id);
  void Answer(WaitId id);
  AcquireDone NoAnswer(WaitId id) const;
  Wait TakeWait(WaitId id);
  static void ReleasePath(const Wait& wait);
  void ForgetWait(WaitId id);
  // And takes back what it has pinned.
  void GiveUpWait(WaitId id);
  void WakeWaits(TenantBlocks& tenant, BlockHandle block);

  // Victims and transfers (directory_moves.cc).
  std::optional<TierIndex> BestCopy(TenantBlocks& tenant, BlockHandle block) const;
  // The tier behind `from` where a block that leaves `from` is best kept. Notes what it loses.
  std::optional<TierIndex> ChooseTier(TenantBlocks& tenant, BlockHandle block, TierIndex from,
                                      Bytes length, absl::Time now);
  std::optional<double> ExcessIn(TenantBlocks& tenant, BlockHandle block, TierIndex tier,
                                 Bytes length, absl::Time now);
  void LetGo(TenantBlocks& tenant, BlockHandle block, absl::Time now);
  void LetGoBelow(TenantBlocks& tenant, TierIndex tier, BlockHandle block, absl::Time now);
  void Drop(TenantBlocks& tenant, BlockHandle block);
  // Room for `block` in T1, by dropping what is worth less: kReserved if there is, else kNoRoom or
  // kUnwanted.
  Reservation MakeRoom(TenantBlocks& tenant, BlockHandle block, Bytes length, bool may_refuse,
                       absl::Time now);
  void KeepArenaFree(TenantBlocks& tenant, absl::Time now);
  void KeepTierFree(TierIndex tier, absl::Time now);
  void BeginStore(TenantBlocks& tenant, BlockHandle block, TierIndex from, TierIndex to,
                  absl::Time now);
  void QueueLoad(TenantBlocks& tenant, BlockHandle block);
  bool BeginLoad(TenantBlocks& tenant, BlockHandle block, absl::Time now);
  void BeginQueued(absl::Time now);
  void BeginPrefetches(TenantBlocks& tenant, absl::Time now);
  size_t PrefetchPath(TenantBlocks& tenant, absl::Span<const BlockHandle> path,
                      const prefetch::Wish& wish, absl::Time now);
  void SetPrefetchBudgets();

  // Hints (directory_hints.cc). How many blocks each concerned.
  static absl::Status CheckAction(const CacheAction& action);
  // `concerned`: the end of `path` that it is about. Requires one that was checked.
  size_t Act(TenantBlocks& tenant, absl::Span<const BlockHandle> path,
             absl::Span<const BlockHandle> concerned, const CacheAction& action, absl::Time now);
  size_t Retain(TenantBlocks& tenant, absl::Span<const BlockHandle> path, const CacheAction& action,
                absl::Time now);
  // Whether `bytes` more may be retained, if need be in place of blocks of a lower priority.
  bool MakeRetainable(TenantBlocks& tenant, Bytes bytes, uint32_t priority);
  void UnretainLast(uint64_t id, Retention& retention);
  void EndRetention(uint64_t id);
  void DecayRetentions(absl::Time now);
  size_t Demote(TenantBlocks& tenant, absl::Span<const BlockHandle> path, absl::Time now);
  // Those that waited for copies under way.
  void DemoteQueued(absl::Time now);
  bool MayDemote(TenantBlocks& tenant, BlockHandle block) const;
  size_t Forsake(TenantBlocks& tenant, absl::Span<const BlockHandle> path);

  // Lower tiers (directory_tiers.cc).
  // Takes note of a copy. False if another block with the key is known.
  bool AddCopy(TenantBlocks& tenant, TierIndex tier, const BlockRecord& record, bool foreign,
               absl::Time now);
  // The same for this node's, which is removed if nothing is to know of it.
  void AddOwn(TierIndex tier, const BlockRecord& record, absl::Time now);
  void SendPurge(PurgeId id);

  // Chunks (directory_chunks.cc).
  // Has a chunk made, if there may be one and it is needed or soon will be.
  void Grow(TenantBlocks& tenant, bool needed, absl::Time now);
  bool Making(const TenantBlocks& tenant) const;
  bool CanGrow(const TenantBlocks& tenant, absl::Time now) const;
  void Revoke(ArenaChunkId chunk, absl::Time now);
  void EnforceLimits(absl::Time now);
  void PumpChunks(absl::Time now);
  void Evacuate(TenantBlocks& tenant, ArenaChunkId chunk, absl::Time due, absl::Time now);
  void ReportOverdue(ArenaChunkId chunk);

  absl::Status CheckTransfers() const;
  absl::Status CheckSessions() const;

  const DirectoryOptions options_;
  ArenaLedger ledger_;
  BlockEvents events_;
  std::vector<Tier> lower_;
  Bytes arena_limit_;
  absl::btree_map<TenantId, std::unique_ptr<TenantBlocks>> tenants_;
  absl::flat_hash_map<std::string, TenantBlocks*> by_name_;
  absl::btree_map<SessionId, Session> sessions_;

  absl::btree_map<WaitId, Wait> waits_;
  absl::btree_set<std::pair<absl::Time, WaitId>> wait_deadlines_;
  // By the block that a wait waits for next.
  absl::flat_hash_map<std::pair<TenantId, BlockHandle>, std::vector<WaitId>> waiting_;

  absl::btree_map<TransferId, Load> loads_;
  absl::btree_map<TransferId, Store> stores_;
  std::deque<QueuedLoad> load_queue_;
  // What hints have sent below, children first; retained in their trees.
  std::deque<std::pair<TenantBlocks*, BlockHandle>> demotions_;

  absl::btree_map<ArenaChunkId, TenantBlocks*> making_;
  absl::btree_map<ArenaChunkId, absl::Time> revoking_;  // when it began
  absl::btree_set<ArenaChunkId> retiring_;
  absl::Time next_memory_ = absl::InfinitePast();

  absl::btree_map<uint64_t, Retention> retentions_;
  absl::btree_set<std::tuple<TenantId, uint32_t, uint64_t>> by_priority_;  // those of retentions_
  uint64_t last_retention_ = 0;

  absl::btree_map<PurgeId, OpenPurge> purges_;
  uint64_t last_transfer_ = 0, last_wait_ = 0, last_purge_ = 0;
  std::vector<BlockAction> actions_;
};

// For what the directory has made sure of: a failure is a broken invariant, and aborts.
void MustSucceed(const absl::Status& status);

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_DIRECTORY_IMPL_H_
