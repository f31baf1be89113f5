// Revokes and grants that begin: what they name, and what is booked for them at once.
#include <optional>
#include <utility>
#include <variant>

#include "broker/core/arbiter_impl.h"

namespace palimpsest {

void Arbiter::Impl::StartRevokes(const SupplyPlan& plan, MoveReason reason, absl::Time now) {
  for (const Take& take : plan.takes) {
    if (take.kv_slabs > 0) RevokeKv(*take.victim, take.kv_slabs, reason, now);
    if (take.rotation.has_value()) Rotate(*take.victim, *take.rotation, reason, now);
    if (take.dissolves) Dissolve(*take.victim, reason, now);
    if (take.parameter_slabs > 0) RevokeParameters(*take.victim, take.first_stage, reason, now);
  }
}

bool Arbiter::Impl::EnlargeKvRevoke(Session& victim, uint32_t slabs, MoveReason reason) {
  for (RevokeInFlight& revoke : victim.revokes) {
    const bool of_this_pump = (revoke.id.value() & 0xffffffff) > ids_before_pump_ &&
                              (revoke.id.value() >> 32) == options_.generation;
    if (!of_this_pump || revoke.role != SlabRole::kKv || revoke.reason != reason) continue;
    for (ArbiterAction& action : actions_) {
      auto* const send = std::get_if<SendRevoke>(&action);
      if (send == nullptr || send->revoke != revoke.id) continue;
      send->kv_slabs += slabs;
      revoke.kv_outstanding += slabs;
      victim.kv_revoking += slabs;
      return true;
    }
  }
  return false;
}

void Arbiter::Impl::RevokeKv(Session& victim, uint32_t slabs, MoveReason reason, absl::Time now) {
  if (EnlargeKvRevoke(victim, slabs, reason)) return;
  RevokeInFlight revoke{.id = RevokeId(NextId()),
                        .role = SlabRole::kKv,
                        .parameters = {},
                        .kv_outstanding = slabs,
                        .reason = reason,
                        .sent = now,
                        .deadline = now + options_.revoke_deadline};
  victim.kv_revoking += slabs;
  Act(SendRevoke{.session = victim.id,
                 .revoke = revoke.id,
                 .role = SlabRole::kKv,
                 .region_indexes = {},
                 .kv_slabs = slabs,
                 .deadline = revoke.deadline,
                 .reason = reason});
  victim.revokes.push_back(std::move(revoke));
}

void Arbiter::Impl::RevokeParameters(Session& victim, uint32_t first_stage, MoveReason reason,
                                     absl::Time now) {
  RevokeInFlight revoke{.id = RevokeId(NextId()),
                        .role = SlabRole::kParameter,
                        .parameters = {},
                        .kv_outstanding = 0,
                        .reason = reason,
                        .sent = now,
                        .deadline = now + options_.revoke_deadline};
  revoke.deferred = victim.rotation.in_flight.has_value();
  if (revoke.deferred) revoke.deadline = absl::InfiniteFuture();
  SendRevoke send{.session = victim.id,
                  .revoke = revoke.id,
                  .role = SlabRole::kParameter,
                  .region_indexes = {},
                  .kv_slabs = 0,
                  .deadline = revoke.deadline,
                  .reason = reason};
  for (size_t stage = victim.stages.size(); stage > first_stage; --stage) {
    const ParameterStage& places = victim.stages[stage - 1];
    for (uint32_t i = places.first_slab; i < places.first_slab + places.slab_count; ++i) {
      const std::optional<SlabId> slab = victim.parameters[i];
      if (!slab.has_value() || ledger_->record(*slab).state != SlabState::kGranted) continue;
      MustSucceed(ledger_->BeginRevoke(*slab));
      --victim.parameters_granted;
      --victim.stage_granted[stage - 1];
      ++victim.parameters_revoking;
      revoke.parameters.push_back({.slab = *slab, .index = RegionIndex(i)});
      send.region_indexes.push_back(RegionIndex(i));
    }
  }
  if (revoke.parameters.empty()) return;
  if (!revoke.deferred) Act(std::move(send));
  victim.revokes.push_back(std::move(revoke));
}

SendGrant& Arbiter::Impl::PendingGrant(Session& session, SlabRole role, MoveReason reason,
                                       uint32_t count, absl::Time now) {
  for (SendGrant& grant : pending_grants_) {
    if (grant.session != session.id || grant.role != role || grant.reason != reason) continue;
    for (GrantInFlight& in_flight : session.grants) {
      if (in_flight.id == grant.grant) in_flight.slabs += count;
    }
    return grant;
  }
  pending_grants_.push_back(SendGrant{.session = session.id,
                                      .grant = GrantId(NextId()),
                                      .role = role,
                                      .slabs = {},
                                      .reason = reason});
  session.grants.push_back(GrantInFlight{.id = pending_grants_.back().grant,
                                         .role = role,
                                         .slabs = count,
                                         .reason = reason,
                                         .sent = now,
                                         .deadline = now + options_.grant_deadline});
  return pending_grants_.back();
}

void Arbiter::Impl::GrantParameters(Session& session, uint32_t count,
                                    absl::Span<const SlabId> uncleaned, absl::Time now) {
  SendGrant& grant =
      PendingGrant(session, SlabRole::kParameter, session.activation->reason, count, now);
  const SlabLedger::Grantee to{session.id, *session.tenant, SlabRole::kParameter};
  const Epoch epoch = ledger_->NextEpoch();
  for (uint32_t i = 0; i < count; ++i) {
    uint32_t& place = session.first_vacant;
    while (!session.VacantAt(place)) ++place;
    const RegionIndex index(place);
    const SlabId slab = i < uncleaned.size() ? uncleaned[i] : *ledger_->FirstFree();
    MustSucceed(i < uncleaned.size() ? ledger_->GrantUncleaned(slab, to, epoch, index)
                                     : ledger_->Grant(slab, to, epoch, index));
    session.parameters[place] = slab;
    ++session.parameters_granted;
    ++session.stage_granted[session.StageOf(place)];
    grant.slabs.push_back(GrantedSlab{.slab = slab, .epoch = epoch, .region_index = index});
  }
}

void Arbiter::Impl::GrantKv(Session& session, uint32_t count, absl::Time now) {
  SendGrant& grant = PendingGrant(session, SlabRole::kKv, MoveReason::kKvDemand, count, now);
  const SlabLedger::Grantee to{session.id, *session.tenant, SlabRole::kKv};
  const Epoch epoch = ledger_->NextEpoch();
  for (uint32_t i = 0; i < count; ++i) {
    const SlabId slab = *ledger_->FirstFree();
    MustSucceed(ledger_->Grant(slab, to, epoch, RegionIndex()));
    grant.slabs.push_back(GrantedSlab{.slab = slab, .epoch = epoch, .region_index = RegionIndex()});
  }
  session.kv_held += count;
  session.kv_unmapped += count;
}

}  // namespace palimpsest
