// Which layers rotate: how a session's slabs move between parameters and slots, and when layers
// come back.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "broker/core/arbiter_impl.h"
#include "broker/core/layer_supply.h"

namespace palimpsest {
namespace {

// For the log: layers come back, of memory that is free.
SupplyPlan WithLayerReversion(const Session& session, uint32_t slabs, const RotationInputs& inputs,
                              absl::Time now) {
  SupplyPlan plan;
  plan.candidates.push_back({.tenant = *session.tenant,
                             .rule = RemapRule::kReversion,
                             .outcome = RemapOutcome::kTaken,
                             .slabs = slabs,
                             .priority = session.config.priority,
                             .idle = now - session.last_active,
                             .rotation = inputs});
  return plan;
}

// How much of `need` is not there.
uint32_t Lacking(uint32_t need, int64_t spare) {
  return static_cast<uint32_t>(std::max<int64_t>(need - spare, 0));
}

}  // namespace

void Arbiter::Impl::ForgetPlaces(Session& session) {
  session.parameters.assign(session.parameters.size(), std::nullopt);
  session.stage_granted.assign(session.stages.size(), 0);
  session.parameters_granted = session.parameters_revoking = session.first_vacant = 0;
  session.rotation.slots.clear();
  session.rotation.slots_held = 0;
}

void Arbiter::Impl::PutAt(Session& session, SlabId slab, SlabRole role, RegionIndex index,
                          bool granted) {
  const uint32_t place = index.value();
  if (role == SlabRole::kSlot) {
    std::vector<std::optional<SlabId>>& slots = session.rotation.slots;
    if (place >= slots.size()) slots.resize(place + 1);
    slots[place] = slab;
    ++session.rotation.slots_held;
    return;
  }
  session.parameters[place] = slab;
  if (!granted) {
    ++session.parameters_revoking;
    return;
  }
  ++session.parameters_granted;
  ++session.stage_granted[session.StageOf(place)];
}

void Arbiter::Impl::TakeFromPlace(Session& session, SlabId slab) {
  const SlabRecord& record = ledger_->record(slab);
  const uint32_t place = record.region_index.value();
  if (record.role == SlabRole::kSlot) {
    session.rotation.slots[place].reset();
    --session.rotation.slots_held;
    return;
  }
  session.parameters[place].reset();
  --session.parameters_granted;
  --session.stage_granted[session.StageOf(place)];
}

void Arbiter::Impl::SetRotating(Session& session, const Rotation& rotation) {
  session.rotation.now = rotation;
  session.rotation.rotates.assign(session.stages.size(), false);
  for (const int32_t stage : rotation.stages) session.rotation.rotates[stage] = true;
  session.first_vacant = 0;
}

void Arbiter::Impl::Rotate(Session& session, const Rotation& to, MoveReason reason,
                           absl::Time now) {
  const auto moves = PlanMoves(session.places(), session.rotation.now, to);
  MustSucceed(moves.status());
  const bool reverts = to.freed() < session.rotation.now.freed();
  StartRotation(session, to, *moves, reason, now);
  session.rotation.in_flight->reverts = reverts;
}

void Arbiter::Impl::Dissolve(Session& session, MoveReason reason, absl::Time now) {
  StartRotation(session, Rotation(), PlanDissolution(session.places()), reason, now);
  session.parameters_taken = true;
}

void Arbiter::Impl::StartRotation(Session& session, const Rotation& to,
                                  const std::vector<SlabMove>& moves, MoveReason reason,
                                  absl::Time now) {
  RotationInFlight in_flight{.id = RotationId(NextId()),
                             .given_back = {},
                             .moves = static_cast<uint32_t>(moves.size()),
                             .reason = reason,
                             .sent = now,
                             .deadline = now + options_.revoke_deadline};
  for (const SlabMove& move : moves) TakeFromPlace(session, move.slab);
  for (const SlabMove& move : moves) {
    if (move.role == SlabRole::kNone) {
      MustSucceed(ledger_->BeginRevoke(move.slab));
      in_flight.given_back.push_back(move.slab);
      continue;
    }
    MustSucceed(ledger_->Move(move.slab, move.role, move.place));
    PutAt(session, move.slab, move.role, move.place, true);
  }
  SetRotating(session, to);
  session.rotation.slots.resize(session.rotation.slot_places());
  session.rotation.reversion.Reset();
  Act(SendSetRotation{.session = session.id,
                      .id = in_flight.id,
                      .rotation = to,
                      .moves = moves,
                      .deadline = in_flight.deadline,
                      .reason = reason});
  session.rotation.in_flight = std::move(in_flight);
}

void Arbiter::Impl::OnRotationDone(SessionId id, RotationId rotation, absl::Time now) {
  Session* const session = FindConnected(id);
  if (session == nullptr) return;
  std::optional<RotationInFlight>& in_flight = session->rotation.in_flight;
  if (in_flight.has_value() && in_flight->id == rotation) {
    const RotationInFlight done = *std::exchange(in_flight, std::nullopt);
    Act(TransferFinished{.kind = TransferKind::kRotate,
                         .tenant = *session->tenant,
                         .role = SlabRole::kSlot,
                         .slabs = done.moves,
                         .duration = now - done.sent,
                         .reason = done.reason,
                         .finished_at = now});
    if (done.reverts) {
      session->irrevocable_until =
          std::max(session->irrevocable_until, now + options_.min_residence);
    }
    TakeBack(*session, done.given_back, done.reason, now);
    SendDeferredRevokes(*session, now);
  } else if (!WasIssued(rotation.value())) {
    Kill(*session,
         absl::StrCat("protocol violation: RotationDone ", rotation.value(),
                      ", which was never asked"),
         now);
  }
  Pump(now);
}

void Arbiter::Impl::SendDeferredRevokes(Session& session, absl::Time now) {
  for (RevokeInFlight& revoke : session.revokes) {
    if (!std::exchange(revoke.deferred, false)) continue;
    revoke.deadline = now + options_.revoke_deadline;
    SendRevoke send{.session = session.id,
                    .revoke = revoke.id,
                    .role = SlabRole::kParameter,
                    .region_indexes = {},
                    .kv_slabs = 0,
                    .deadline = revoke.deadline,
                    .reason = revoke.reason};
    for (const RevokeInFlight::Parameter& parameter : revoke.parameters) {
      if (!parameter.returned) send.region_indexes.push_back(parameter.index);
    }
    Act(std::move(send));
  }
}

void Arbiter::Impl::VoidRotation(Session& session) {
  session.rotation.in_flight.reset();
  session.rotation.reversion.Reset();
  std::erase_if(session.revokes, [](const RevokeInFlight& revoke) { return revoke.deferred; });
}

void Arbiter::Impl::UseSpareSlabs(absl::Time now) {
  for (Session* session : list_) {
    const SessionRotation& rotation = session->rotation;
    if (!session->connected() || rotation.spare() == 0 || !session->ParametersAtRest()) continue;
    const RotatableLayers& layers = rotation.layers;
    const int32_t freed = rotation.now.freed();
    int32_t less = freed;
    // Stages that are missing cannot take part; then the spare slabs only go back.
    if (freed > 0 && session->missing() == 0) {
      less -= std::min(freed, static_cast<int32_t>(rotation.spare() / layers.slabs));
    }
    Rotation to = rotation.now;
    if (less < freed) {
      to = rotation.reverts_to.freed() == less
               ? rotation.reverts_to
               : EvenRotation(layers.first_stage, layers.layers, less, rotation.now.slots);
    }
    Rotate(*session, to, MoveReason::kReversion, now);
  }
}

uint32_t Arbiter::Impl::KvReserve() const {
  uint64_t reserve = 0;
  for (const Session* session : list_) {
    if (!session->connected() || !session->load.active) continue;
    const uint32_t target =
        std::min(session->StretchedTarget(options_.reversion_hysteresis), session->kv_limit());
    const uint32_t held = session->kv_after_revokes();
    reserve += target > held ? target - held : 0;
  }
  return static_cast<uint32_t>(std::min<uint64_t>(reserve, options_.pool_slabs));
}

void Arbiter::Impl::RevertLayers(uint32_t supply, absl::Time now) {
  std::vector<Session*> candidates;
  for (Session* session : list_) {
    if (session->connected() && !session->SilentAt(now) && session->rotation.now.freed() > 0 &&
        session->missing() == 0 && session->ParametersAtRest()) {
      candidates.push_back(session);
    } else {
      session->rotation.reversion.Reset();
    }
  }
  if (candidates.empty()) return;
  std::stable_sort(candidates.begin(), candidates.end(), [](const Session* a, const Session* b) {
    return a->config.priority > b->config.priority;
  });
  int64_t spare = int64_t{supply} - KvReserve();
  for (Session* session : candidates) {
    if (!RevertLayersOf(*session, spare, now)) session->rotation.reversion.Reset();
  }
}

bool Arbiter::Impl::RevertLayersOf(Session& session, int64_t& spare, absl::Time now) {
  SessionRotation& rotation = session.rotation;
  const RotatableLayers& layers = rotation.layers;
  const int32_t freed = rotation.now.freed();
  const uint32_t all = static_cast<uint32_t>(freed) * layers.slabs;
  // Cached blocks go before layers are taken, whatever they save; so layers come back before them.
  SupplyRequest request{.requester = &session,
                        .need = Lacking(all, spare),
                        .activation = true,
                        .surplus_only = true,
                        .any_cached = true,
                        .hysteresis = options_.reversion_hysteresis};
  const uint32_t own = session.SurplusKv(options_.reversion_hysteresis);
  const auto there = static_cast<uint32_t>(
      std::clamp<int64_t>(spare + PlanFor(request, now).slabs, 0,
                          std::min(all, QuotaRoom(session) + session.kv_revoking + own)));
  RotationInputs inputs = GrantedRotation(list_, session, Rules(), now);
  const Reversion reversion =
      ChooseReversion(inputs.cost, RulesOf(options_.rotation), freed, rotation.now.slots, there);
  const bool wanted = reversion.reason == ReversionReason::kCap || options_.rotation.reversion;
  if (reversion.reason == ReversionReason::kNone || !wanted) return false;
  // As much of it as there is.
  const int32_t least = freed - static_cast<int32_t>(there / layers.slabs);
  inputs.choice = reversion.to;
  if (reversion.to.freed < least) inputs.choice = {.freed = least, .slots = rotation.now.slots};
  const int32_t less = inputs.choice.freed;
  if (less >= freed) return false;
  const uint32_t need = static_cast<uint32_t>(freed - less) * layers.slabs;
  request.need = Lacking(need, spare);
  spare -= need;
  if (!rotation.reversion.Observe(true, now, options_.reversion_delay)) {
    wake_ = std::min(wake_, rotation.reversion.Due(options_.reversion_delay));
    return true;
  }
  if (QuotaRoom(session) < need) {
    const uint32_t room = QuotaRoom(session) + session.kv_revoking;
    const uint32_t more = std::min(need - std::min(need, room), own);
    if (more > 0) RevokeKv(session, more, MoveReason::kReversion, now);
    return true;
  }
  if (request.need > 0 || UnclaimedFree() < need) {
    StartRevokes(PlanFor(request, now), MoveReason::kReversion, now);
    return true;
  }
  rotation.reverts_to = EvenRotation(layers.first_stage, layers.layers, less, inputs.choice.slots);
  GrantSpare(session, need, now);
  LogPlan(request, WithLayerReversion(session, need, inputs, now), true, MoveReason::kReversion,
          now);
  return false;
}

void Arbiter::Impl::RaiseKvLimit(Session& session, uint32_t slabs, uint32_t& supply,
                                 absl::Time now) {
  SupplyPlan plan;
  for (const LayerOffer& offer :
       PlanLayers(list_, session, LayersOf::kRequester, slabs, Rules(), now)) {
    plan.candidates.push_back(CandidateOf(offer, now));
    plan.slabs += offer.slabs;
    if (offer.slabs > 0) Rotate(session, offer.rotation, MoveReason::kKvDemand, now);
  }
  supply += plan.slabs;
  if (plan.slabs < slabs && session.irrevocable_until > now) {
    wake_ = std::min(wake_, session.irrevocable_until);
  }
  if (plan.candidates.empty()) return;
  const SupplyRequest request{.requester = &session, .need = slabs};
  LogPlan(request, std::move(plan), true, MoveReason::kKvDemand, now);
}

void Arbiter::Impl::GrantSpare(Session& session, uint32_t count, absl::Time now) {
  SendGrant& grant = PendingGrant(session, SlabRole::kSlot, MoveReason::kReversion, count, now);
  const SlabLedger::Grantee to{session.id, *session.tenant, SlabRole::kSlot};
  const Epoch epoch = ledger_->NextEpoch();
  for (uint32_t i = 0; i < count; ++i) {
    const RegionIndex index(session.rotation.slot_places() + i);
    const SlabId slab = *ledger_->FirstFree();
    MustSucceed(ledger_->Grant(slab, to, epoch, index));
    PutAt(session, slab, SlabRole::kSlot, index, true);
    grant.slabs.push_back(GrantedSlab{.slab = slab, .epoch = epoch, .region_index = index});
  }
}

}  // namespace palimpsest
