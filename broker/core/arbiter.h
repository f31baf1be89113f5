// Decides who gets which slabs: activations, KV demand, victims, reversion, deadlines, deaths and
// broker restarts. Events in, actions out; no I/O and no clock of its own (each event carries the
// time, which must not run backwards). The same events give the same actions.
//
// Ownership: the arbiter owns the slab ledger and every decision about it; the server owns
// descriptors, processes, streams and the journal.
// Threads: none of its own; the caller serializes all calls. Nothing blocks. Take the actions under
// the same lock as the event that caused them, and carry them out after releasing it, in order.
// Legal order: AddTenant for all tenants, then AdoptFromJournal at most once, then anything.
// Events of sessions that are unknown, ended or being killed are ignored: they were under way when
// the session ended. A worker that breaks the protocol is killed by a KillProcess action.
//
// Workspaces are kept for their tenants, attached or not: nobody else is ever granted those slabs,
// and no worker is asked for them.
//
// Supply order when somebody needs memory:
//   1. free slabs, and slabs on their way back that nobody has claimed; an inactive tenant's KV
//      reserve gets nothing else;
//   2. KV that its holder neither uses nor asks for; cached blocks only if they are worth less than
//      reloading parameters (victim_order.h); otherwise behind 3;
//   3. parameters of inactive tenants: lower priority first, then as ArbiterOptions.victims says;
//      whole stages, the last ones first, only as many as needed. A tenant whose worker is silent,
//      that is, has not reported for longer than report_patience, counts as inactive, and its KV
//      goes too: it either answers the Revoke or misses the deadline and loses everything;
//   4. layers of active tenants that are not of higher priority, its own included, one more at a
//      time, as long as their copies are hidden behind compute (remap_policy.h); a tenant with a
//      floor, unless by default, gives others only what it holds above it;
//   5. for a requester below its floor, or of higher priority: KV of tenants above their floor (for
//      more than is needed: only what its holder does not need);
//   6. for an activation: the requester's own KV;
//   7. for a requester below its floor: parameters of active best-effort tenants.
//
// Rotation: layers whose memory was taken from an active tenant have their bytes copied into slots
// each time they run (common/rotation.h). One SetRotation of a session is under way at a time, and
// none while parameters of it are granted, revoked or activated. More freed layers: slabs are given
// back with the answer. Fewer: slabs are granted first, at spare places (slab_moves.h), and moved
// by a SetRotation once they are there. An inactive tenant whose parameters are taken stops
// rotating first, by giving back its slots; its revoke follows the answer. A SetRotation that is
// under way when its worker loses the connection is void: what the worker has when it returns
// counts.
//
// Link: while layers rotate, workers are told how fast they may restore parameters and move blocks
// (link_budget.h).
//
// Temporal sharing (turn_scheduler.h): one tenant at a time runs, and the others count as inactive.
// Only the holder of the turn takes KV in use from others, above their floors also for parameters
// and, while nothing of its own can run for lack of KV, for one longest sequence. The next one's
// parameters are restored while the holder still runs, from 1. to 3.; those behind it wait. An
// activation's deadline counts from when its turn has begun: before, the wait is bounded by the
// turns of the others.
#ifndef PALIMPSEST_BROKER_CORE_ARBITER_H_
#define PALIMPSEST_BROKER_CORE_ARBITER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/core/arbiter_actions.h"
#include "broker/core/parameter_stage.h"
#include "broker/core/pool_config.h"
#include "broker/core/remap_log.h"
#include "broker/core/remap_policy.h"
#include "broker/core/slab_ledger.h"
#include "broker/core/victim_order.h"
#include "common/bytes.h"
#include "common/ids.h"
#include "common/rotation.h"

namespace palimpsest {

struct RotationOptions {
  // Whether layers of active tenants are taken. If not, those of returning workers come back.
  bool enabled = false;
  SlotPreference slots = SlotPreference::kAuto;
  // Most layers of a model that may be freed, as a share of those that can rotate.
  double cap = 0.5;
  // Whether layers come back while their tenant is active.
  bool reversion = true;
};

enum class Sharing : uint8_t {
  kSpatial,   // all tenants run at once
  kTemporal,  // one at a time
};

struct ArbiterOptions {
  uint32_t pool_slabs = 0;
  // Of one slab, on each GPU of the pool.
  Bytes slab_bytes = MiB(2);
  RotationOptions rotation;
  // Counts restarts of the broker on this node, from 1.
  uint32_t generation = 1;
  // A Revoke not answered by then costs the worker its life. Well above the longest step.
  absl::Duration revoke_deadline = absl::Seconds(10);
  // A Grant not mapped by then does too. Well above the longest restore.
  absl::Duration grant_deadline = absl::Seconds(60);
  // How long an activation may wait for all its slabs before it is refused.
  absl::Duration activation_deadline = absl::Seconds(20);
  // Activations that may wait at once; one more is refused.
  uint32_t max_waiting_activations = 64;
  // How long a worker may be without a connection before it is killed; also how long the sessions
  // of an earlier broker process have to return.
  absl::Duration reattach_grace = absl::Seconds(30);
  // How long after a kill the victim's slabs count as supply that is about to arrive. A process
  // that lingers for longer (in an uninterruptible call) holds nobody else up.
  absl::Duration kill_patience = absl::Seconds(5);
  // Restored parameters stay for max(min_residence, residence_restores * restore time).
  absl::Duration min_residence = absl::Seconds(2);
  double residence_restores = 5.0;
  // KV prefetch (above `needed`) leaves the parameters of a tenant alone that was active this
  // recently. Not so for a turn's holder with sequences that wait: under temporal sharing those of
  // others are not used before their turns, and are copied back sooner than sequences wait.
  absl::Duration prefetch_grace = absl::Seconds(5);
  // A worker that has not reported for this long is silent: what it said last no longer counts, and
  // nothing more is begun for it. Workers report every second.
  absl::Duration report_patience = absl::Seconds(3);
  // Slabs that prefetch of one session may have under way at a time when they must be revoked.
  uint32_t kv_step_slabs = 16;
  // Parameters come back unasked after free slabs and KV above target * (1 + hysteresis) covered
  // them for this long; for parameters that are missing, not for layers that rotate, without cached
  // blocks that are worth more than a reload.
  absl::Duration reversion_delay = absl::Seconds(2);
  double reversion_hysteresis = 0.25;
  // Which inactive tenants give parameters first, among those of one priority.
  VictimPolicy victims = VictimPolicy::kExpected;
  Sharing sharing = Sharing::kSpatial;
  // How long a turn lasts while others wait, and how long its holder may take to end it before it
  // is killed: well above the longest step.
  absl::Duration quantum = absl::Seconds(2);
  absl::Duration turn_deadline = absl::Seconds(10);
  // Whether a slab that returns to the tenant which had it last may skip scrubbing.
  bool skip_clean_for_same_tenant = false;
};

enum class ActivateReason : uint8_t { kRequest, kEager };

// As last reported by the worker; broker.proto's Report.
struct SessionLoad {
  bool active = false;
  uint32_t running_sequences = 0;
  uint32_t waiting_sequences = 0;
  uint32_t kv_slabs_used = 0;
  uint32_t kv_slabs_cached = 0;
  uint32_t kv_slabs_free = 0;
  // Of the GPU, beside slabs. Tells nobody but people.
  Bytes context;
  // Of steps without and with prompt chunks, smoothed; zero: none yet.
  absl::Duration decode_step;
  absl::Duration prefill_step;
  // Share of recent steps that had prompt chunks, 0 to 1.
  double prefill_share = 0.0;
  // Rate of copies from the image to parameter memory; 0: not measured.
  double image_bytes_per_second = 0.0;
  // Whether that is the link to another GPU, where the whole image has a copy.
  bool image_on_peer = false;
  // Since the worker's start: how long steps waited for rotating layers, and what was copied for
  // them.
  absl::Duration rotation_stall;
  uint64_t rotation_bytes = 0;
  // The same for parameters that came back, and for KV blocks that went the same way.
  uint64_t restored_bytes = 0;
  uint64_t block_bytes = 0;
  // What a slab of cached blocks saves when the tenant is used; zero: not known.
  absl::Duration cached_slab;
};

// A slab that a session has or had, as the journal or a returning worker says.
struct HeldSlab {
  SlabId slab;
  Epoch epoch;
  SlabRole role = SlabRole::kNone;
  RegionIndex region_index;
};

// A session of an earlier broker process.
struct JournalSession {
  SessionId session;
  // Nullopt: the tenant is not configured any more; the session is killed.
  std::optional<TenantId> tenant;
  std::vector<HeldSlab> slabs;
};

struct TenantSnapshot {
  TenantConfig config;
  // The session that is not ended, if any. `attached` tells whether its stream is up.
  std::optional<SessionId> session;
  bool attached = false;
  SessionLoad load;
  // Held (kGranted and kRevoking), by role.
  uint32_t parameter_slabs = 0;
  uint32_t kv_slabs = 0;
  uint32_t slot_slabs = 0;
  uint32_t workspace_slabs = 0;
  // As the worker was told last.
  Rotation rotation;
  bool rotation_in_flight = false;
  uint32_t image_slabs = 0;
  uint32_t quarantined_slabs = 0;
  uint32_t lost_slabs = 0;
  uint32_t grants_in_flight = 0;
  uint32_t revokes_in_flight = 0;
  bool activation_waiting = false;
  uint32_t kv_target_slabs = 0;
  uint32_t kv_needed_slabs = 0;
  // As the worker was told last (SendLinkLimit).
  double link_limit = 0;
  // Temporal sharing.
  bool has_turn = false;
  bool waits_for_turn = false;
};

struct ArbiterSnapshot {
  // By state; the sum is the pool. KV slabs that a Revoke asks for count as granted until their
  // holder has named them, and are told apart by revoking_kv_slabs.
  uint32_t pool_slabs = 0;
  uint32_t free_slabs = 0;
  uint32_t granted_slabs = 0;
  uint32_t revoking_slabs = 0;
  uint32_t cleaning_slabs = 0;
  uint32_t quarantined_slabs = 0;
  uint32_t lost_slabs = 0;
  uint32_t revoking_kv_slabs = 0;
  uint32_t waiting_activations = 0;
  std::vector<TenantSnapshot> tenants;  // by TenantId
};

class Arbiter {
 public:
  // Requires pool_slabs > 0 and generation > 0.
  explicit Arbiter(const ArbiterOptions& options);
  // For tests that put a faulty ledger in. Requires its size and generation to be the options'.
  Arbiter(const ArbiterOptions& options, std::unique_ptr<SlabLedger> ledger);
  ~Arbiter();
  Arbiter(const Arbiter&) = delete;
  Arbiter& operator=(const Arbiter&) = delete;

  // Ids count from 0. AlreadyExists for a name that is taken.
  absl::StatusOr<TenantId> AddTenant(const TenantConfig& config);

  // Slabs of the sessions become kLost; everything else is free at once, in fresh memory. Leave out
  // sessions whose process is known to be gone (a tenant may have had one before its last). Those
  // that neither return (OnReattach) nor go (OnProcessGone) within reattach_grace are killed.
  // InvalidArgument, with nothing changed, if the journal contradicts itself (a slab outside the
  // pool or held twice, two sessions of one tenant, an id or epoch that is not of an earlier
  // generation).
  absl::Status AdoptFromJournal(absl::Span<const JournalSession> sessions, absl::Time now);

  // A worker of the tenant opens a session; it holds nothing yet. `stages` cover the image in
  // execution order without gaps (InvalidArgument otherwise). Unavailable while an earlier session
  // of the tenant has not ended: its process must be gone first. FailedPrecondition if the image
  // and the workspace do not fit the quota. The workspace is granted at once, or as soon as an
  // earlier worker's is clean.
  absl::StatusOr<SessionId> OnAttach(TenantId tenant, absl::Span<const ParameterStage> stages,
                                     absl::Time now);

  // The same process comes back, after this broker or only the connection was replaced. `held` is
  // everything it has; what the ledger says beyond that was never received or already unmapped, and
  // is taken back. The session keeps its id and its slabs keep their epochs, so that a worker which
  // misses the answer can try again. Grants in flight count as mapped; revokes in flight are sent
  // again for what is still held. Activate, SetKvTarget and Report must be sent anew; until the
  // first Report the session counts as active. `rotation` is what its memory is mapped for; where
  // layers can rotate, its word on which of its parameter and slot slabs lies where counts, if that
  // makes sense. PermissionDenied, and the worker is killed, if it claims a slab that is not its
  // own under that epoch and role, or places that contradict each other, the ledger or the
  // rotation. NotFound for a session that is not known (the worker must attach anew),
  // FailedPrecondition for one that is connected.
  absl::Status OnReattach(SessionId session, TenantId tenant,
                          absl::Span<const ParameterStage> stages, absl::Span<const HeldSlab> held,
                          const Rotation& rotation, absl::Time now);

  // Messages of a worker; see broker.proto. Idempotent where the message is.
  void OnActivate(SessionId session, ActivateReason reason, absl::Time now);
  void OnSetKvTarget(SessionId session, uint32_t target_slabs, uint32_t needed_slabs,
                     absl::Time now);
  void OnRevokeDone(SessionId session, RevokeId revoke, absl::Span<const SlabId> slabs,
                    absl::Time now);
  // A part of such an answer; the rest follows with OnRevokeDone, before the revoke's deadline.
  void OnRevokePart(SessionId session, RevokeId revoke, absl::Span<const SlabId> slabs,
                    absl::Time now);
  void OnReleaseKv(SessionId session, absl::Span<const SlabId> slabs, absl::Time now);
  void OnGrantMapped(SessionId session, GrantId grant, absl::Duration map, absl::Duration restore,
                     absl::Time now);
  void OnRotationDone(SessionId session, RotationId rotation, absl::Time now);
  void OnReport(SessionId session, const SessionLoad& load, absl::Time now);
  // No step of this turn is in flight, and none will follow.
  void OnTurnEnded(SessionId session, TurnId turn, absl::Time now);
  // The worker says it unmapped everything. Its slabs come back when its process is gone, for which
  // it has reattach_grace.
  void OnDetach(SessionId session, absl::Time now);

  // The stream or the descriptor connection broke; the process may still be there.
  void OnConnectionLost(SessionId session, absl::Time now);
  // The pidfd says so. All slabs of the session are taken for cleaning; the session ends.
  void OnProcessGone(SessionId session, absl::Time now);

  // These slabs of CleanSlabs actions were scrubbed or retired. FailedPrecondition, with nothing
  // changed, for a slab that was not to be cleaned.
  absl::Status OnSlabsClean(absl::Span<const SlabId> slabs, absl::Time now);

  // Deadlines. Call at NextDeadline() or later; calling early is harmless.
  void OnTick(absl::Time now);
  // When OnTick has something to do next; InfiniteFuture if never.
  absl::Time NextDeadline() const;

  // What to do since the last call, in order.
  std::vector<ArbiterAction> TakeActions();

  ArbiterSnapshot Snapshot() const;
  // What was decided about victims, and why.
  const RemapLog& remap_log() const;
  const SlabLedger& ledger() const;

  // Recomputes every count from scratch and compares. O(pool); for tests and the operator's doctor.
  absl::Status CheckConsistency() const;

 private:
  class Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_ARBITER_H_
