// What workers say. Everything in it is checked before anything changes: a worker that breaks the
// protocol is killed, and its neighbours notice nothing.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "broker/core/arbiter_impl.h"

namespace palimpsest {

bool Arbiter::Impl::WasIssued(uint64_t id) const {
  const uint64_t generation = id >> 32;
  return generation < options_.generation ||
         (generation == options_.generation && (id & 0xffffffff) <= id_counter_);
}

void Arbiter::Impl::OnActivate(SessionId id, ActivateReason reason, absl::Time now) {
  Session* const session = FindConnected(id);
  if (session == nullptr) return;
  const bool request = reason == ActivateReason::kRequest;
  if (request && session->runs()) session->last_active = now;
  if (session->activation.has_value()) {
    session->activation->asked = true;
    if (request) session->activation->reason = MoveReason::kActivation;
    return;
  }
  if (session->missing() == 0 && session->parameters_revoking == 0) return;
  const auto waiting = std::count_if(list_.begin(), list_.end(),
                                     [](const Session* other) { return other->waiting(); });
  session->activation = Activation{.reason = request ? MoveReason::kActivation : MoveReason::kEager,
                                   .asked = true,
                                   .committed = false,
                                   .sequence = ++sequence_,
                                   .deadline = now + options_.activation_deadline};
  if (!request) {
    // The session's own wish is not committed yet and claims nothing.
    const uint32_t free = UnclaimedFree();
    if (waiting > 0 || session->parameters_revoking > 0 || session->missing() > free ||
        session->rotation.in_flight.has_value()) {
      RefuseActivation(*session, "only free slabs are used when no request waits", now);
    } else {
      session->activation->committed = true;
      session->restore_time = absl::ZeroDuration();
    }
  } else if (waiting >= options_.max_waiting_activations) {
    RefuseActivation(*session,
                     absl::StrCat(waiting, " activations wait already, the most that may"), now);
  }
  Pump(now);
}

void Arbiter::Impl::OnSetKvTarget(SessionId id, uint32_t target, uint32_t needed, absl::Time now) {
  Session* const session = FindConnected(id);
  if (session == nullptr) return;
  if (needed > target) {
    Kill(*session,
         absl::StrCat("protocol violation: SetKvTarget needs ", needed,
                      " slabs of a target of only ", target),
         now);
  } else if (target != session->kv_target || needed != session->kv_needed) {
    if (session->kv_after_revokes() >= session->kv_target) session->kv_sequence = ++sequence_;
    if (target != session->kv_target) session->pressure_sent = false;
    session->kv_target = target;
    session->kv_needed = needed;
  }
  Pump(now);
}

bool Arbiter::Impl::CheckOwned(Session& session, absl::Span<const SlabId> slabs, SlabRole role,
                               const std::string& what, absl::Time now) {
  NewSight();
  for (const SlabId slab : slabs) {
    std::string problem;
    if (!ledger_->Contains(slab)) {
      problem = "is outside the pool";
    } else if (!FirstSight(slab)) {
      problem = "is named twice";
    } else if (ledger_->record(slab).owner != session.id) {
      problem = "is not held by the session";
    } else if (role == SlabRole::kNone && ledger_->record(slab).role == SlabRole::kWorkspace) {
      problem = "is of its workspace, which is never given back";
    } else if (role == SlabRole::kNone && ledger_->record(slab).role == SlabRole::kSlot) {
      problem = "is of a slot, which only SetRotation takes";
    } else if (role != SlabRole::kNone && ledger_->record(slab).role != role) {
      problem = absl::StrCat("is held as ", SlabRoleName(ledger_->record(slab).role), ", not as ",
                             SlabRoleName(role));
    }
    if (problem.empty()) continue;
    Kill(session,
         absl::StrCat("protocol violation: ", what, " names slab ", slab.value(), ", which ",
                      problem),
         now);
    return false;
  }
  return true;
}

bool Arbiter::Impl::CheckAsked(Session& session, const RevokeInFlight& revoke,
                               absl::Span<const SlabId> slabs, const std::string& what,
                               absl::Time now) {
  NewSight();
  const uint32_t asked = sight_;
  for (const RevokeInFlight::Parameter& parameter : revoke.parameters) FirstSight(parameter.slab);
  NewSight();
  for (const SlabId slab : slabs) {
    if (ledger_->Contains(slab) && seen_[slab.value()] == asked) {
      seen_[slab.value()] = sight_;
      continue;
    }
    Kill(session,
         absl::StrCat("protocol violation: ", what, " names slab ", slab.value(),
                      ", which was not asked for or is named twice"),
         now);
    return false;
  }
  return true;
}

bool Arbiter::Impl::CheckAnswer(Session& session, const RevokeInFlight& revoke,
                                absl::Span<const SlabId> slabs, absl::Time now) {
  const std::string what = absl::StrCat("RevokeDone ", revoke.id.value());
  if (revoke.role == SlabRole::kKv) {
    if (!CheckOwned(session, slabs, SlabRole::kKv, what, now)) return false;
    const uint32_t mapped = session.kv_held - std::min(session.kv_held, session.kv_unmapped);
    const uint32_t least = std::min(revoke.kv_outstanding, mapped);
    if (slabs.size() >= least) return true;
    Kill(session,
         absl::StrCat("protocol violation: ", what, " gives back ", slabs.size(), " KV slabs of ",
                      revoke.kv_outstanding, " asked while the worker holds ", mapped),
         now);
    return false;
  }
  if (!CheckAsked(session, revoke, slabs, what, now)) return false;
  for (const RevokeInFlight::Parameter& parameter : revoke.parameters) {
    if (parameter.returned || seen_[parameter.slab.value()] == sight_) continue;
    Kill(session,
         absl::StrCat("protocol violation: ", what, " does not give back parameter slab ",
                      parameter.slab.value(), " at place ", parameter.index.value()),
         now);
    return false;
  }
  return true;
}

void Arbiter::Impl::OnRevokeDone(SessionId id, RevokeId revoke_id, absl::Span<const SlabId> slabs,
                                 absl::Time now) {
  Session* const session = FindConnected(id);
  if (session == nullptr) return;
  const auto found =
      std::find_if(session->revokes.begin(), session->revokes.end(),
                   [revoke_id](const RevokeInFlight& revoke) { return revoke.id == revoke_id; });
  if (found == session->revokes.end()) {
    OnStaleRevokeDone(*session, revoke_id, slabs, now);
  } else if (CheckAnswer(*session, *found, slabs, now)) {
    const RevokeInFlight revoke = std::move(*found);
    session->revokes.erase(found);
    std::vector<SlabId> back;
    if (revoke.role == SlabRole::kKv) {
      session->kv_revoking -= revoke.kv_outstanding;
      back.assign(slabs.begin(), slabs.end());
    } else {
      for (const RevokeInFlight::Parameter& parameter : revoke.parameters) {
        if (!parameter.returned) back.push_back(parameter.slab);
      }
    }
    Act(TransferFinished{.kind = TransferKind::kRevoke,
                         .tenant = *session->tenant,
                         .role = revoke.role,
                         .slabs = revoke.returned_slabs + static_cast<uint32_t>(back.size()),
                         .duration = now - revoke.sent,
                         .reason = revoke.reason,
                         .finished_at = now});
    TakeBack(*session, back, revoke.reason, now);
  }
  Pump(now);
}

void Arbiter::Impl::OnRevokePart(SessionId id, RevokeId revoke_id, absl::Span<const SlabId> slabs,
                                 absl::Time now) {
  Session* const session = FindConnected(id);
  if (session == nullptr) return;
  const auto found =
      std::find_if(session->revokes.begin(), session->revokes.end(),
                   [revoke_id](const RevokeInFlight& revoke) { return revoke.id == revoke_id; });
  const std::string what = absl::StrCat("RevokeDone ", revoke_id.value());
  if (found == session->revokes.end()) {
    OnStaleRevokeDone(*session, revoke_id, slabs, now);
  } else if (CheckOwned(*session, slabs, found->role, what, now) &&
             (found->role == SlabRole::kKv || CheckAsked(*session, *found, slabs, what, now))) {
    const auto count = static_cast<uint32_t>(slabs.size());
    const uint32_t expected = std::min(found->kv_outstanding, count);
    found->kv_outstanding -= expected;
    session->kv_revoking -= expected;
    found->returned_slabs += count;
    TakeBack(*session, slabs, found->reason, now);
  }
  Pump(now);
}

// An answer to a revoke of an earlier broker process, which the worker had begun before it
// returned.
void Arbiter::Impl::OnStaleRevokeDone(Session& session, RevokeId revoke,
                                      absl::Span<const SlabId> slabs, absl::Time now) {
  if ((revoke.value() >> 32) >= options_.generation) {
    Kill(session,
         absl::StrCat("protocol violation: RevokeDone ", revoke.value(), ", which ",
                      WasIssued(revoke.value()) ? "was answered before or is another session's"
                                                : "was never asked"),
         now);
    return;
  }
  const std::string what = absl::StrCat("RevokeDone ", revoke.value());
  if (CheckOwned(session, slabs, SlabRole::kNone, what, now)) {
    TakeBack(session, slabs, MoveReason::kSurplus, now);
  }
}

void Arbiter::Impl::OnReleaseKv(SessionId id, absl::Span<const SlabId> slabs, absl::Time now) {
  Session* const session = FindConnected(id);
  if (session == nullptr) return;
  if (CheckOwned(*session, slabs, SlabRole::kKv, "ReleaseKv", now)) {
    TakeBack(*session, slabs, MoveReason::kSurplus, now);
  }
  Pump(now);
}

void Arbiter::Impl::ForgetWorkspace(Session& session, SlabId slab, RegionIndex index) {
  std::optional<SlabId>& place = session.workspace[index.value()];
  if (place == slab) place.reset();
}

void Arbiter::Impl::ForgetParameter(Session& session, SlabId slab, SlabState state,
                                    RegionIndex index) {
  const uint32_t place = index.value();
  if (place >= session.image_slabs() || session.parameters[place] != slab) return;
  session.parameters[place].reset();
  session.first_vacant = std::min(session.first_vacant, place);
  session.parameters_taken = true;
  if (state != SlabState::kRevoking) {
    --session.parameters_granted;
    --session.stage_granted[session.StageOf(place)];
    return;
  }
  --session.parameters_revoking;
}

void Arbiter::Impl::TakeBack(Session& session, absl::Span<const SlabId> slabs, MoveReason reason,
                             absl::Time now) {
  if (slabs.empty()) return;
  CleanSlabs clean;
  bool revoking = false;
  for (const SlabId slab : slabs) {
    const SlabRecord record = ledger_->record(slab);
    if (session.rotation.in_flight.has_value()) {
      std::erase(session.rotation.in_flight->given_back, slab);
    }
    if (record.role == SlabRole::kKv) {
      --session.kv_held;
      session.kv_idle -= std::min(session.kv_idle, 1u);
    } else if (record.role == SlabRole::kWorkspace) {
      ForgetWorkspace(session, slab, record.region_index);
    } else if (record.role == SlabRole::kParameter) {
      revoking = revoking || record.state == SlabState::kRevoking;
      ForgetParameter(session, slab, record.state, record.region_index);
    }
    MustSucceed(ledger_->GiveBack(slab));
    returned_[slab.value()] = Returned{.at = now, .reason = reason};
    clean.slabs.push_back(slab);
  }
  if (revoking) {
    for (RevokeInFlight& revoke : session.revokes) {
      for (RevokeInFlight::Parameter& parameter : revoke.parameters) {
        parameter.returned =
            parameter.returned || ledger_->record(parameter.slab).state == SlabState::kQuiesced;
      }
    }
  }
  ClampKvRevokes(session);
  if (options_.skip_clean_for_same_tenant) ReuseUncleaned(session, clean.slabs, now);
  if (!clean.slabs.empty()) Act(std::move(clean));
}

void Arbiter::Impl::ReuseUncleaned(Session& session, std::vector<SlabId>& slabs, absl::Time now) {
  const std::vector<Session*> order = ActivationOrder();
  const auto first = std::find_if(order.begin(), order.end(),
                                  [](const Session* other) { return other->claim() > 0; });
  if (first == order.end() || *first != &session) return;
  const size_t count = std::min<size_t>(slabs.size(), session.claim());
  GrantParameters(session, static_cast<uint32_t>(count),
                  absl::MakeConstSpan(slabs).subspan(0, count), now);
  slabs.erase(slabs.begin(), slabs.begin() + static_cast<ptrdiff_t>(count));
}

void Arbiter::Impl::ClampKvRevokes(Session& session) {
  for (auto revoke = session.revokes.rbegin();
       revoke != session.revokes.rend() && session.kv_revoking > session.kv_held; ++revoke) {
    const uint32_t less = std::min(revoke->kv_outstanding, session.kv_revoking - session.kv_held);
    revoke->kv_outstanding -= less;
    session.kv_revoking -= less;
  }
}

void Arbiter::Impl::OnGrantMapped(SessionId id, GrantId grant_id, absl::Duration map,
                                  absl::Duration restore, absl::Time now) {
  Session* const session = FindConnected(id);
  if (session == nullptr) return;
  const auto found =
      std::find_if(session->grants.begin(), session->grants.end(),
                   [grant_id](const GrantInFlight& grant) { return grant.id == grant_id; });
  if (found == session->grants.end()) {
    if (!WasIssued(grant_id.value())) {
      Kill(*session,
           absl::StrCat("protocol violation: GrantMapped ", grant_id.value(),
                        ", which was never granted"),
           now);
    }
    Pump(now);
    return;
  }
  const GrantInFlight grant = *found;
  session->grants.erase(found);
  // A worker cannot have spent more time than passed, nor buy residence by saying so.
  const absl::Duration passed = now - grant.sent;
  map = std::clamp(map, absl::ZeroDuration(), passed);
  restore = std::clamp(restore, absl::ZeroDuration(), passed);
  TransferFinished transfer{.kind = TransferKind::kGrant,
                            .tenant = *session->tenant,
                            .role = grant.role,
                            .slabs = grant.slabs,
                            .duration = map,
                            .reason = grant.reason,
                            .finished_at = now};
  Act(transfer);
  if (grant.role == SlabRole::kKv) {
    session->kv_unmapped -= grant.slabs;
  } else if (grant.role == SlabRole::kParameter) {
    transfer.kind = TransferKind::kRestore;
    transfer.duration = restore;
    Act(transfer);
    session->restore_time += restore;
    session->irrevocable_until =
        now + std::max(options_.min_residence, session->restore_time * options_.residence_restores);
  }
  Pump(now);
}

void Arbiter::Impl::OnReport(SessionId id, const SessionLoad& load, absl::Time now) {
  Session* const session = FindConnected(id);
  if (session == nullptr) return;
  if (session->runs() && (load.active || session->load.active)) session->last_active = now;
  session->silent_from = now + options_.report_patience;
  session->load = load;
  session->blocks.Observe(load.block_bytes, now);
  session->next_use.Observe(load.active, now);
  const uint64_t idle = uint64_t{load.kv_slabs_cached} + load.kv_slabs_free;
  session->kv_idle = static_cast<uint32_t>(std::min<uint64_t>(idle, session->kv_held));
  Pump(now);
}

}  // namespace palimpsest
