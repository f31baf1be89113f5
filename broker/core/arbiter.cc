// The interface, the clock's events, and the views from outside.
#include "broker/core/arbiter.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "absl/strings/str_cat.h"
#include "broker/core/arbiter_impl.h"

namespace palimpsest {

absl::string_view MoveReasonName(MoveReason reason) {
  switch (reason) {
    case MoveReason::kActivation:
      return "activation";
    case MoveReason::kEager:
      return "eager";
    case MoveReason::kKvDemand:
      return "kv_demand";
    case MoveReason::kReversion:
      return "reversion";
    case MoveReason::kQuota:
      return "quota";
    case MoveReason::kSurplus:
      return "surplus";
    case MoveReason::kAttach:
      return "attach";
  }
  return "invalid";
}

void MustSucceed(const absl::Status& status) {
  if (status.ok()) return;
  std::fprintf(stderr, "the arbiter and its ledger disagree: %s\n", status.ToString().c_str());
  std::abort();
}

Arbiter::Impl::Impl(const ArbiterOptions& options, std::unique_ptr<SlabLedger> ledger)
    : options_(options),
      ledger_(std::move(ledger)),
      turns_({.quantum = options.quantum,
              .start_patience = options.activation_deadline,
              .end_deadline = options.turn_deadline,
              .generation = options.generation}),
      returned_(options.pool_slabs),
      seen_(options.pool_slabs, 0) {
  if (options.pool_slabs == 0 || options.generation == 0 ||
      ledger_->pool_slabs() != options.pool_slabs || ledger_->generation() != options.generation) {
    MustSucceed(absl::InvalidArgumentError("a pool, a generation and a ledger of both are needed"));
  }
}

void Arbiter::Impl::OnTick(absl::Time now) {
  const auto due = [now](const auto& in_flight) { return in_flight.deadline <= now; };
  for (Session* session : list_) {
    if (session->arrival_credit_until <= now) session->arrival_credit_until = absl::InfinitePast();
    if (session->phase_deadline <= now) {
      Kill(*session,
           session->phase == SessionPhase::kLeaving
               ? "it detached but its process did not exit in time"
               : "it did not return within the grace period",
           now);
    }
    const auto revoke = std::find_if(session->revokes.begin(), session->revokes.end(), due);
    if (revoke != session->revokes.end()) {
      Kill(*session,
           absl::StrCat("revoke ", revoke->id.value(), " of ", SlabRoleName(revoke->role),
                        " slabs was not answered within ",
                        absl::FormatDuration(revoke->deadline - revoke->sent)),
           now);
    }
    const auto grant = std::find_if(session->grants.begin(), session->grants.end(), due);
    if (grant != session->grants.end()) {
      Kill(*session,
           absl::StrCat("grant ", grant->id.value(), " of ", grant->slabs, " ",
                        SlabRoleName(grant->role), " slabs was not mapped within ",
                        absl::FormatDuration(options_.grant_deadline)),
           now);
    }
    const std::optional<RotationInFlight>& rotation = session->rotation.in_flight;
    if (rotation.has_value() && rotation->deadline <= now) {
      Kill(*session,
           absl::StrCat("SetRotation ", rotation->id.value(), " was not answered within ",
                        absl::FormatDuration(rotation->deadline - rotation->sent)),
           now);
    }
    if (session->activation.has_value() && session->activation->deadline <= now) {
      RefuseActivation(*session,
                       absl::StrCat("waited ", absl::FormatDuration(options_.activation_deadline)),
                       now);
    }
  }
  Pump(now);
}

absl::Time Arbiter::Impl::NextDeadline() const {
  absl::Time next = wake_;
  for (const Session* session : list_) {
    next = std::min(next, session->phase_deadline);
    if (session->arrival_credit_until > absl::InfinitePast()) {
      next = std::min(next, session->arrival_credit_until);
    }
    if (session->activation.has_value()) next = std::min(next, session->activation->deadline);
    for (const RevokeInFlight& revoke : session->revokes) next = std::min(next, revoke.deadline);
    for (const GrantInFlight& grant : session->grants) next = std::min(next, grant.deadline);
    if (session->rotation.in_flight.has_value()) {
      next = std::min(next, session->rotation.in_flight->deadline);
    }
  }
  return next;
}

ArbiterSnapshot Arbiter::Impl::Snapshot() const {
  ArbiterSnapshot snapshot;
  snapshot.pool_slabs = ledger_->pool_slabs();
  snapshot.free_slabs = ledger_->Count(SlabState::kFree);
  snapshot.granted_slabs = ledger_->Count(SlabState::kGranted);
  snapshot.revoking_slabs = ledger_->Count(SlabState::kRevoking);
  snapshot.cleaning_slabs =
      ledger_->Count(SlabState::kQuiesced) + ledger_->Count(SlabState::kScrubbed);
  snapshot.quarantined_slabs = ledger_->Count(SlabState::kQuarantined);
  snapshot.lost_slabs = ledger_->Count(SlabState::kLost);
  for (const Tenant& tenant : tenants_) {
    TenantSnapshot view;
    view.config = tenant.config;
    view.session = tenant.session;
    if (tenant.session.has_value()) {
      const Session& session = *sessions_.at(*tenant.session);
      view.attached = session.connected();
      view.load = session.load;
      view.parameter_slabs = session.parameters_held();
      view.kv_slabs = session.kv_held;
      view.slot_slabs = session.rotation.slots_held;
      view.rotation = session.rotation.now;
      view.rotation_in_flight = session.rotation.in_flight.has_value();
      view.workspace_slabs = session.connected() ? session.workspace_held() : 0;
      view.image_slabs = session.image_slabs();
      const uint32_t owned = ledger_->CountOf(session.id);
      if (session.phase == SessionPhase::kLeaving) view.quarantined_slabs = owned;
      if (session.phase == SessionPhase::kLost) view.lost_slabs = owned;
      view.grants_in_flight = static_cast<uint32_t>(session.grants.size());
      view.revokes_in_flight = static_cast<uint32_t>(session.revokes.size());
      view.activation_waiting = session.activation.has_value();
      view.kv_target_slabs = session.kv_target;
      view.kv_needed_slabs = session.kv_needed;
      view.link_limit = session.link_limit;
      view.has_turn = turns_.holder() == session.id;
      view.waits_for_turn = turns_.waits(session.id);
      snapshot.revoking_kv_slabs += session.kv_revoking;
      snapshot.waiting_activations += session.waiting() ? 1 : 0;
    }
    snapshot.tenants.push_back(std::move(view));
  }
  return snapshot;
}

absl::Status Arbiter::Impl::CheckConsistency() const {
  if (absl::Status status = ledger_->CheckConsistency(); !status.ok()) return status;
  uint32_t owned = 0;
  for (const Session* session : list_) {
    owned += ledger_->CountOf(session->id);
    const auto wrong = [session](absl::string_view what) {
      return absl::InternalError(
          absl::StrCat("session ", session->id.value(), " miscounts its ", what));
    };
    uint32_t granted = 0, revoking = 0, kv = 0, slots = 0, given_back = 0;
    std::vector<SlabId> leaving;
    if (session->rotation.in_flight.has_value()) leaving = session->rotation.in_flight->given_back;
    std::vector<uint32_t> stages(session->stages.size(), 0);
    for (const std::optional<SlabId>& slab : session->workspace) {
      if (slab.has_value() && (ledger_->record(*slab).owner != session->id ||
                               ledger_->record(*slab).role != SlabRole::kWorkspace)) {
        return wrong("workspace");
      }
    }
    for (const SlabId slab : ledger_->SlabsOf(session->id)) {
      const SlabRecord& record = ledger_->record(slab);
      if (record.role == SlabRole::kWorkspace) {
        if (record.state == SlabState::kRevoking ||
            (record.state == SlabState::kGranted &&
             session->workspace[record.region_index.value()] != slab)) {
          return wrong("workspace");
        }
        continue;
      }
      if (record.state != SlabState::kGranted && record.state != SlabState::kRevoking) continue;
      if (record.role == SlabRole::kKv) {
        ++kv;
        continue;
      }
      if (std::find(leaving.begin(), leaving.end(), slab) != leaving.end()) {
        if (record.state != SlabState::kRevoking) return wrong("slabs that a rotation gives back");
        ++given_back;
        continue;
      }
      const uint32_t place = record.region_index.value();
      if (record.role == SlabRole::kSlot) {
        if (place >= session->rotation.slots.size() || session->rotation.slots[place] != slab ||
            record.state != SlabState::kGranted) {
          return wrong("slots");
        }
        ++slots;
        continue;
      }
      if (place >= session->image_slabs() || session->parameters[place] != slab) {
        return wrong("places");
      }
      const bool is_granted = record.state == SlabState::kGranted;
      ++(is_granted ? granted : revoking);
      if (is_granted) ++stages[session->StageOf(place)];
    }
    if (granted != session->parameters_granted || revoking != session->parameters_revoking ||
        stages != session->stage_granted) {
      return wrong("parameters");
    }
    if (kv != session->kv_held) return wrong("KV slabs");
    if (slots != session->rotation.slots_held || given_back != leaving.size()) {
      return wrong("slots");
    }
    if (!CheckPlaces(session->places(), session->rotation.now).ok()) {
      return wrong("rotating layers");
    }
    uint32_t kv_revoking = 0, revoked = 0, unmapped = 0;
    for (const RevokeInFlight& revoke : session->revokes) {
      kv_revoking += revoke.kv_outstanding;
      for (const auto& parameter : revoke.parameters) revoked += parameter.returned ? 0 : 1;
    }
    for (const GrantInFlight& grant : session->grants) {
      unmapped += grant.role == SlabRole::kKv ? grant.slabs : 0;
    }
    if (kv_revoking != session->kv_revoking || kv_revoking > kv || revoked != revoking) {
      return wrong("revokes");
    }
    if (unmapped != session->kv_unmapped) return wrong("unmapped KV slabs");
    for (uint32_t place = 0; place < session->first_vacant; ++place) {
      if (session->VacantAt(place)) return wrong("vacant places");
    }
  }
  const uint32_t with_owner =
      ledger_->Count(SlabState::kGranted) + ledger_->Count(SlabState::kRevoking) +
      ledger_->Count(SlabState::kQuarantined) + ledger_->Count(SlabState::kLost);
  if (owned != with_owner)
    return absl::InternalError("slabs belong to sessions that are not there");
  return absl::OkStatus();
}

Arbiter::Arbiter(const ArbiterOptions& options)
    : Arbiter(options, std::make_unique<SlabLedger>(options.pool_slabs, options.generation)) {}
Arbiter::Arbiter(const ArbiterOptions& options, std::unique_ptr<SlabLedger> ledger)
    : impl_(std::make_unique<Impl>(options, std::move(ledger))) {}
Arbiter::~Arbiter() = default;

absl::StatusOr<TenantId> Arbiter::AddTenant(const TenantConfig& config) {
  return impl_->AddTenant(config);
}
absl::Status Arbiter::AdoptFromJournal(absl::Span<const JournalSession> sessions, absl::Time now) {
  return impl_->AdoptFromJournal(sessions, now);
}
absl::StatusOr<SessionId> Arbiter::OnAttach(TenantId tenant,
                                            absl::Span<const ParameterStage> stages,
                                            absl::Time now) {
  return impl_->OnAttach(tenant, stages, now);
}
absl::Status Arbiter::OnReattach(SessionId session, TenantId tenant,
                                 absl::Span<const ParameterStage> stages,
                                 absl::Span<const HeldSlab> held, const Rotation& rotation,
                                 absl::Time now) {
  return impl_->OnReattach(session, tenant, stages, held, rotation, now);
}
void Arbiter::OnActivate(SessionId session, ActivateReason reason, absl::Time now) {
  impl_->OnActivate(session, reason, now);
}
void Arbiter::OnSetKvTarget(SessionId session, uint32_t target_slabs, uint32_t needed_slabs,
                            absl::Time now) {
  impl_->OnSetKvTarget(session, target_slabs, needed_slabs, now);
}
void Arbiter::OnRevokeDone(SessionId session, RevokeId revoke, absl::Span<const SlabId> slabs,
                           absl::Time now) {
  impl_->OnRevokeDone(session, revoke, slabs, now);
}
void Arbiter::OnRevokePart(SessionId session, RevokeId revoke, absl::Span<const SlabId> slabs,
                           absl::Time now) {
  impl_->OnRevokePart(session, revoke, slabs, now);
}
void Arbiter::OnReleaseKv(SessionId session, absl::Span<const SlabId> slabs, absl::Time now) {
  impl_->OnReleaseKv(session, slabs, now);
}
void Arbiter::OnGrantMapped(SessionId session, GrantId grant, absl::Duration map,
                            absl::Duration restore, absl::Time now) {
  impl_->OnGrantMapped(session, grant, map, restore, now);
}
void Arbiter::OnRotationDone(SessionId session, RotationId rotation, absl::Time now) {
  impl_->OnRotationDone(session, rotation, now);
}
void Arbiter::OnReport(SessionId session, const SessionLoad& load, absl::Time now) {
  impl_->OnReport(session, load, now);
}
void Arbiter::OnTurnEnded(SessionId session, TurnId turn, absl::Time now) {
  impl_->OnTurnEnded(session, turn, now);
}
void Arbiter::OnDetach(SessionId session, absl::Time now) { impl_->OnDetach(session, now); }
void Arbiter::OnConnectionLost(SessionId session, absl::Time now) {
  impl_->OnConnectionLost(session, now);
}
void Arbiter::OnProcessGone(SessionId session, absl::Time now) {
  impl_->OnProcessGone(session, now);
}
absl::Status Arbiter::OnSlabsClean(absl::Span<const SlabId> slabs, absl::Time now) {
  return impl_->OnSlabsClean(slabs, now);
}
void Arbiter::OnTick(absl::Time now) { impl_->OnTick(now); }
absl::Time Arbiter::NextDeadline() const { return impl_->NextDeadline(); }
std::vector<ArbiterAction> Arbiter::TakeActions() { return impl_->TakeActions(); }
ArbiterSnapshot Arbiter::Snapshot() const { return impl_->Snapshot(); }
const RemapLog& Arbiter::remap_log() const { return impl_->remap_log(); }
const SlabLedger& Arbiter::ledger() const { return impl_->ledger(); }
absl::Status Arbiter::CheckConsistency() const { return impl_->CheckConsistency(); }

}  // namespace palimpsest
