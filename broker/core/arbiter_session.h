// What the arbiter knows about one session. Plain data with derived numbers; the arbiter keeps it
// in step with the ledger.
#ifndef PALIMPSEST_BROKER_CORE_ARBITER_SESSION_H_
#define PALIMPSEST_BROKER_CORE_ARBITER_SESSION_H_

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "broker/core/arbiter.h"
#include "broker/core/link_budget.h"
#include "broker/core/next_use.h"
#include "broker/core/rotation_plan.h"
#include "broker/core/slab_moves.h"

namespace palimpsest {

// kConnected <-> kDisconnected by OnConnectionLost and OnReattach; kLost -> kConnected by
// OnReattach after a restart; any of these -> kLeaving by OnDetach, by a kill or a missed grace
// period. A session ends when its process is gone, from any phase.
enum class SessionPhase : uint8_t { kConnected, kDisconnected, kLost, kLeaving };

// Who may take memory for what it runs now. In spatial sharing all run.
enum class TurnRank : uint8_t {
  kRuns,
  kNext,   // its parameters may be restored ahead
  kWaits,  // or has nothing to do
};

struct GrantInFlight {
  GrantId id;
  SlabRole role = SlabRole::kNone;
  uint32_t slabs = 0;
  MoveReason reason = MoveReason::kActivation;
  absl::Time sent;
  absl::Time deadline;
};

struct RevokeInFlight {
  struct Parameter {
    SlabId slab;
    RegionIndex index;
    bool returned = false;
  };
  RevokeId id;
  SlabRole role = SlabRole::kNone;
  std::vector<Parameter> parameters;
  // KV slabs still expected; fewer than asked after the holder gave some back by other means.
  uint32_t kv_outstanding = 0;
  // Slabs that came back in parts of the answer.
  uint32_t returned_slabs = 0;
  // Sent when the SetRotation in flight is answered; its deadline begins then.
  bool deferred = false;
  MoveReason reason = MoveReason::kActivation;
  absl::Time sent;
  absl::Time deadline;
};

struct RotationInFlight {
  RotationId id;
  // At no place any more, kRevoking until the answer.
  std::vector<SlabId> given_back;
  uint32_t moves = 0;
  // Stages have memory of their own again.
  bool reverts = false;
  MoveReason reason = MoveReason::kKvDemand;
  absl::Time sent;
  absl::Time deadline;
};

// How a session's layers rotate.
struct SessionRotation {
  // None if the worker cannot let layers rotate.
  RotatableLayers layers;
  // As the worker was told last; tables and counts are those behind the moves in flight.
  Rotation now;
  std::vector<std::optional<SlabId>> slots;  // spare ones behind those of the slots
  uint32_t slots_held = 0;
  std::vector<bool> rotates;  // by stage
  std::optional<RotationInFlight> in_flight;
  // What the spare slabs were granted for.
  Rotation reverts_to;
  Persistence reversion;

  uint32_t slot_places() const { return layers.slabs * static_cast<uint32_t>(now.slots); }
  // Places of the parameter region whose stages rotate.
  uint32_t places() const { return layers.slabs * static_cast<uint32_t>(now.stages.size()); }
  uint32_t spare() const { return slots_held - slot_places(); }
};

// A wish for all missing parameters. Not committed: it waits in the queue and holds no claim.
// Committed: enough slabs are free or on their way to cover what is missing.
struct Activation {
  MoveReason reason = MoveReason::kActivation;
  // The worker asked, so that a failure must be answered.
  bool asked = true;
  bool committed = false;
  uint64_t sequence = 0;  // age: smaller is older
  absl::Time deadline;
};

struct Session {
  SessionId id;
  std::optional<TenantId> tenant;  // nullopt: adopted from the journal, no longer configured
  TenantConfig config;
  SessionPhase phase = SessionPhase::kConnected;
  // When the process must have returned or gone; InfiniteFuture while connected or killed.
  absl::Time phase_deadline = absl::InfiniteFuture();
  // kLeaving: until when its slabs count as about to arrive.
  absl::Time arrival_credit_until = absl::InfinitePast();
  bool killed = false;

  std::vector<ParameterStage> stages;
  std::vector<uint32_t> stage_granted;            // per stage: its slabs in kGranted
  std::vector<std::optional<SlabId>> parameters;  // per place of the region: kGranted, kRevoking
  uint32_t parameters_granted = 0;
  uint32_t parameters_revoking = 0;
  uint32_t first_vacant = 0;  // no place before it is vacant
  bool parameters_taken = false;
  absl::Duration restore_time;  // of the parameters granted last, summed over one activation
  absl::Time irrevocable_until = absl::InfinitePast();
  std::optional<Activation> activation;
  std::optional<absl::Time> reversion_since;
  SessionRotation rotation;

  // Per place of the workspace: owned, in whatever state.
  std::vector<std::optional<SlabId>> workspace;

  uint32_t kv_held = 0;
  uint32_t kv_unmapped = 0;  // in grants in flight
  uint32_t kv_revoking = 0;  // sum of kv_outstanding
  uint32_t kv_idle = 0;      // cached or empty, as last reported, less what was given back since
  uint32_t kv_target = 0;
  uint32_t kv_needed = 0;
  uint64_t kv_sequence = 0;  // age of the demand
  bool pressure_sent = false;

  TurnRank turn = TurnRank::kRuns;
  SessionLoad load;
  LinkTraffic blocks;  // KV, on the link that parameters come over
  // What the worker was told last (SendLinkLimit).
  double link_limit = 0;
  // Temporal sharing: when it last had a turn.
  absl::Time last_active = absl::InfinitePast();
  NextUse next_use;  // of the tenant, with what its earlier sessions showed
  // When the worker counts as silent unless it reports before; not before it has reported once.
  absl::Time silent_from = absl::InfiniteFuture();
  std::vector<GrantInFlight> grants;
  std::vector<RevokeInFlight> revokes;

  bool connected() const { return phase == SessionPhase::kConnected; }
  bool runs() const { return turn == TurnRank::kRuns; }
  bool SilentAt(absl::Time now) const { return silent_from <= now; }
  uint32_t image_slabs() const { return static_cast<uint32_t>(parameters.size()); }
  uint32_t parameters_held() const { return parameters_granted + parameters_revoking; }
  uint32_t missing() const { return image_slabs() - rotation.places() - parameters_held(); }
  uint32_t workspace_held() const {
    return static_cast<uint32_t>(
        std::count_if(workspace.begin(), workspace.end(),
                      [](const std::optional<SlabId>& slab) { return slab.has_value(); }));
  }
  bool waiting() const { return activation.has_value() && !activation->committed; }
  // Slabs claimed by a committed activation and not delivered yet.
  uint32_t claim() const { return activation.has_value() && activation->committed ? missing() : 0; }
  // What it will hold once its revokes are answered.
  uint32_t held_after_revokes() const {
    return parameters_granted + rotation.slots_held + kv_held - kv_revoking + workspace_held();
  }
  uint32_t kv_after_revokes() const { return kv_held - kv_revoking; }
  // Room for the image, less the layers that are freed, and the workspace is always kept within the
  // quota.
  uint32_t kv_limit() const {
    const uint32_t freed = static_cast<uint32_t>(rotation.now.freed()) * rotation.layers.slabs;
    return config.quota_slabs -
           std::min(config.quota_slabs, image_slabs() - freed + config.workspace_slabs);
  }
  // The stage that a place of the parameter region belongs to.
  size_t StageOf(uint32_t place) const {
    const auto after = std::upper_bound(
        stages.begin(), stages.end(), place,
        [](uint32_t value, const ParameterStage& stage) { return value < stage.first_slab; });
    return static_cast<size_t>(after - stages.begin()) - 1;
  }
  // Whether the place has no slab and needs one.
  bool VacantAt(uint32_t place) const {
    return !parameters[place].has_value() && !rotation.rotates[StageOf(place)];
  }
  // Parameters are being granted, mapped or copied.
  bool Restoring() const {
    return std::any_of(grants.begin(), grants.end(), [](const GrantInFlight& grant) {
      return grant.role == SlabRole::kParameter;
    });
  }
  // Of parameters, or of slabs that are to become some.
  bool ParameterGrantInFlight() const {
    return std::any_of(grants.begin(), grants.end(), [](const GrantInFlight& grant) {
      return grant.role == SlabRole::kParameter || grant.role == SlabRole::kSlot;
    });
  }
  bool ParametersAtRest() const {
    return parameters_revoking == 0 && !rotation.in_flight.has_value() &&
           !ParameterGrantInFlight() && !activation.has_value();
  }
  SlabPlaces places() const { return {stages, parameters, rotation.slots}; }
  // KV slabs that a Revoke may ask for now.
  uint32_t RevocableKv() const {
    const uint32_t busy = kv_unmapped + kv_revoking;
    return connected() && kv_held > busy ? kv_held - busy : 0;
  }
  uint32_t StretchedTarget(double hysteresis) const {
    const double stretched = static_cast<double>(kv_target) * (1.0 + hysteresis);
    return std::max(kv_needed, static_cast<uint32_t>(std::min(stretched + 0.999999, 4294967295.0)));
  }
  // KV slabs that the session neither uses nor asks for, when its target is stretched by
  // `hysteresis`.
  uint32_t SurplusKv(double hysteresis) const {
    const uint32_t keep = StretchedTarget(hysteresis);
    const uint32_t above = kv_after_revokes() > keep ? kv_after_revokes() - keep : 0;
    const uint32_t idle = kv_idle > kv_revoking ? kv_idle - kv_revoking : 0;
    return std::min({RevocableKv(), above, idle});
  }
  // Its parameters are part of its floor, so that an activation can always be covered: from what
  // others hold above their floors and from its own KV.
  bool guaranteed() const { return config.floor_slabs > 0; }
  // What brings it to its floor, when `held` slabs of it are there or on their way.
  int64_t FloorGap(uint64_t held) const {
    return int64_t{config.floor_slabs} - static_cast<int64_t>(held);
  }
  uint32_t AboveFloor() const {
    return held_after_revokes() > config.floor_slabs ? held_after_revokes() - config.floor_slabs
                                                     : 0;
  }
};

// Whether a's activation goes before b's: the turn, priority, then age.
inline bool ActivatesBefore(const Session& a, const Session& b) {
  if (a.turn != b.turn) return a.turn < b.turn;
  if (a.config.priority != b.config.priority) return a.config.priority > b.config.priority;
  return a.activation->sequence < b.activation->sequence;
}

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_ARBITER_SESSION_H_
