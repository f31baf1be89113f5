// Who holds each slab of the pool, in which role and state, under which epoch. Pure bookkeeping: it
// decides nothing and reads no clock. Every change of state goes through one function, which
// refuses what the table at SlabState does not list.
//
// Cost: O(1) per slab moved; counts, the free list and each session's slabs are kept incrementally.
// Threads: none of its own; the caller serializes.
#ifndef PALIMPSEST_BROKER_CORE_SLAB_LEDGER_H_
#define PALIMPSEST_BROKER_CORE_SLAB_LEDGER_H_

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"
#include "common/strong_int.h"

namespace palimpsest {

// A configured tenant: its place in the broker's configuration, from 0.
using TenantId = StrongInt<struct TenantIdTag, uint32_t>;

// What a slab is used for. kNone exactly in the states without an owner's mapping (kFree,
// kQuiesced, kScrubbed).
enum class SlabRole : uint8_t { kNone, kParameter, kKv, kSlot, kWorkspace };
inline constexpr int kSlabRoles = 5;

absl::string_view SlabRoleName(SlabRole role);

// All legal transitions:
//   kFree        -> kGranted      Grant: to a session, under a new epoch
//   kFree        -> kLost         Adopt: after a restart, the journal says an old session holds it
//   kGranted     -> kRevoking     BeginRevoke: its session was asked to give this very slab back
//   kGranted     -> kQuiesced     GiveBack: a KV slab that its session chose, or gave back unasked
//   kGranted     -> kQuarantined  Quarantine: its session broke a rule or a deadline
//   kGranted     -> kGranted      Move: to another place, or between kParameter and kSlot
//   kRevoking    -> kQuiesced     GiveBack: the session unmapped it
//   kRevoking    -> kQuarantined  Quarantine
//   kRevoking    -> kGranted      Readopt: its session returned with it, and what was asked is void
//   kLost        -> kGranted      Readopt: its session returned with the same epoch, which it keeps
//   kLost        -> kQuiesced     GiveBack: its session returned without it, or its process is gone
//   kLost        -> kQuarantined  Quarantine: its session did not return in time
//   kQuarantined -> kQuiesced     GiveBack: the process is gone
//   kQuiesced    -> kScrubbed     Clean: zeroed or replaced by fresh memory
//   kQuiesced    -> kGranted      GrantUncleaned: to the tenant that had it last
//   kScrubbed    -> kFree         Free
enum class SlabState : uint8_t {
  kFree,
  kGranted,
  kRevoking,
  kQuiesced,
  kScrubbed,
  kQuarantined,
  kLost,
};
inline constexpr int kSlabStates = 7;

absl::string_view SlabStateName(SlabState state);
bool IsLegalTransition(SlabState from, SlabState to);

struct SlabRecord {
  SlabState state = SlabState::kFree;
  SlabRole role = SlabRole::kNone;
  // Set while the slab is kGranted, kRevoking, kQuarantined or kLost.
  std::optional<SessionId> owner;
  // Of the last grant; 0 before the first.
  Epoch epoch;
  // Parameters, workspace, slots: the place in the owner's region. Otherwise 0.
  RegionIndex region_index;
  // Who had it last (or has it). Cleared when the slab was scrubbed: nothing is left to read.
  std::optional<TenantId> last_tenant;
};

class SlabLedger {
 public:
  // `generation` counts the broker's restarts, from 1. Every slab is kFree.
  SlabLedger(uint32_t pool_slabs, uint32_t generation);
  virtual ~SlabLedger() = default;
  SlabLedger(const SlabLedger&) = delete;
  SlabLedger& operator=(const SlabLedger&) = delete;

  struct Grantee {
    SessionId session;
    TenantId tenant;
    SlabRole role = SlabRole::kNone;
  };

  // The epoch for the next grant: generation << 32 | counter, larger than all before.
  Epoch NextEpoch();

  // The slab that would be granted next; nullopt when none is free.
  std::optional<SlabId> FirstFree() const;

  // The transitions listed at SlabState. FailedPrecondition when illegal, in which case nothing has
  // changed; InvalidArgument for ids outside the pool.
  absl::Status Grant(SlabId slab, const Grantee& to, Epoch epoch, RegionIndex region_index);
  absl::Status GrantUncleaned(SlabId slab, const Grantee& to, Epoch epoch,
                              RegionIndex region_index);
  absl::Status Adopt(SlabId slab, const Grantee& by, Epoch epoch, RegionIndex region_index);
  absl::Status BeginRevoke(SlabId slab);
  absl::Status Readopt(SlabId slab);
  // To the role kParameter or kSlot, from one of them; session and epoch stay.
  absl::Status Move(SlabId slab, SlabRole role, RegionIndex region_index);
  absl::Status GiveBack(SlabId slab);
  absl::Status Quarantine(SlabId slab);
  absl::Status Clean(SlabId slab);
  absl::Status Free(SlabId slab);

  uint32_t pool_slabs() const { return static_cast<uint32_t>(slabs_.size()); }
  uint32_t generation() const { return generation_; }
  bool Contains(SlabId slab) const { return slab.value() < slabs_.size(); }
  // Requires Contains(slab).
  const SlabRecord& record(SlabId slab) const { return slabs_[slab.value()].record; }
  uint32_t Count(SlabState state) const { return counts_[static_cast<size_t>(state)]; }
  // Slabs owned by the session, in whatever state. O(their number).
  std::vector<SlabId> SlabsOf(SessionId session) const;
  uint32_t CountOf(SessionId session) const;

  // Recounts everything: every slab in one state, owner present exactly where the state demands it,
  // lists and sums consistent with the records. O(pool); for tests and for the operator's doctor.
  absl::Status CheckConsistency() const;

 protected:
  // The one function that changes a slab. Virtual so that a test can break it on purpose.
  virtual absl::Status Transition(SlabId slab, SlabState to, const SlabRecord& next);

 private:
  static constexpr uint32_t kNil = 0xffffffff;

  struct List {
    uint32_t head = kNil;
    uint32_t tail = kNil;
    uint32_t size = 0;
  };
  struct Slab {
    SlabRecord record;
    uint32_t previous = kNil;  // neighbours in the free list or in the owner's list
    uint32_t next = kNil;
  };

  absl::Status CheckSlab(SlabId slab) const;
  List* ListOf(const SlabRecord& record);
  void Append(List& list, uint32_t slab);
  void Remove(List& list, uint32_t slab);

  uint32_t generation_;
  uint32_t epoch_counter_ = 0;
  std::vector<Slab> slabs_;
  std::array<uint32_t, kSlabStates> counts_ = {};
  List free_;
  absl::flat_hash_map<SessionId, List> owned_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_SLAB_LEDGER_H_
