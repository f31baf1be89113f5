// One tier's store of blocks: what every tier has in common, over a TierBackend that moves bytes.
//
// A block is served only if its bytes are those that were stored, under the same identity: key,
// parent, tokens and tenant are compared, the checksum is verified on every move in either
// direction. Whatever else happens is a miss. A block whose bytes are wrong is forgotten, and its
// place is not used again.
//
// Requests are asynchronous: an OK means accepted, and `done` is called once, by the store's
// thread, with no lock held. An error means refused: `done` is not called. Loads run before stores;
// both queues are bounded. A deadline releases the one who waits, with DeadlineExceeded, and
// nothing else: the memory of a request stays pinned until the medium cannot touch it any more, and
// what arrives late is dropped, not published.
//
// A tier that fails, slows or hangs opens its circuit breaker: all who wait are released with
// Unavailable, and requests are refused until a probe (a round trip of scratch blocks) succeeds. It
// begins open: the first probe measures the tier.
//
// The store never evicts on its own, except what expires: a store without room is refused
// (ResourceExhausted), and whoever ranks blocks says what to remove.
//
// In a tier that nodes share it looks, step by step and round after round, for what other nodes
// store there, and reports it. Such foreign blocks are loaded like its own; they count against no
// budget, are no reason to refuse a store, and are never removed from the medium: one that turns
// out to be gone, replaced, purged, expired or damaged is a miss, and forgotten. A look takes one
// operation in flight, waits for loads, and rests for as long as it took.
//
// Thread-safe. Nothing blocks but Open, the destructor and WaitUntilServing.
#ifndef PALIMPSEST_BROKER_TIER_TIER_STORE_H_
#define PALIMPSEST_BROKER_TIER_TIER_STORE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/tier/block_record.h"
#include "broker/tier/circuit_breaker.h"
#include "broker/tier/tier_backend.h"
#include "common/bytes.h"
#include "common/clock.h"

namespace palimpsest {

// Memory that a transfer reads or writes, and what keeps it from being used for anything else: the
// pin is let go, on any thread, when the medium cannot touch the bytes any more.
template <typename Byte>
struct PinnedBytes {
  absl::Span<Byte> bytes;
  std::shared_ptr<const void> pin;
};

struct TierLoad {
  BlockIdentity id;
  // Exactly the block's length. What it holds after any result but OK means nothing.
  PinnedBytes<std::byte> to;
  absl::Time deadline;
};

struct TierStoring {
  BlockRecord record;
  // record.length bytes that do not change.
  PinnedBytes<const std::byte> from;
  absl::Time deadline;
};

// What became of requests. Loads: hits + the sum of misses = those that ended or were refused.
struct TierCounters {
  uint64_t hits = 0;
  uint64_t bytes_loaded = 0;
  struct Misses {
    uint64_t absent = 0;     // not here, on its way in or out, or vanished below the store
    uint64_t collided = 0;   // another block has the key
    uint64_t expired = 0;    // its time to live was over
    uint64_t corrupt = 0;    // wrong bytes
    uint64_t failed = 0;     // the medium reported an error
    uint64_t late = 0;       // the deadline passed first
    uint64_t broken = 0;     // the circuit breaker was or became open
    uint64_t refused = 0;    // queue full, or a wrong request
    uint64_t cancelled = 0;  // the store was closed
  } misses;

  uint64_t stored = 0;
  uint64_t bytes_stored = 0;
  struct Unstored {
    uint64_t duplicate = 0;  // the block, or another one with its key, is here
    uint64_t full = 0;       // the tier's or the tenant's budget, or the medium
    uint64_t corrupt = 0;    // the source did not have the checksum
    uint64_t failed = 0;
    uint64_t late = 0;
    uint64_t broken = 0;
    uint64_t refused = 0;
    uint64_t cancelled = 0;  // removed or purged meanwhile, or the store was closed
  } unstored;
};

struct TierStatus {
  std::string name;
  CircuitBreaker::State breaker = CircuitBreaker::State::kOpen;
  uint64_t times_opened = 0;
  std::string last_failure;  // empty if there was none
  Bytes capacity;
  Bytes used;         // footprints of all blocks: being written, served, being removed, quarantined
  Bytes quarantined;  // of them, those that neither hold a block nor can be used again
  uint64_t blocks = 0;   // that can be loaded
  uint64_t foreign = 0;  // beside them: known ones of other nodes
  size_t queued_loads = 0;
  size_t queued_stores = 0;
  size_t in_flight = 0;
  absl::Duration load_latency;
  double load_bandwidth = 0;  // bytes per second
  absl::Duration store_latency;
  double store_bandwidth = 0;
  TierCounters counters;
};

struct TenantTierStatus {
  Bytes used;
  Bytes limit;
  uint64_t blocks = 0;
};

class TierStore {
 public:
  // Told by the store's thread, in the order in which things happened, with no lock held. Blocks
  // that Open found are not reported: see Records.
  class Observer {
   public:
    virtual ~Observer() = default;
    virtual void OnStored(const BlockRecord& record) = 0;
    // Another node has it there.
    virtual void OnForeign(const BlockRecord& record) = 0;
    // It can no longer be loaded, for whatever reason; or it was foreign and is not known any more.
    virtual void OnRemoved(const BlockRecord& record) = 0;
    // Its room is free again, after OnRemoved or where a store did not succeed.
    virtual void OnFreed(Bytes footprint) = 0;
  };

  struct Options {
    // The budget, in footprints.
    Bytes capacity;
    int max_in_flight = 16;
    // At most max_in_flight: what is left of it is for loads alone.
    int max_stores_in_flight = 8;
    size_t max_queued_loads = 1024;
    size_t max_queued_stores = 1024;
    // What write-back may take of the medium's bandwidth and endurance. Zero: all.
    Bytes store_bytes_per_second;
    // No block is kept for longer, whatever its record says.
    absl::Duration longest_life = absl::InfiniteDuration();
    // The larger of the two scratch blocks of a probe.
    Bytes probe_bytes = MiB(1);
    // Blocks of other nodes that are known at most; of more, those that were found or used longest
    // ago are forgotten. Zero: none are looked for.
    size_t foreign_blocks = 0;
    // From the end of a round of looks to the next one.
    absl::Duration foreign_period = absl::Seconds(30);
    CircuitBreaker::Options breaker;
    // A medium that nobody has used for so long is measured again, then after twice as long each
    // time, up to the breaker's longest back-off, and what is found replaces what was believed: a
    // tier that was slow when it was opened would never be worth a transfer that shows it is not.
    absl::Duration remeasure_after = absl::InfiniteDuration();
    // How long the destructor waits for the medium. If that is not enough, the back-end and all
    // memory that it may still touch are given up, never freed.
    absl::Duration drain = absl::Seconds(30);
    // Without it, nothing happens but by RunOnce.
    bool own_thread = true;

    absl::Status Validate() const;
  };

  using Done = absl::AnyInvocable<void(absl::Status)>;

  // `clock` and `observer` (may be null) outlive the store. Blocks that the back-end brings back
  // count against the budget, even beyond it. Fails if the options are not valid or the back-end
  // does not open.
  static absl::StatusOr<std::unique_ptr<TierStore>> Open(const Options& options,
                                                         std::unique_ptr<TierBackend> backend,
                                                         const Clock& clock,
                                                         Observer* observer = nullptr);
  // Requests that have not begun end with Cancelled.
  ~TierStore();
  TierStore(const TierStore&) = delete;
  TierStore& operator=(const TierStore&) = delete;

  // Any error, now or in `done`, is a miss.
  absl::Status Load(TierLoad request, Done done);

  // AlreadyExists if the key is here, or another node stored the block in a shared tier (so that a
  // load finds it); ResourceExhausted if there is no room. Removing or purging it
  // meanwhile ends it with Cancelled.
  absl::Status Store(TierStoring request, Done done);

  // From now on a miss. Its room is free when loads that have begun and the medium are done with
  // it. False if there is no such block, or another node's alone.
  bool Remove(const BlockKey& key);

  // From now on nothing of the tenant that was stored before is served; after OK, not after a
  // restart either. On DeadlineExceeded that is still under way. Refused (ResourceExhausted) if
  // many purges wait.
  absl::Status Purge(const std::string& tenant, absl::Time deadline, Done done);

  // Whether a load would be tried. Not of foreign blocks.
  bool Contains(const BlockIdentity& id) const;

  // How long a load takes once it has begun. InfiniteDuration while the breaker is not closed.
  absl::Duration ExpectedLoad(Bytes length) const;

  // Of all blocks that can be loaded, but foreign ones, in no order. O(their number).
  std::vector<BlockRecord> Records() const;

  // Nothing is removed when there is less room than is used: stores are refused until there is.
  void SetCapacity(Bytes capacity);
  // Unlimited by default.
  void SetTenantLimit(const std::string& tenant, Bytes limit);

  TierStatus status() const;
  TenantTierStatus tenant_status(const std::string& tenant) const;

  // Recounts everything that is kept in sums. For tests and for the operator's doctor.
  absl::Status CheckConsistency() const;

  // Whether the breaker is closed before `timeout` is over.
  bool WaitUntilServing(absl::Duration timeout) const;

  // Ends and begins what is due. Only without own_thread, on one thread at a time. Returns when
  // there will be something to do again, unless something happens earlier.
  absl::Time RunOnce();

 private:
  class Core;

  explicit TierStore(std::unique_ptr<Core> core);

  std::unique_ptr<Core> core_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_TIER_STORE_H_
