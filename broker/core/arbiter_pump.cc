// Who gets what: activations first, then KV demand, then reversion.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "broker/core/arbiter_impl.h"

namespace palimpsest {
namespace {

// The plan with what it is for: parameters that come back to the session.
SupplyPlan WithReversion(SupplyPlan plan, const Session& session, absl::Time now) {
  plan.candidates.push_back({.tenant = *session.tenant,
                             .rule = RemapRule::kReversion,
                             .outcome = RemapOutcome::kTaken,
                             .slabs = session.missing(),
                             .priority = session.config.priority,
                             .idle = now - session.last_active,
                             .next_use = session.next_use.Expected(now)});
  return plan;
}

}  // namespace

uint32_t Arbiter::Impl::Reserved() const {
  uint32_t reserved = 0;
  for (const Tenant& tenant : tenants_) {
    reserved += tenant.config.workspace_slabs;
    if (tenant.session.has_value()) reserved -= sessions_.at(*tenant.session)->workspace_held();
  }
  return reserved;
}

uint32_t Arbiter::Impl::ActivationClaims() const {
  uint32_t claims = 0;
  for (const Session* session : list_) claims += session->claim();
  return claims;
}

uint32_t Arbiter::Impl::UnclaimedFree() const {
  const uint32_t free = ledger_->Count(SlabState::kFree);
  return free - std::min(free, Claims());
}

uint32_t Arbiter::Impl::Arriving(absl::Time now) const {
  uint32_t arriving = ledger_->Count(SlabState::kRevoking) + ledger_->Count(SlabState::kQuiesced) +
                      ledger_->Count(SlabState::kScrubbed);
  for (const Session* session : list_) {
    arriving += session->kv_revoking;
    if (session->arrival_credit_until > now) arriving += ledger_->CountOf(session->id);
  }
  return arriving;
}

uint32_t Arbiter::Impl::Supply(absl::Time now) const {
  const uint32_t total = ledger_->Count(SlabState::kFree) + Arriving(now);
  return total - std::min(total, Claims());
}

uint32_t Arbiter::Impl::QuotaRoom(const Session& session) const {
  const uint32_t held = ledger_->CountOf(session.id);
  return session.config.quota_slabs - std::min(session.config.quota_slabs, held);
}

std::vector<Session*> Arbiter::Impl::ActivationOrder() const {
  std::vector<Session*> order;
  for (Session* session : list_) {
    if (session->activation.has_value()) order.push_back(session);
  }
  std::sort(order.begin(), order.end(),
            [](const Session* a, const Session* b) { return ActivatesBefore(*a, *b); });
  return order;
}

void Arbiter::Impl::Pump(absl::Time now) {
  wake_ = absl::InfiniteFuture();
  ids_before_pump_ = id_counter_;
  HandOutTurns(now);
  TakeQuotaExcess(now);
  UseSpareSlabs(now);
  DeliverWorkspaces(now);
  DeliverActivations(now);
  TopUpActivations(now);
  const Session* const blocked = CommitActivations(now);
  const uint32_t supply = ServeKv(blocked, now);
  if (blocked == nullptr && !NextLacksMemory()) {
    RevertLayers(Revert(supply, now), now);
  } else {
    for (Session* session : list_) {
      session->reversion_since.reset();
      session->rotation.reversion.Reset();
    }
  }
  ShareLink(now);
  for (SendGrant& grant : std::exchange(pending_grants_, {})) Act(std::move(grant));
}

void Arbiter::Impl::DeliverWorkspaces(absl::Time now) {
  for (Session* session : list_) {
    if (!session->connected()) continue;
    const uint32_t missing = session->config.workspace_slabs - session->workspace_held();
    const uint32_t count =
        std::min({missing, ledger_->Count(SlabState::kFree), QuotaRoom(*session)});
    if (count == 0) continue;
    SendGrant& grant =
        PendingGrant(*session, SlabRole::kWorkspace, MoveReason::kAttach, count, now);
    const SlabLedger::Grantee to{session->id, *session->tenant, SlabRole::kWorkspace};
    const Epoch epoch = ledger_->NextEpoch();
    for (uint32_t place = 0; grant.slabs.size() < count; ++place) {
      if (session->workspace[place].has_value()) continue;
      const SlabId slab = *ledger_->FirstFree();
      MustSucceed(ledger_->Grant(slab, to, epoch, RegionIndex(place)));
      session->workspace[place] = slab;
      grant.slabs.push_back(
          GrantedSlab{.slab = slab, .epoch = epoch, .region_index = RegionIndex(place)});
    }
  }
}

void Arbiter::Impl::DeliverActivations(absl::Time now) {
  for (Session* session : ActivationOrder()) {
    const uint32_t count =
        std::min({session->claim(), ledger_->Count(SlabState::kFree), QuotaRoom(*session)});
    if (count > 0) GrantParameters(*session, count, {}, now);
    if (session->missing() == 0 && session->parameters_revoking == 0) {
      session->activation.reset();
      session->parameters_taken = false;
    }
  }
}

void Arbiter::Impl::TopUpActivations(absl::Time now) {
  const uint32_t total = ledger_->Count(SlabState::kFree) + Arriving(now);
  const uint32_t claims = ActivationClaims();
  const uint32_t wanted = claims + Reserved();
  // What is kept for workspaces comes back with the process that has it, not from others.
  if (wanted <= total || claims == 0) return;
  const std::vector<Session*> order = ActivationOrder();
  const auto last =
      std::find_if(order.rbegin(), order.rend(), [](Session* s) { return s->claim() > 0; });
  const Session& session = **last;
  const uint32_t need = std::min(wanted - total, claims);
  const uint64_t held = uint64_t{session.held_after_revokes()} + session.claim();
  const SupplyRequest request{
      .requester = &session,
      .need = need,
      .floor_gap = ForcedGap(session, held - std::min<uint64_t>(held, need), need),
      .activation = true,
      .gentle = !session.runs()};
  const SupplyPlan plan = PlanFor(request, now);
  StartRevokes(plan, session.activation->reason, now);
  LogPlan(request, plan, true, session.activation->reason, now);
  if (plan.slabs < need) WatchVictims(session, false, now);
}

const Session* Arbiter::Impl::CommitActivations(absl::Time now) {
  const Session* blocked = nullptr;
  for (Session* session : ActivationOrder()) {
    // Places that are still being emptied cannot be filled yet.
    if (!session->waiting() || session->parameters_revoking > 0) continue;
    if (session->rotation.in_flight.has_value()) continue;
    if (session->SilentAt(now) || session->turn == TurnRank::kWaits) continue;
    if (blocked != nullptr && !session->guaranteed()) continue;
    if (TryCommit(*session, now)) {
      DeliverActivations(now);
      continue;
    }
    WatchVictims(*session, false, now);
    if (blocked == nullptr && session->runs()) blocked = session;
  }
  return blocked;
}

bool Arbiter::Impl::TryCommit(Session& session, absl::Time now) {
  const uint32_t covered = std::min(Supply(now), session.missing());
  const uint32_t need = session.missing() - covered;
  const SupplyRequest request{
      .requester = &session,
      .need = need,
      .floor_gap = ForcedGap(session, uint64_t{session.held_after_revokes()} + covered, need),
      .activation = true,
      .gentle = !session.runs()};
  if (request.need > 0) {
    const SupplyPlan plan = PlanFor(request, now);
    const bool enough = plan.slabs >= request.need;
    LogPlan(request, plan, enough, session.activation->reason, now);
    if (!enough) return false;
    StartRevokes(plan, session.activation->reason, now);
  }
  session.activation->committed = true;
  session.restore_time = absl::ZeroDuration();
  session.reversion_since.reset();
  return true;
}

void Arbiter::Impl::RefuseActivation(Session& session, const std::string& why, absl::Time now) {
  if (session.activation->asked) {
    absl::Duration retry_after = options_.min_residence;
    if (wake_ > now && wake_ < absl::InfiniteFuture()) {
      retry_after = std::clamp(wake_ - now, absl::Milliseconds(100),
                               std::max(absl::Milliseconds(100), options_.activation_deadline));
    }
    Act(SendActivateRefused{
        .session = session.id,
        .message = absl::StrCat("tenant \"", session.config.name, "\" needs ", session.missing(),
                                " more slabs for its parameters; ", UnclaimedFree(), " are free, ",
                                Arriving(now), " on their way and ", Claims() - session.claim(),
                                " claimed by others: ", why),
        .retry_after = retry_after,
        .eager = session.activation->reason == MoveReason::kEager});
  }
  session.activation.reset();
}

uint32_t Arbiter::Impl::ServeKv(const Session* blocked, absl::Time now) {
  std::vector<KvDemand> demands;
  for (Session* session : list_) {
    if (session->connected() && !session->SilentAt(now) &&
        session->kv_target > session->kv_after_revokes()) {
      demands.push_back(KvDemand{.session = session});
    }
  }
  std::sort(demands.begin(), demands.end(), [](const KvDemand& a, const KvDemand& b) {
    if (a.session->turn != b.session->turn) return a.session->turn < b.session->turn;
    if (a.session->config.priority != b.session->config.priority) {
      return a.session->config.priority > b.session->config.priority;
    }
    return a.session->kv_sequence < b.session->kv_sequence;
  });
  uint32_t supply = Supply(now);
  for (const KvPass pass : {KvPass::kFloor, KvPass::kNeeded, KvPass::kPrefetch}) {
    for (KvDemand& demand : demands) ServeKvDemand(demand, pass, blocked, supply, now);
  }
  for (const KvDemand& demand : demands) {
    Session& session = *demand.session;
    const bool at_limit =
        session.kv_target > session.kv_limit() && session.kv_held >= session.kv_limit();
    if ((!demand.unmet && !at_limit) || session.pressure_sent) continue;
    session.pressure_sent = true;
    Act(SendKvPressure{.session = session.id, .target_slabs = session.kv_target});
  }
  return supply;
}

void Arbiter::Impl::ServeKvDemand(KvDemand& demand, KvPass pass, const Session* blocked,
                                  uint32_t& supply, absl::Time now) {
  Session& session = *demand.session;
  const uint32_t wish = pass == KvPass::kNeeded ? session.kv_needed : session.kv_target;
  if (pass != KvPass::kFloor && wish > session.kv_limit()) {
    const uint32_t most = pass == KvPass::kNeeded ? wish : options_.kv_step_slabs;
    RaiseKvLimit(session, std::min(wish - session.kv_limit(), most), supply, now);
  }
  uint32_t goal = std::min(session.kv_limit(), wish);
  // The floor keeps room for the whole image and the workspace, present or not.
  if (pass == KvPass::kFloor) {
    const uint64_t kept = uint64_t{session.image_slabs()} + session.config.workspace_slabs;
    const int64_t room = std::max<int64_t>(session.FloorGap(kept), RoomToRun(session));
    goal = static_cast<uint32_t>(std::min<int64_t>(goal, room));
  }
  const uint32_t have = session.kv_after_revokes() + demand.promised;
  const uint32_t want = goal > have ? goal - have : 0;
  if (want == 0) return;
  if (session.turn == TurnRank::kWaits && session.load.active) {
    demand.unmet = true;
    return;
  }
  const bool may_pass =
      blocked == nullptr || pass == KvPass::kFloor ||
      (pass == KvPass::kNeeded && session.config.priority >= blocked->config.priority);
  if (!may_pass) {
    demand.unmet = true;
    return;
  }
  const uint32_t covered = std::min(want, supply);
  const uint32_t now_free = std::min({covered, UnclaimedFree(), QuotaRoom(session)});
  if (now_free > 0) GrantKv(session, now_free, now);
  supply -= covered;
  demand.promised += covered - now_free;
  if (want > covered) RevokeForKv(demand, pass, want - covered, supply, now);
}

void Arbiter::Impl::RevokeForKv(KvDemand& demand, KvPass pass, uint32_t need, uint32_t& supply,
                                absl::Time now) {
  const Session& session = *demand.session;
  const bool prefetch = pass == KvPass::kPrefetch;
  if (!session.runs()) {
    demand.unmet = true;
    return;
  }
  // The reserve of a tenant without requests is filled from what is free and costs nobody anything.
  if (!session.load.active) {
    const uint32_t have = session.kv_after_revokes() + demand.promised;
    need = std::min(need, session.kv_needed > have ? session.kv_needed - have : 0);
    if (need == 0) {
      demand.unmet = true;
      return;
    }
  }
  const bool admits =
      prefetch && options_.sharing == Sharing::kTemporal && session.load.waiting_sequences > 0;
  if (admits) {
    const uint32_t room = RoomBesideImages(session);
    need = std::min(need, room - std::min(room, session.kv_after_revokes() + demand.promised));
  }
  if (prefetch) {
    need =
        std::min(need, options_.kv_step_slabs - std::min(options_.kv_step_slabs, demand.promised));
    if (need == 0) return;
  }
  const SupplyRequest request{.requester = &session,
                              .need = need,
                              .floor_gap = pass == KvPass::kFloor ? need : 0,
                              .prefetch = prefetch,
                              .spare_active_after = prefetch && !admits
                                                        ? now - options_.prefetch_grace
                                                        : absl::InfiniteFuture()};
  const SupplyPlan plan = PlanFor(request, now);
  StartRevokes(plan, MoveReason::kKvDemand, now);
  LogPlan(request, plan, true, MoveReason::kKvDemand, now);
  demand.promised += std::min(plan.slabs, need);
  supply += plan.slabs - std::min(plan.slabs, need);
  if (plan.slabs >= need) return;
  demand.unmet = true;
  WatchVictims(session, prefetch, now);
}

uint32_t Arbiter::Impl::RoomBesideImages(const Session& holder) const {
  uint64_t kept = 0;
  for (const Tenant& tenant : tenants_) kept += tenant.config.workspace_slabs;
  uint32_t largest_image = 0;
  for (const Session* session : list_) {
    if (session == &holder) continue;
    kept += session->kv_after_revokes() - session->SurplusKv(0.0);
    if (session->load.active) largest_image = std::max(largest_image, session->image_slabs());
  }
  kept += largest_image;
  return static_cast<uint32_t>(options_.pool_slabs - std::min<uint64_t>(options_.pool_slabs, kept));
}

void Arbiter::Impl::WatchVictims(const Session& requester, bool prefetch, absl::Time now) {
  for (const Session* other : list_) {
    if (!other->connected()) continue;
    if (other == &requester) {
      // Its own layers may be taken then.
      if (other->irrevocable_until > now && other->rotation.layers.layers > 0) {
        wake_ = std::min(wake_, other->irrevocable_until);
      }
      continue;
    }
    const uint32_t parameters = other->parameters_granted + other->rotation.slots_held;
    const uint32_t held = parameters + other->kv_held;
    if (held > 0 && other->silent_from > now) wake_ = std::min(wake_, other->silent_from);
    if (parameters == 0 && !other->SilentAt(now)) continue;
    if (other->irrevocable_until > now) wake_ = std::min(wake_, other->irrevocable_until);
    const absl::Time spared_until = other->last_active + options_.prefetch_grace;
    if (prefetch && spared_until > now) wake_ = std::min(wake_, spared_until);
  }
}

uint32_t Arbiter::Impl::Revert(uint32_t supply, absl::Time now) {
  std::vector<Session*> candidates;
  for (Session* session : list_) {
    if (session->connected() && !session->SilentAt(now) && session->parameters_taken &&
        session->missing() > 0 && session->parameters_revoking == 0 &&
        !session->rotation.in_flight.has_value() && !session->activation.has_value()) {
      candidates.push_back(session);
    } else {
      session->reversion_since.reset();
    }
  }
  std::stable_sort(candidates.begin(), candidates.end(), [](const Session* a, const Session* b) {
    if (a->config.priority != b->config.priority) return a->config.priority > b->config.priority;
    return a->last_active > b->last_active;
  });
  for (Session* session : candidates) {
    const uint32_t covered = std::min(supply, session->missing());
    const SupplyRequest request{.requester = session,
                                .need = session->missing() - covered,
                                .activation = true,
                                .surplus_only = true,
                                .hysteresis = options_.reversion_hysteresis};
    const SupplyPlan plan = PlanFor(request, now);
    if (plan.slabs < request.need) {
      session->reversion_since.reset();
      continue;
    }
    supply -= covered;
    if (!session->reversion_since.has_value()) session->reversion_since = now;
    const absl::Time due = *session->reversion_since + options_.reversion_delay;
    if (now < due) {
      wake_ = std::min(wake_, due);
      continue;
    }
    session->reversion_since.reset();
    session->activation = Activation{.reason = MoveReason::kReversion,
                                     .asked = false,
                                     .committed = true,
                                     .sequence = ++sequence_,
                                     .deadline = now + options_.activation_deadline};
    session->restore_time = absl::ZeroDuration();
    LogPlan(request, WithReversion(plan, *session, now), true, MoveReason::kReversion, now);
    StartRevokes(plan, MoveReason::kReversion, now);
    DeliverActivations(now);
  }
  return supply;
}

void Arbiter::Impl::TakeQuotaExcess(absl::Time now) {
  for (Session* session : list_) {
    const uint32_t held = session->kv_after_revokes();
    if (held <= session->kv_limit()) continue;
    const uint32_t excess = std::min(held - session->kv_limit(), session->RevocableKv());
    if (excess > 0) RevokeKv(*session, excess, MoveReason::kQuota, now);
  }
}

SupplyPlan Arbiter::Impl::PlanFor(const SupplyRequest& request, absl::Time now) const {
  return PlanSupply(list_, request, Rules(), now);
}

void Arbiter::Impl::LogPlan(const SupplyRequest& request, SupplyPlan plan, bool begun,
                            MoveReason reason, absl::Time now) {
  if (!begun) {
    plan.slabs = 0;
    for (RemapCandidate& candidate : plan.candidates) {
      if (candidate.outcome == RemapOutcome::kTaken) candidate.outcome = RemapOutcome::kNotEnough;
      candidate.slabs = 0;
    }
  }
  RemapDecision decision;
  decision.at = now;
  decision.requester = *request.requester->tenant;
  decision.reason = reason;
  decision.wanted = request.need;
  decision.planned = plan.slabs;
  decision.candidates = std::move(plan.candidates);
  remap_log_.Add(std::move(decision));
}

}  // namespace palimpsest
