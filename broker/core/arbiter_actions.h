// What the arbiter wants done. The server carries the actions out in the order in which it drains
// them; it must have written a SendGrant's slabs to the journal before it sends the Grant, and may
// forget a slab there once OnSlabsClean was called for it.
#ifndef PALIMPSEST_BROKER_CORE_ARBITER_ACTIONS_H_
#define PALIMPSEST_BROKER_CORE_ARBITER_ACTIONS_H_

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "broker/core/slab_ledger.h"
#include "broker/core/slab_moves.h"
#include "common/ids.h"
#include "common/rotation.h"

namespace palimpsest {

// Why slabs move.
enum class MoveReason : uint8_t {
  kActivation,  // requests wait for parameters
  kEager,       // parameters into free slabs, nobody waits
  kKvDemand,    // towards a KV target
  kReversion,   // parameters back unasked, after KV demand fell
  kQuota,       // the holder is above its quota
  kSurplus,     // given back by its holder without being asked
  kAttach,      // workspace of a worker that came
};

// "activation", "eager", "kv_demand", "reversion", "quota", "surplus", "attach".
absl::string_view MoveReasonName(MoveReason reason);

struct GrantedSlab {
  SlabId slab;
  Epoch epoch;
  // Parameters, workspace, slots (spare places): the place in that region. KV: 0, the worker
  // chooses.
  RegionIndex region_index;
};

struct SendGrant {
  SessionId session;
  GrantId grant;
  SlabRole role = SlabRole::kNone;
  // Parameters: in stage order.
  std::vector<GrantedSlab> slabs;
  MoveReason reason = MoveReason::kActivation;
};

// May come again with the same id after a re-attachment: the first one may have been lost.
struct SendRevoke {
  SessionId session;
  RevokeId revoke;
  SlabRole role = SlabRole::kNone;
  // Parameters: the places to give up, whole stages, the last stage first.
  std::vector<RegionIndex> region_indexes;
  // KV: how many slabs to give up.
  uint32_t kv_slabs = 0;
  // When the arbiter will have the worker killed if it has not answered.
  absl::Time deadline;
  MoveReason reason = MoveReason::kActivation;
};

// Which layers rotate from now on. Slabs that it gives back come back with OnRotationDone.
struct SendSetRotation {
  SessionId session;
  RotationId id;
  Rotation rotation;
  std::vector<SlabMove> moves;
  // When the arbiter will have the worker killed if it has not answered.
  absl::Time deadline;
  MoveReason reason = MoveReason::kKvDemand;
};

struct SendActivateRefused {
  SessionId session;
  std::string message;
  absl::Duration retry_after;
  // No request waited.
  bool eager = false;
};

struct SendKvPressure {
  SessionId session;
  uint32_t target_slabs = 0;
};

// How many bytes per second of parameters and KV blocks together the worker may copy from now on;
// 0: as many as it likes, as at first and after a re-attachment. Copies of rotating layers do not
// count.
struct SendLinkLimit {
  SessionId session;
  double bytes_per_second = 0;
};

// Temporal sharing: the session may run from now on.
struct SendTakeTurn {
  SessionId session;
  TurnId turn;
  absl::Duration quantum;
  TenantId tenant;
  // Since it began to wait for its turn.
  absl::Duration waited;
};

// It is to finish what it has submitted, submit nothing more and answer TurnEnded.
struct SendEndTurn {
  SessionId session;
  TurnId turn;
  // When the arbiter will have the worker killed if it has not answered.
  absl::Time deadline;
};

// SIGKILL; then OnProcessGone when the pidfd says so. Once per session.
struct KillProcess {
  SessionId session;
  std::string why;
};

// Scrub or retire these, then call OnSlabsClean with them (in any order and grouping).
struct CleanSlabs {
  std::vector<SlabId> slabs;
};

// The session owns nothing any more and its process is gone; its id will not come again.
struct SessionEnded {
  SessionId session;
};

enum class TransferKind : uint8_t {
  kRevoke,   // Revoke decided to RevokeDone received
  kGrant,    // Grant decided to mapped, without the restore
  kRestore,  // parameters copied back from the image
  kClean,    // given back to scrubbed or retired
  kRotate,   // SetRotation decided to RotationDone received
};

// A finished movement, for status and metrics.
struct TransferFinished {
  TransferKind kind = TransferKind::kGrant;
  TenantId tenant;
  SlabRole role = SlabRole::kNone;  // kNone for kClean, kSlot for kRotate
  uint32_t slabs = 0;
  absl::Duration duration;
  MoveReason reason = MoveReason::kActivation;
  absl::Time finished_at;
};

using ArbiterAction = std::variant<SendGrant, SendRevoke, SendSetRotation, SendActivateRefused,
                                   SendKvPressure, SendLinkLimit, KillProcess, CleanSlabs,
                                   SessionEnded, TransferFinished, SendTakeTurn, SendEndTurn>;

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_ARBITER_ACTIONS_H_
