// Who is there: attaching, returning, leaving, dying.
#include <algorithm>
#include <set>

#include "absl/strings/str_cat.h"
#include "broker/core/arbiter_impl.h"

namespace palimpsest {

void Arbiter::Impl::Refresh() {
  list_.clear();
  for (const auto& [id, session] : sessions_) list_.push_back(session.get());
}

Session* Arbiter::Impl::Find(SessionId session) {
  const auto it = sessions_.find(session);
  return it == sessions_.end() ? nullptr : it->second.get();
}

Session* Arbiter::Impl::FindConnected(SessionId session) {
  Session* const found = Find(session);
  return found != nullptr && found->connected() ? found : nullptr;
}

bool Arbiter::Impl::FirstSight(SlabId slab) {
  return std::exchange(seen_[slab.value()], sight_) != sight_;
}

absl::StatusOr<TenantId> Arbiter::Impl::AddTenant(const TenantConfig& config) {
  for (const Tenant& tenant : tenants_) {
    if (tenant.config.name == config.name) {
      return absl::AlreadyExistsError(
          absl::StrCat("tenant \"", config.name, "\" is configured twice"));
    }
  }
  tenants_.push_back(Tenant{.config = config, .session = std::nullopt, .next_use = {}});
  return TenantId(static_cast<uint32_t>(tenants_.size() - 1));
}

absl::Status Arbiter::Impl::CheckStages(const TenantConfig& config,
                                        absl::Span<const ParameterStage> stages) const {
  uint64_t next = 0;
  for (size_t i = 0; i < stages.size(); ++i) {
    if (stages[i].first_slab != next || stages[i].slab_count == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "stage ", i, " has ", stages[i].slab_count, " slabs from ", stages[i].first_slab,
          "; stages must cover the image in order without gaps, so it must start at ", next,
          " and not be empty"));
    }
    next += stages[i].slab_count;
  }
  if (stages.empty()) return absl::InvalidArgumentError("the image has no stages");
  const uint32_t bound = std::min(config.quota_slabs, options_.pool_slabs);
  if (next + config.workspace_slabs > bound) {
    return absl::FailedPreconditionError(
        absl::StrCat("the parameter image of tenant \"", config.name, "\" needs ", next,
                     " slabs and its workspace ", config.workspace_slabs, ", it may hold ", bound,
                     " (quota ", config.quota_slabs, ", pool ", options_.pool_slabs, ")"));
  }
  return absl::OkStatus();
}

void Arbiter::Impl::SetStages(Session& session, absl::Span<const ParameterStage> stages) {
  session.stages.assign(stages.begin(), stages.end());
  session.stage_granted.assign(stages.size(), 0);
  session.parameters.assign(stages.back().first_slab + stages.back().slab_count, std::nullopt);
  session.rotation.layers = FindRotatableLayers(stages);
  SetRotating(session, Rotation());
}

absl::StatusOr<SessionId> Arbiter::Impl::OnAttach(TenantId tenant,
                                                  absl::Span<const ParameterStage> stages,
                                                  absl::Time now) {
  if (tenant.value() >= tenants_.size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("tenant ", tenant.value(), " is not configured"));
  }
  Tenant& owner = tenants_[tenant.value()];
  if (owner.session.has_value()) {
    return absl::UnavailableError(
        absl::StrCat("session ", owner.session->value(), " of tenant \"", owner.config.name,
                     "\" has not ended: its process must be gone first; try again then"));
  }
  if (absl::Status status = CheckStages(owner.config, stages); !status.ok()) return status;
  auto session = std::make_unique<Session>();
  session->id = SessionId(NextId());
  session->tenant = tenant;
  session->config = owner.config;
  session->workspace.resize(owner.config.workspace_slabs);
  session->next_use = owner.next_use;
  SetStages(*session, stages);
  const SessionId id = session->id;
  owner.session = id;
  sessions_.emplace(id, std::move(session));
  Refresh();
  Pump(now);
  return id;
}

absl::Status Arbiter::Impl::CheckJournal(absl::Span<const JournalSession> sessions) const {
  std::vector<bool> held(options_.pool_slabs, false);
  std::vector<bool> has_session(tenants_.size(), false);
  std::map<SessionId, int> ids;
  const auto old = [this](uint64_t id) { return (id >> 32) < options_.generation; };
  for (const JournalSession& session : sessions) {
    const std::string who = absl::StrCat("the journal's session ", session.session.value());
    if (!old(session.session.value()) || ids[session.session]++ > 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          who, " is listed twice or not of a generation before ", options_.generation));
    }
    if (session.tenant.has_value()) {
      const uint32_t tenant = session.tenant->value();
      if (tenant >= tenants_.size() || has_session[tenant]) {
        return absl::InvalidArgumentError(absl::StrCat(
            who, " is of tenant ", tenant, ", which is unknown or has another session"));
      }
      has_session[tenant] = true;
    }
    for (const HeldSlab& slab : session.slabs) {
      const bool granted_role =
          slab.role == SlabRole::kParameter || slab.role == SlabRole::kKv ||
          slab.role == SlabRole::kSlot ||
          (slab.role == SlabRole::kWorkspace &&
           (!session.tenant.has_value() ||
            slab.region_index.value() < tenants_[session.tenant->value()].config.workspace_slabs));
      if (slab.slab.value() >= options_.pool_slabs || held[slab.slab.value()] || !granted_role ||
          !old(slab.epoch.value())) {
        return absl::InvalidArgumentError(absl::StrCat(
            who, " holds slab ", slab.slab.value(), " with epoch ", slab.epoch.value(), " as ",
            SlabRoleName(slab.role), ": outside the pool of ", options_.pool_slabs,
            " slabs, held twice, in a role that is not granted or outside its workspace, or under "
            "an epoch that is not of an earlier generation"));
      }
      held[slab.slab.value()] = true;
    }
  }
  return absl::OkStatus();
}

absl::Status Arbiter::Impl::AdoptFromJournal(absl::Span<const JournalSession> sessions,
                                             absl::Time now) {
  if (!sessions_.empty()) {
    return absl::FailedPreconditionError("the journal must be adopted before any session attaches");
  }
  if (absl::Status status = CheckJournal(sessions); !status.ok()) return status;
  for (const JournalSession& old : sessions) {
    auto session = std::make_unique<Session>();
    session->id = old.session;
    session->tenant = old.tenant;
    session->phase = SessionPhase::kLost;
    session->phase_deadline = now + options_.reattach_grace;
    // Slabs of a tenant that is not configured belong to nobody who could get them uncleaned.
    const TenantId tenant = old.tenant.value_or(TenantId(0xffffffff));
    if (old.tenant.has_value()) {
      session->config = tenants_[tenant.value()].config;
      session->workspace.resize(session->config.workspace_slabs);
      tenants_[tenant.value()].session = old.session;
    }
    for (const HeldSlab& slab : old.slabs) {
      MustSucceed(ledger_->Adopt(slab.slab, {old.session, tenant, slab.role}, slab.epoch,
                                 slab.region_index));
      if (slab.role == SlabRole::kWorkspace && old.tenant.has_value()) {
        session->workspace[slab.region_index.value()] = slab.slab;
      }
    }
    sessions_.emplace(old.session, std::move(session));
  }
  Refresh();
  for (Session* session : list_) {
    if (!session->tenant.has_value()) Kill(*session, "its tenant is not configured any more", now);
  }
  Pump(now);
  return absl::OkStatus();
}

absl::Status Arbiter::Impl::CheckHeldSlab(const Session& session, uint32_t image, bool rotatable,
                                          const HeldSlab& slab) const {
  const SlabRecord& record = ledger_->record(slab.slab);
  const auto moves = [](SlabRole r) { return r == SlabRole::kParameter || r == SlabRole::kSlot; };
  const bool placed = slab.role != SlabRole::kKv;
  // What an ordinary revoke asks for stays where it is until it comes.
  const bool asked = record.state == SlabState::kRevoking && !session.rotation.in_flight;
  const bool may_have_moved = rotatable && moves(slab.role) && moves(record.role) && !asked;
  const bool as_granted =
      record.role == slab.role && (!placed || record.region_index == slab.region_index);
  const uint32_t places = slab.role == SlabRole::kParameter ? image : options_.pool_slabs;
  if (record.owner == session.id && record.epoch == slab.epoch && (as_granted || may_have_moved) &&
      (!placed || slab.region_index.value() < places)) {
    return absl::OkStatus();
  }
  return absl::PermissionDeniedError(absl::StrCat(
      "slab ", slab.slab.value(), " is claimed as ", SlabRoleName(slab.role), " at place ",
      slab.region_index.value(), " under epoch ", slab.epoch.value(), "; the ledger has it ",
      SlabStateName(record.state), " as ", SlabRoleName(record.role), " at place ",
      record.region_index.value(), " under epoch ", record.epoch.value(),
      record.owner == session.id ? "" : ", and not for this session"));
}

absl::Status Arbiter::Impl::CheckHeld(const Session& session,
                                      absl::Span<const ParameterStage> stages,
                                      absl::Span<const HeldSlab> held, const Rotation& rotation) {
  if (!session.stages.empty()) stages = session.stages;
  const uint32_t image = stages.back().first_slab + stages.back().slab_count;
  const RotatableLayers layers = FindRotatableLayers(stages);
  std::vector<std::optional<SlabId>> parameters(image), slots;
  std::set<std::pair<SlabRole, RegionIndex>> places;
  NewSight();
  for (const HeldSlab& slab : held) {
    if (!ledger_->Contains(slab.slab) || !FirstSight(slab.slab) ||
        (slab.role != SlabRole::kKv && !places.emplace(slab.role, slab.region_index).second)) {
      return absl::PermissionDeniedError(absl::StrCat(
          "slab ", slab.slab.value(), " or its place is listed twice or outside the pool"));
    }
    const absl::Status status = CheckHeldSlab(session, image, layers.layers > 0, slab);
    if (!status.ok()) return status;
    const uint32_t place = slab.region_index.value();
    if (slab.role == SlabRole::kParameter) parameters[place] = slab.slab;
    if (slab.role == SlabRole::kSlot) {
      if (place >= slots.size()) slots.resize(place + 1);
      slots[place] = slab.slab;
    }
  }
  absl::Status status = CheckPlaces({stages, parameters, slots}, rotation);
  for (const int32_t stage : rotation.stages) {
    if (!status.ok()) break;
    if (stage >= layers.first_stage && stage < layers.first_stage + layers.layers) continue;
    status = absl::InvalidArgumentError(absl::StrCat("stage ", stage, " cannot rotate"));
  }
  return status.ok() ? status : absl::PermissionDeniedError(status.message());
}

absl::Status Arbiter::Impl::OnReattach(SessionId id, TenantId tenant,
                                       absl::Span<const ParameterStage> stages,
                                       absl::Span<const HeldSlab> held, const Rotation& rotation,
                                       absl::Time now) {
  Session* const session = Find(id);
  if (session == nullptr) {
    return absl::NotFoundError(
        absl::StrCat("session ", id.value(), " is not known: release everything and attach anew"));
  }
  if (session->tenant != tenant) {
    return absl::PermissionDeniedError(
        absl::StrCat("session ", id.value(), " belongs to another tenant"));
  }
  if (session->connected() || session->phase == SessionPhase::kLeaving) {
    return absl::FailedPreconditionError(absl::StrCat(
        "session ", id.value(), session->connected() ? " is still connected" : " is being ended"));
  }
  absl::Status status = CheckStages(session->config, stages);
  if (status.ok()) status = CheckHeld(*session, stages, held, rotation);
  if (status.ok() && !session->stages.empty() &&
      !std::equal(stages.begin(), stages.end(), session->stages.begin(), session->stages.end(),
                  [](const ParameterStage& a, const ParameterStage& b) {
                    return a.first_slab == b.first_slab && a.slab_count == b.slab_count;
                  })) {
    status = absl::PermissionDeniedError("the image's stages have changed under the session");
  }
  if (!status.ok()) {
    Kill(*session, absl::StrCat("re-attachment refused: ", status.message()), now);
    Pump(now);
    return status;
  }
  if (session->stages.empty()) SetStages(*session, stages);
  Readmit(*session, held, rotation, now);
  Pump(now);
  return absl::OkStatus();
}

void Arbiter::Impl::ReadmitPlaced(Session& session, const HeldSlab& held, bool asked_back) {
  const SlabRecord& record = ledger_->record(held.slab);
  if (!asked_back) {
    if (record.state != SlabState::kGranted) MustSucceed(ledger_->Readopt(held.slab));
    if (record.role != held.role || record.region_index != held.region_index) {
      MustSucceed(ledger_->Move(held.slab, held.role, held.region_index));
    }
  }
  PutAt(session, held.slab, held.role, held.region_index, !asked_back);
}

void Arbiter::Impl::Readmit(Session& session, absl::Span<const HeldSlab> held,
                            const Rotation& rotation, absl::Time now) {
  // What the SetRotation in flight and the revokes behind it were to take is not asked back.
  VoidRotation(session);
  std::set<SlabId> asked_back;
  for (const RevokeInFlight& revoke : session.revokes) {
    for (const auto& parameter : revoke.parameters) {
      // What came back may be its own again.
      if (!parameter.returned) asked_back.insert(parameter.slab);
    }
  }
  ForgetPlaces(session);
  SetRotating(session, rotation);
  NewSight();
  for (const HeldSlab& slab : held) FirstSight(slab.slab);
  std::vector<SlabId> absent;
  for (const SlabId slab : ledger_->SlabsOf(session.id)) {
    const SlabRecord& record = ledger_->record(slab);
    if (record.state == SlabState::kLost && record.role == SlabRole::kKv) ++session.kv_held;
    if (FirstSight(slab)) absent.push_back(slab);
  }
  for (const HeldSlab& slab : held) {
    if (slab.role == SlabRole::kParameter || slab.role == SlabRole::kSlot) {
      // The journal may know two slabs at one place, the older not cleaned when the broker died;
      // the worker has only one.
      ReadmitPlaced(session, slab, asked_back.contains(slab.slab));
    } else if (ledger_->record(slab.slab).state == SlabState::kLost) {
      MustSucceed(ledger_->Readopt(slab.slab));
      if (slab.role == SlabRole::kWorkspace) {
        session.workspace[slab.region_index.value()] = slab.slab;
      }
    }
  }
  session.phase = SessionPhase::kConnected;
  session.phase_deadline = absl::InfiniteFuture();
  session.load = SessionLoad{.active = true};
  session.link_limit = 0;
  session.last_active = now;
  session.next_use.Observe(true, now);
  session.silent_from = now + options_.report_patience;
  // Parameters that were restored just before may not be known as such.
  session.irrevocable_until = std::max(session.irrevocable_until, now + options_.min_residence);
  session.grants.clear();
  session.kv_unmapped = 0;
  session.parameters_taken = session.parameters_taken || session.missing() > 0;
  TakeBack(session, absent, MoveReason::kSurplus, now);
  ResendRevokes(session, now);
}

void Arbiter::Impl::ResendRevokes(Session& session, absl::Time now) {
  std::vector<RevokeInFlight> pending;
  for (RevokeInFlight& revoke : session.revokes) {
    SendRevoke again{.session = session.id,
                     .revoke = revoke.id,
                     .role = revoke.role,
                     .region_indexes = {},
                     .kv_slabs = revoke.kv_outstanding,
                     .deadline = now + options_.revoke_deadline,
                     .reason = revoke.reason};
    for (const RevokeInFlight::Parameter& parameter : revoke.parameters) {
      if (!parameter.returned) again.region_indexes.push_back(parameter.index);
    }
    if (again.kv_slabs == 0 && again.region_indexes.empty()) continue;
    revoke.deadline = again.deadline;
    pending.push_back(std::move(revoke));
    Act(std::move(again));
  }
  session.revokes = std::move(pending);
}

void Arbiter::Impl::Leave(Session& session, absl::Time now) {
  for (const SlabId slab : ledger_->SlabsOf(session.id)) {
    if (ledger_->record(slab).state != SlabState::kQuarantined) {
      MustSucceed(ledger_->Quarantine(slab));
    }
  }
  session.phase = SessionPhase::kLeaving;
  session.arrival_credit_until = now + options_.kill_patience;
  session.activation.reset();
  session.reversion_since.reset();
  session.grants.clear();
  session.revokes.clear();
  VoidRotation(session);
  ForgetPlaces(session);
  SetRotating(session, Rotation());
  session.kv_held = session.kv_unmapped = session.kv_revoking = session.kv_idle = 0;
  session.kv_target = session.kv_needed = 0;
}

void Arbiter::Impl::Kill(Session& session, const std::string& why, absl::Time now) {
  if (session.killed) return;
  Leave(session, now);
  session.killed = true;
  session.phase_deadline = absl::InfiniteFuture();
  Act(KillProcess{.session = session.id, .why = why});
}

void Arbiter::Impl::OnDetach(SessionId id, absl::Time now) {
  Session* const session = FindConnected(id);
  if (session == nullptr) return;
  Leave(*session, now);
  session->phase_deadline = now + options_.reattach_grace;
  Pump(now);
}

void Arbiter::Impl::OnConnectionLost(SessionId id, absl::Time now) {
  Session* const session = FindConnected(id);
  if (session == nullptr) return;
  session->phase = SessionPhase::kDisconnected;
  session->phase_deadline = now + options_.reattach_grace;
  session->activation.reset();
  session->reversion_since.reset();
  Pump(now);
}

void Arbiter::Impl::OnProcessGone(SessionId id, absl::Time now) {
  Session* const session = Find(id);
  if (session == nullptr) return;
  CleanSlabs clean;
  for (const SlabId slab : ledger_->SlabsOf(id)) {
    MustSucceed(ledger_->GiveBack(slab));
    returned_[slab.value()] = Returned{.at = now, .reason = MoveReason::kSurplus};
    clean.slabs.push_back(slab);
  }
  if (!clean.slabs.empty()) Act(std::move(clean));
  Act(SessionEnded{id});
  if (session->tenant.has_value()) {
    Tenant& tenant = tenants_[session->tenant->value()];
    tenant.session.reset();
    tenant.next_use = session->next_use;
    tenant.next_use.Observe(false, now);
  }
  sessions_.erase(id);
  Refresh();
  Pump(now);
}

absl::Status Arbiter::Impl::OnSlabsClean(absl::Span<const SlabId> slabs, absl::Time now) {
  NewSight();
  for (const SlabId slab : slabs) {
    if (!ledger_->Contains(slab) || !FirstSight(slab) ||
        ledger_->record(slab).state != SlabState::kQuiesced) {
      return absl::FailedPreconditionError(absl::StrCat(
          "slab ", slab.value(), " was reported clean but was not to be cleaned (it is ",
          ledger_->Contains(slab) ? SlabStateName(ledger_->record(slab).state) : "unknown", ")"));
    }
  }
  std::map<std::pair<TenantId, MoveReason>, TransferFinished> transfers;
  for (const SlabId slab : slabs) {
    const Returned& returned = returned_[slab.value()];
    const TenantId tenant = *ledger_->record(slab).last_tenant;
    TransferFinished& transfer = transfers[{tenant, returned.reason}];
    transfer.kind = TransferKind::kClean;
    transfer.tenant = tenant;
    transfer.reason = returned.reason;
    transfer.finished_at = now;
    transfer.duration = std::max(transfer.duration, now - returned.at);
    ++transfer.slabs;
    MustSucceed(ledger_->Clean(slab));
    MustSucceed(ledger_->Free(slab));
  }
  for (const auto& [key, transfer] : transfers) {
    if (key.first.value() < tenants_.size()) Act(transfer);
  }
  Pump(now);
  return absl::OkStatus();
}

}  // namespace palimpsest
