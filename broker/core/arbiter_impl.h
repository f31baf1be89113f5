// The arbiter's inside, shared by its source files: arbiter.cc (interface, snapshot, checks),
// arbiter_sessions.cc (who is there), arbiter_messages.cc (what workers say), arbiter_turns.cc (who
// may run), arbiter_pump.cc (who gets what), arbiter_rotation.cc (which layers rotate),
// arbiter_link.cc (how fast others copy meanwhile).
//
// Each event changes the sessions and the ledger and then calls Pump, which looks at the whole
// state and moves it on: demand is never remembered as promises to particular slabs, but recomputed
// from what sessions miss and what is free or on its way. So nothing can leak when plans fall
// through. Cost of an event: O(slabs moved + sessions log sessions + stages of victims).
#ifndef PALIMPSEST_BROKER_CORE_ARBITER_IMPL_H_
#define PALIMPSEST_BROKER_CORE_ARBITER_IMPL_H_

#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "broker/core/arbiter.h"
#include "broker/core/arbiter_session.h"
#include "broker/core/supply_planner.h"
#include "broker/core/turn_scheduler.h"

namespace palimpsest {

// For transitions that the caller has checked: a failure is a broken invariant, and aborts.
void MustSucceed(const absl::Status& status);

class Arbiter::Impl {
 public:
  Impl(const ArbiterOptions& options, std::unique_ptr<SlabLedger> ledger);

  absl::StatusOr<TenantId> AddTenant(const TenantConfig& config);
  absl::Status AdoptFromJournal(absl::Span<const JournalSession> sessions, absl::Time now);
  absl::StatusOr<SessionId> OnAttach(TenantId tenant, absl::Span<const ParameterStage> stages,
                                     absl::Time now);
  absl::Status OnReattach(SessionId session, TenantId tenant,
                          absl::Span<const ParameterStage> stages, absl::Span<const HeldSlab> held,
                          const Rotation& rotation, absl::Time now);
  void OnActivate(SessionId session, ActivateReason reason, absl::Time now);
  void OnSetKvTarget(SessionId session, uint32_t target, uint32_t needed, absl::Time now);
  void OnRevokeDone(SessionId session, RevokeId revoke, absl::Span<const SlabId> slabs,
                    absl::Time now);
  void OnRevokePart(SessionId session, RevokeId revoke, absl::Span<const SlabId> slabs,
                    absl::Time now);
  void OnReleaseKv(SessionId session, absl::Span<const SlabId> slabs, absl::Time now);
  void OnGrantMapped(SessionId session, GrantId grant, absl::Duration map, absl::Duration restore,
                     absl::Time now);
  void OnRotationDone(SessionId session, RotationId rotation, absl::Time now);
  void OnReport(SessionId session, const SessionLoad& load, absl::Time now);
  void OnTurnEnded(SessionId session, TurnId turn, absl::Time now);
  void OnDetach(SessionId session, absl::Time now);
  void OnConnectionLost(SessionId session, absl::Time now);
  void OnProcessGone(SessionId session, absl::Time now);
  absl::Status OnSlabsClean(absl::Span<const SlabId> slabs, absl::Time now);
  void OnTick(absl::Time now);
  absl::Time NextDeadline() const;
  std::vector<ArbiterAction> TakeActions() { return std::exchange(actions_, {}); }
  ArbiterSnapshot Snapshot() const;
  absl::Status CheckConsistency() const;
  const SlabLedger& ledger() const { return *ledger_; }
  const RemapLog& remap_log() const { return remap_log_; }

 private:
  struct Tenant {
    TenantConfig config;
    std::optional<SessionId> session;  // not ended
    NextUse next_use;                  // as its last session left it
  };
  // Of a slab that is being cleaned.
  struct Returned {
    absl::Time at;
    MoveReason reason = MoveReason::kSurplus;
  };

  // In this order, each by priority, then age. Taking by force follows the same order (see
  // supply_planner.cc), so that nobody takes what would go back to its victim at once.
  enum class KvPass { kFloor, kNeeded, kPrefetch };
  struct KvDemand {
    Session* session = nullptr;
    // Of what it wants, slabs that are on their way.
    uint32_t promised = 0;
    bool unmet = false;
  };

  // arbiter_sessions.cc
  Session* Find(SessionId session);
  Session* FindConnected(SessionId session);
  absl::Status CheckStages(const TenantConfig& config,
                           absl::Span<const ParameterStage> stages) const;
  absl::Status CheckJournal(absl::Span<const JournalSession> sessions) const;
  absl::Status CheckHeld(const Session& session, absl::Span<const ParameterStage> stages,
                         absl::Span<const HeldSlab> held, const Rotation& rotation);
  absl::Status CheckHeldSlab(const Session& session, uint32_t image, bool rotatable,
                             const HeldSlab& slab) const;
  void SetStages(Session& session, absl::Span<const ParameterStage> stages);
  void Readmit(Session& session, absl::Span<const HeldSlab> held, const Rotation& rotation,
               absl::Time now);
  // Puts a parameter or slot slab of a returning worker where the worker has it.
  void ReadmitPlaced(Session& session, const HeldSlab& held, bool asked_back);
  void ResendRevokes(Session& session, absl::Time now);
  // Stops dealing with the session; its slabs wait in quarantine for the end of its process.
  void Leave(Session& session, absl::Time now);
  void Kill(Session& session, const std::string& why, absl::Time now);
  bool FirstSight(SlabId slab);  // since NewSight; false for a repetition
  void NewSight() { ++sight_; }

  // arbiter_messages.cc
  // Whether the session holds each slab once, in that role, mapped or being revoked; otherwise it
  // is killed.
  bool CheckOwned(Session& session, absl::Span<const SlabId> slabs, SlabRole role,
                  const std::string& what, absl::Time now);
  // Whether the slabs are among those that the revoke asked for, each named once.
  bool CheckAsked(Session& session, const RevokeInFlight& revoke, absl::Span<const SlabId> slabs,
                  const std::string& what, absl::Time now);
  bool CheckAnswer(Session& session, const RevokeInFlight& revoke, absl::Span<const SlabId> slabs,
                   absl::Time now);
  void OnStaleRevokeDone(Session& session, RevokeId revoke, absl::Span<const SlabId> slabs,
                         absl::Time now);
  // Takes slabs that the session holds (checked by the caller) and has them cleaned. Keeps counts,
  // revokes in flight and the parameter map in step.
  void TakeBack(Session& session, absl::Span<const SlabId> slabs, MoveReason reason,
                absl::Time now);
  // Slabs just given back go on uncleaned to the same tenant's activation, if it is next in turn;
  // the others stay in `slabs`.
  void ReuseUncleaned(Session& session, std::vector<SlabId>& slabs, absl::Time now);
  void ForgetWorkspace(Session& session, SlabId slab, RegionIndex index);
  void ForgetParameter(Session& session, SlabId slab, SlabState state, RegionIndex index);
  // KV revokes never expect more than the session holds.
  void ClampKvRevokes(Session& session);
  bool WasIssued(uint64_t id) const;

  // arbiter_rotation.cc
  // Empties every place of parameters and slots; what lies where is told anew.
  void ForgetPlaces(Session& session);
  void PutAt(Session& session, SlabId slab, SlabRole role, RegionIndex index, bool granted);
  void TakeFromPlace(Session& session, SlabId slab);
  void SetRotating(Session& session, const Rotation& rotation);
  void Rotate(Session& session, const Rotation& to, MoveReason reason, absl::Time now);
  // Stops rotating and gives back all slots; stages that rotated are missing.
  void Dissolve(Session& session, MoveReason reason, absl::Time now);
  void StartRotation(Session& session, const Rotation& to, const std::vector<SlabMove>& moves,
                     MoveReason reason, absl::Time now);
  void SendDeferredRevokes(Session& session, absl::Time now);
  void VoidRotation(Session& session);
  // Moves spare slabs to where they are needed.
  void UseSpareSlabs(absl::Time now);
  // Brings layers back for which there is `supply` or surplus KV.
  void RevertLayers(uint32_t supply, absl::Time now);
  // Whether the slabs are there or on their way; what they take is deducted from `spare`, the
  // supply beyond KvReserve, which is negative while that is not covered.
  bool RevertLayersOf(Session& session, int64_t& spare, absl::Time now);
  // Frees own layers of a session whose KV is kept from growing by its quota alone.
  void RaiseKvLimit(Session& session, uint32_t slabs, uint32_t& supply, absl::Time now);
  void GrantSpare(Session& session, uint32_t count, absl::Time now);
  // Free slabs that growth of KV may ask for soon, and that no layer should come back for.
  uint32_t KvReserve() const;

  // arbiter_link.cc
  // Tells sessions how fast they may restore and move blocks, where that has changed.
  void ShareLink(absl::Time now);

  // arbiter_turns.cc
  // Begins and ends turns, and ranks the sessions accordingly. Nothing in spatial sharing.
  void HandOutTurns(absl::Time now);
  std::vector<TurnCandidate> TurnCandidates(absl::Time now) const;
  bool HasTurn(const Session& session) const {
    return options_.sharing == Sharing::kTemporal && session.runs();
  }
  // KV slabs without which its turn is of no use: those of one sequence, while no sequence has any.
  uint32_t RoomToRun(const Session& session) const {
    return HasTurn(session) && session.load.kv_slabs_used == 0 ? session.config.sequence_slabs : 0;
  }
  // What may be taken by force for `need` slabs of parameters, when it has or will have `held`: up
  // to its floor, and all of it during its turn, which would be of no use otherwise.
  int64_t ForcedGap(const Session& session, uint64_t held, uint32_t need) const;
  // It could not be given all of its parameters yet.
  bool NextLacksMemory() const;
  void Carry(const TurnDecision& decision, absl::Time now);

  // arbiter_pump.cc
  void Pump(absl::Time now);
  void DeliverWorkspaces(absl::Time now);
  void DeliverActivations(absl::Time now);
  // Makes up for supply that did not arrive, so that claims stay covered.
  void TopUpActivations(absl::Time now);
  // The first activation in the queue that cannot be covered, if any. Of those behind it only the
  // ones with a floor are tried: floors are guaranteed.
  const Session* CommitActivations(absl::Time now);
  bool TryCommit(Session& session, absl::Time now);
  void RefuseActivation(Session& session, const std::string& why, absl::Time now);
  // Returns the supply that is left. Nobody may outrun `blocked`, except for its own needs.
  uint32_t ServeKv(const Session* blocked, absl::Time now);
  void ServeKvDemand(KvDemand& demand, KvPass pass, const Session* blocked, uint32_t& supply,
                     absl::Time now);
  // Takes from victims what supply does not cover.
  void RevokeForKv(KvDemand& demand, KvPass pass, uint32_t need, uint32_t& supply, absl::Time now);
  // Returns the supply that is left.
  uint32_t Revert(uint32_t supply, absl::Time now);
  void TakeQuotaExcess(absl::Time now);
  SupplyRules Rules() const {
    return {.victims = options_.victims,
            .slab_bytes = options_.slab_bytes,
            .rotation = options_.rotation};
  }
  SupplyPlan PlanFor(const SupplyRequest& request, absl::Time now) const;
  void StartRevokes(const SupplyPlan& plan, MoveReason reason, absl::Time now);
  // Logs a plan that was begun, or that found nothing or too little.
  void LogPlan(const SupplyRequest& request, SupplyPlan plan, bool begun, MoveReason reason,
               absl::Time now);
  void RevokeKv(Session& victim, uint32_t slabs, MoveReason reason, absl::Time now);
  // A victim gets one KV revoke per Pump and reason: it quiesces once.
  bool EnlargeKvRevoke(Session& victim, uint32_t slabs, MoveReason reason);
  void RevokeParameters(Session& victim, uint32_t first_stage, MoveReason reason, absl::Time now);
  // Fills vacant places in stage order, with `uncleaned` slabs of the same tenant or with free
  // ones.
  void GrantParameters(Session& session, uint32_t count, absl::Span<const SlabId> uncleaned,
                       absl::Time now);
  void GrantKv(Session& session, uint32_t count, absl::Time now);
  // The grant of this Pump to the session in that role; `count` slabs are about to be added.
  SendGrant& PendingGrant(Session& session, SlabRole role, MoveReason reason, uint32_t count,
                          absl::Time now);
  // Somebody wants more than there is: wakes up when a victim's protection ends.
  // KV of a turn's holder with which each of those who wait for turns still has room for its image
  // when its turn comes, beside the KV that others keep.
  uint32_t RoomBesideImages(const Session& holder) const;
  void WatchVictims(const Session& requester, bool prefetch, absl::Time now);
  std::vector<Session*> ActivationOrder() const;
  uint32_t ActivationClaims() const;
  // Workspace slabs that tenants do not hold yet.
  uint32_t Reserved() const;
  uint32_t Claims() const { return ActivationClaims() + Reserved(); }
  uint32_t UnclaimedFree() const;
  // Slabs on their way to being free.
  uint32_t Arriving(absl::Time now) const;
  // Free or arriving, and not claimed.
  uint32_t Supply(absl::Time now) const;
  uint32_t QuotaRoom(const Session& session) const;

  void Refresh();  // list_ after sessions_ changed
  uint64_t NextId() { return (uint64_t{options_.generation} << 32) | ++id_counter_; }
  template <typename Action>
  void Act(Action action) {
    actions_.emplace_back(std::in_place_type<Action>, std::move(action));
  }

  const ArbiterOptions options_;
  std::unique_ptr<SlabLedger> ledger_;
  std::vector<Tenant> tenants_;
  std::map<SessionId, std::unique_ptr<Session>> sessions_;
  std::vector<Session*> list_;  // sessions_ in order
  TurnScheduler turns_;
  uint32_t id_counter_ = 0;  // sessions, grants and revokes
  uint32_t ids_before_pump_ = 0;
  uint64_t sequence_ = 0;
  std::vector<Returned> returned_;  // by slab
  std::vector<uint32_t> seen_;      // by slab: the sight_ in which it was seen
  uint32_t sight_ = 0;
  absl::Time wake_ = absl::InfiniteFuture();
  std::vector<SendGrant> pending_grants_;
  RemapLog remap_log_;
  std::vector<ArbiterAction> actions_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_ARBITER_IMPL_H_
