// All KV blocks of one node: where each lies, who uses it, and where it goes next. T1 is an
// ArenaLedger; of the tiers below it the directory knows what they tell it. It decides; whoever
// owns it moves the bytes: each call may leave actions (block_actions.h), which the server carries
// out and reports back. No I/O, no clock: times come with the calls and never go back. The same
// calls give the same actions.
//
// What holds at any time. A block is served to a session only while it is ready in T1 and pinned
// for one of its requests, under the identity with which it was committed. A transfer that fails or
// was overtaken by a purge is never published. There is at most one promotion of a key under way,
// whoever waits for it. What a request pinned goes when it ends, and what a session wrote when it
// is closed.
//
// Placement (docs/policies.md). Each tenant has one EvictionPolicy a tier, told of all its requests
// alike. A block that T1's chooses as a victim, ahead of need, is copied to the lower tier where
// its worth exceeds the price most, unless a lower tier has it or none is worth it; its room is
// reused when it is needed, and until then a request that comes back finds it. A tenant uses its
// own budgets alone. Blocks of a conversation that is expected to go on soon are brought back ahead
// of it, as far as the share of the tiers' bandwidth for that allows (prefetcher.h).
//
// Order of calls. AddTenant for all, then OnRecovered for what lower tiers brought back, then
// anything. For one request of a session:
//
//   Acquire                  once or more often with one number; the first counts as use
//   Reserve, Commit, Abort   of what it computed; before EndRequest, so that the predictor sees
//                            that its blocks belong to it (later ones are taken for strangers)
//   Release                  whenever it has copied what it acquired
//   EndRequest               once; nothing of it is copied any more
//
// Errors are the caller's: InvalidArgument (a hostile value), NotFound (no such session or tenant),
// FailedPrecondition (not in this order; a worker that causes it should lose its session),
// ResourceExhausted (a bound). They change nothing.
//
// Complexity: O(log n) a block and policy, where n is the blocks known; a revoked chunk and a purge
// take O(blocks of the tenant). Threads: none; the caller serializes. Nothing blocks.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_DIRECTORY_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_DIRECTORY_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/core/arena/arena_ledger.h"
#include "broker/core/blocks/block_actions.h"
#include "broker/core/blocks/block_events.h"
#include "broker/core/blocks/tier_counters.h"
#include "broker/core/cache/eviction_policy.h"
#include "broker/core/prefetch/prefetch_planner.h"
#include "broker/tier/block_record.h"
#include "common/block_identity.h"
#include "common/bytes.h"
#include "common/ids.h"

namespace palimpsest::blocks {

// How long one transfer of n bytes takes: latency + n / bytes_per_second (TransferMeter).
struct TransferCost {
  absl::Duration latency = absl::ZeroDuration();
  double bytes_per_second = 1e9;

  absl::Duration Expect(Bytes bytes) const {
    return latency + absl::Seconds(static_cast<double>(bytes.count()) / bytes_per_second);
  }
};

// As measured by its store. Does not serve until told so.
struct TierState {
  bool serving = false;  // the circuit breaker is closed
  TransferCost load;
  TransferCost store;
};

struct LowerTier {
  std::string name;  // "cxl", "nvme", "directory"
  Bytes capacity;
  // What lengths are rounded up to where they are counted.
  Bytes unit = KiB(4);
};

// What computing a block anew takes, by its position in the sequence (0: the first). Measured by
// the worker.
struct RecomputeCost {
  absl::Duration first = absl::Milliseconds(10);
  absl::Duration per_position = absl::ZeroDuration();  // attention over what is before it

  absl::Duration At(uint32_t position) const { return first + per_position * position; }
};

// Of a tenant's ranking in one tier.
using PolicyMaker = std::function<std::unique_ptr<cache::EvictionPolicy>(TierIndex)>;

struct BlockTenant {
  TenantId id;
  std::string name;  // as in BlockIdentity
  // Of T1 (whole chunks) and each lower tier; missing ones: the tier's capacity. Zero: nothing of
  // it goes there.
  std::vector<Bytes> budgets;
  RecomputeCost recompute;
  // Default: PredictivePolicy.
  PolicyMaker policy;
};

struct DirectoryOptions {
  ArenaLedger::Options arena;
  // From fast to slow; at most kMaxLowerTiers.
  std::vector<LowerTier> lower;

  // Shares of a tenant's budget that are kept free: victims are chosen ahead of need.
  double low_water = 0.05;
  // Transfers under way at once. Loads wait in a queue of max_queued_loads for those before them;
  // stores that find no place are not begun.
  size_t max_loads = 64;
  size_t max_queued_loads = 4096;
  size_t max_stores = 32;
  // What prefetches of all tenants together may take of a tier's bandwidth.
  double prefetch_share = 0.1;
  // What is not reported by then is late; the server gives up, and reports that.
  absl::Duration transfer_deadline = absl::Seconds(10);
  absl::Duration longest_wait = absl::Seconds(60);
  // Of a tenant's T1, what clients may have retained.
  double retain_share = 0.5;
  absl::Duration longest_retention = absl::Hours(1);
  size_t max_waits = 64;        // of a session
  size_t max_requests = 65536;  // running, of a session
  // From the revocation of a chunk until the session that does not give it back is overdue.
  absl::Duration unmap_deadline = absl::Seconds(10);
  // After the machine had no memory for a chunk none is made for so long.
  absl::Duration memory_back_off = absl::Seconds(10);
  // Blocks known of each tenant beyond those that lie in a tier; with those of running requests up
  // to twice as many.
  size_t history = size_t{1} << 17;
  size_t events = size_t{1} << 16;

  // InvalidArgument, with what was expected.
  absl::Status Validate() const;
};

struct AcquireRequest {
  // The session's own number, not 0. With the first Acquire that names it the request begins.
  uint64_t request = 0;
  cache::ConversationId conversation{};  // 0: not known
  int64_t input_tokens = 0;
  // Every full block of the prompt, in prefix order, each the parent of the next one; no key twice.
  absl::Span<const BlockIdentity> ids;
  absl::Span<const cache::BlockType> types;  // of `ids`; shorter or empty: not known
  // The first of them that the session has in T0: used, but not pinned.
  size_t held = 0;
  // How many blocks before its end a prefix needs; 0: all. What lies before them is used, but not
  // pinned.
  size_t window = 0;
  // Brings what continues the prefix up from lower tiers, whether or not somebody waits for it.
  bool promote = false;
  // Later than now: the answer comes when nothing more is on its way, or then. At most longest_wait
  // from now.
  absl::Time deadline = absl::InfinitePast();
};

// What is to become of the blocks of a sequence, as a client says. It moves the tenant's own blocks
// alone, and spends its own budgets.
struct CacheAction {
  enum class Kind : uint8_t {
    // Those in T1 stay there, the first ones first, up to `budget` bytes and retain_share; beyond
    // that blocks of a lower priority are as others again. After each half_life the last half of
    // what is left of them is, after `until` or longest_retention all.
    kRetain,
    // Those in T1 that nobody uses go to a lower tier, as if there were no room.
    kDemote,
    // They come to T1 by `until`, as far as the budget for prefetches allows.
    kPrefetch,
    // Those that nobody uses, and on which no others hang, are removed everywhere, but for what
    // other nodes have.
    kRelease,
  };
  Kind kind = Kind::kRetain;
  absl::Time until = absl::InfiniteFuture();
  absl::Duration half_life = absl::InfiniteDuration();
  Bytes budget = Bytes(INT64_MAX);
  uint32_t priority = 0;
};

struct BlockHint {
  CacheAction action;
  // Not 0: it is about the blocks of the conversation's last request that has ended, and those
  // that were written for it, as far as they are remembered.
  cache::ConversationId conversation{};
  // Otherwise about these, as in AcquireRequest, from `first` on (a prefetch: all of them).
  absl::Span<const BlockIdentity> ids;
  size_t first = 0;
};

struct RequestEnding {
  uint64_t request = 0;
  cache::Ending how = cache::Ending::kUnknown;
  int64_t output_tokens = 0;
  std::optional<absl::Duration> expected_idle{};
  bool last_turn = false;
  // With the blocks of its path and those that were written for it.
  std::optional<CacheAction> then{};
};

// kUnwanted beside the ledger's answers: room for it would cost blocks that are worth more.
enum class Reservation : uint8_t { kReserved, kPresent, kCollision, kNoRoom, kUnwanted };

struct Reserved {
  Reservation result = Reservation::kNoRoom;
  ArenaExtent extent;  // of kReserved
};

struct Trimmed {
  uint64_t blocks = 0;
  Bytes bytes;
};

class BlockDirectory {
 public:
  static constexpr size_t kMaxLowerTiers = 8;
  static constexpr size_t kMaxBlocks = 16384;  // a call

  // Requires options.Validate().ok().
  explicit BlockDirectory(const DirectoryOptions& options);
  ~BlockDirectory();
  BlockDirectory(const BlockDirectory&) = delete;
  BlockDirectory& operator=(const BlockDirectory&) = delete;

  // What to do. Take them after each call.
  std::vector<BlockAction> TakeActions();

  // Tenants, and what the operator says.

  absl::Status AddTenant(const BlockTenant& tenant, absl::Time now);
  // Of all tenants together, and of one. T1's is rounded down to whole chunks. What is over it
  // leaves at once, the least worth first.
  absl::Status SetCapacity(TierIndex tier, Bytes capacity, absl::Time now);
  absl::Status SetBudget(TenantId tenant, TierIndex tier, Bytes budget, absl::Time now);
  absl::Status SetRecompute(TenantId tenant, const RecomputeCost& cost);
  // As SetBudget, once: the tenant's room comes again when it is needed. What left or is on its
  // way.
  absl::StatusOr<Trimmed> Trim(TenantId tenant, TierIndex tier, Bytes keep, absl::Time now);
  // From now on nothing of the tenant that is stored or on its way is served; what sessions have
  // pinned they may finish reading. PurgeTier actions follow, one a lower tier, which are repeated
  // until OnPurged says OK. Purging says whether some are outstanding. How many blocks are
  // forgotten.
  absl::StatusOr<uint64_t> Purge(TenantId tenant, absl::Time now);
  bool Purging(TenantId tenant) const;

  // Sessions. Ids with the highest bit are the directory's own.

  absl::Status OpenSession(SessionId session, TenantId tenant, absl::Time now);
  // Its process is gone, or has unmapped everything. Its requests end, its waits are forgotten.
  absl::Status CloseSession(SessionId session, absl::Time now);
  // It is about to get the chunks' descriptors: it counts as mapping them. All or, with
  // FailedPrecondition, none: not a chunk of its tenant, or being revoked.
  absl::Status Map(SessionId session, absl::Span<const ArenaChunkId> chunks);
  // Chunks that it was asked to unmap, for a session that has lost what it was told.
  std::vector<ArenaChunkId> UnmapsOf(SessionId session) const;

  // Blocks.

  absl::StatusOr<AcquireReply> Acquire(SessionId session, const AcquireRequest& request,
                                       absl::Time now);
  // The one who waits went away: there will be no AcquireDone. Nothing if it was sent.
  void CancelWait(SessionId session, WaitId wait, absl::Time now);
  // `request`: the running one that computed the blocks; 0: none. In order, up to the first block
  // that is neither kReserved nor kPresent.
  absl::StatusOr<std::vector<Reserved>> Reserve(SessionId session, uint64_t request,
                                                absl::Span<const ArenaLedger::Wanted> wanted,
                                                absl::Time now);
  // All or, with FailedPrecondition, none. After a purge blocks that were reserved before it are
  // not published, which is no error.
  absl::Status Commit(SessionId session, absl::Span<const ArenaLedger::Committed> blocks,
                      absl::Time now);
  // What the session has not reserved is passed over.
  absl::Status Abort(SessionId session, absl::Span<const BlockKey> keys, absl::Time now);
  // One pin for each time that an extent is named. All or, with FailedPrecondition, none.
  absl::Status Release(SessionId session, uint64_t request, absl::Span<const ArenaExtent> extents,
                       absl::Time now);
  // Takes its pins back and answers those who wait for it. Without effect if it is not known.
  absl::Status EndRequest(SessionId session, const RequestEnding& ending, absl::Time now);
  // How many blocks it moved or retained, or will.
  absl::StatusOr<size_t> Hint(SessionId session, const BlockHint& hint, absl::Time now);

  // Results of actions.

  // Anything but OK: no memory.
  void OnChunkMade(ArenaChunkId chunk, const absl::Status& status, absl::Time now);
  void OnChunkRetired(ArenaChunkId chunk, absl::Time now);
  // FailedPrecondition: a chunk that it does not map, or uses.
  absl::Status OnUnmapped(SessionId session, absl::Span<const ArenaChunkId> chunks, absl::Time now);
  void OnLoaded(TransferId transfer, const absl::Status& status, absl::Time now);
  void OnStoreDone(TransferId transfer, const absl::Status& status, absl::Time now);
  void OnPurged(PurgeId purge, const absl::Status& status, absl::Time now);

  // Lower tiers: TierStore::Observer, in the order in which things happened. This node's blocks of
  // tenants that are not known are removed.

  void OnTierState(TierIndex tier, const TierState& state, absl::Time now);
  // Of blocks that the tier found when it was opened, in any order.
  void OnRecovered(TierIndex tier, absl::Span<const BlockRecord> records, absl::Time now);
  void OnStored(TierIndex tier, const BlockRecord& record, absl::Time now);
  // Another node's, in a tier that they share. It is had like any other, but counts against
  // nobody's budget and never leaves but by OnRemoved. No second copy is stored there. Blocks of
  // tenants that are not known, or are being purged, are passed over.
  void OnForeign(TierIndex tier, const BlockRecord& record, absl::Time now);
  void OnRemoved(TierIndex tier, const BlockRecord& record, absl::Time now);

  // Time passes: deadlines, and what waited for room. Returns when it should be called again at the
  // latest.
  absl::Time Tick(absl::Time now);

  // What there is to see.

  // Requires a known tenant and a tier that there is.
  TierCounters CountersOf(TenantId tenant, TierIndex tier) const;
  // Blocks fetched before a request asked for them: by hints, and for conversations that were
  // expected to go on.
  prefetch::PrefetchCounts PrefetchesOf(TenantId tenant) const;
  // Blocks of which something is known.
  size_t known(TenantId tenant) const;
  const BlockEvents& events() const;
  // Every block in every tier as kStored events with the number of the last event.
  std::vector<BlockEvent> Snapshot() const;
  const ArenaLedger& arena() const;
  // Transfers under way or queued.
  size_t loads() const;
  size_t stores() const;

  // Recounts everything: the ledger, rankings against residency, pins, transfers, sums of counters.
  // O(n).
  absl::Status CheckConsistency() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_BLOCK_DIRECTORY_H_
