#include "broker/core/supply_planner.h"

#include <algorithm>
#include <functional>

namespace palimpsest {
namespace {

// Whether parameters may go at all, apart from who uses them.
bool Movable(const Session& session, absl::Time now) {
  return session.connected() && !session.config.pinned && session.parameters_granted > 0 &&
         now >= session.irrevocable_until && !session.ParameterGrantInFlight() &&
         !(session.activation.has_value() && session.activation->committed);
}

// Nobody runs on these parameters: the tenant has nothing to do, or cannot run for lack of some and
// does not wait for them, or hangs.
bool Idle(const Session& session, absl::Time now) {
  if (session.SilentAt(now)) return true;
  if (session.activation.has_value()) return false;
  return !session.load.active || session.missing() > 0;
}

class Planner {
 public:
  Planner(absl::Span<Session* const> sessions, const SupplyRequest& request, absl::Time now)
      : request_(request), now_(now), sessions_(sessions.begin(), sessions.end()) {
    std::stable_sort(sessions_.begin(), sessions_.end(), [](const Session* a, const Session* b) {
      return a->config.priority < b->config.priority;
    });
  }

  SupplyPlan Run() {
    TakeSurplus();
    if (request_.surplus_only) return std::move(plan_);
    TakeParameters([this](const Session& s) { return IdleFor(s); }, request_.need);
    TakeKvOfSilent();
    TakeKvByForce();
    if (request_.activation) {
      TakeOwnKv();
      TakeKvByForce();
    }
    TakeParameters([](const Session& s) { return !s.guaranteed() && !s.activation.has_value(); },
                   ForceForFloor());
    return std::move(plan_);
  }

 private:
  bool Done() const { return plan_.slabs >= request_.need; }
  uint32_t Remaining(uint32_t limit) const {
    const uint32_t bound = std::min(limit, request_.need);
    return bound > plan_.slabs ? bound - plan_.slabs : 0;
  }

  // Own KV that goes takes the requester further below its floor.
  uint32_t ForceForFloor() const {
    const int64_t gap = request_.floor_gap + TakenKv(request_.requester);
    return static_cast<uint32_t>(std::max<int64_t>(gap, 0));
  }

  Take& TakeFrom(Session* victim) {
    for (Take& take : plan_.takes) {
      if (take.victim == victim) return take;
    }
    plan_.takes.push_back(Take{.victim = victim});
    return plan_.takes.back();
  }

  const Take* TakenFrom(const Session* victim) const {
    for (const Take& take : plan_.takes) {
      if (take.victim == victim) return &take;
    }
    return nullptr;
  }

  uint32_t TakenKv(const Session* victim) const {
    const Take* take = TakenFrom(victim);
    return take == nullptr ? 0 : take->kv_slabs;
  }

  void AddKv(Session* victim, uint32_t slabs, bool surplus) {
    if (slabs == 0) return;
    Take& take = TakeFrom(victim);
    take.kv_slabs += slabs;
    take.surplus = take.surplus && surplus;
    plan_.slabs += slabs;
  }

  void TakeSurplus() {
    Session* own = nullptr;
    for (Session* session : sessions_) {
      if (session == request_.requester) {
        own = session;
      } else {
        AddKv(session, std::min(session->SurplusKv(request_.hysteresis), Remaining(request_.need)),
              true);
      }
    }
    if (own != nullptr && request_.activation) {
      AddKv(own, std::min(own->SurplusKv(request_.hysteresis), Remaining(request_.need)), true);
    }
  }

  bool IdleFor(const Session& session) const {
    if (session.last_active > request_.spare_active_after) return false;
    if (Idle(session, now_)) return true;
    const Session& requester = *request_.requester;
    return request_.activation && session.waiting() && session.missing() > 0 &&
           ((requester.guaranteed() && !session.guaranteed()) ||
            (requester.activation.has_value() && ActivatesBefore(requester, session)));
  }

  void TakeParameters(const std::function<bool(const Session&)>& eligible, uint32_t limit) {
    std::vector<Session*> victims;
    for (Session* session : sessions_) {
      const Take* take = TakenFrom(session);
      if (session != request_.requester && Movable(*session, now_) && eligible(*session) &&
          (take == nullptr || take->parameter_slabs == 0)) {
        victims.push_back(session);
      }
    }
    std::stable_sort(victims.begin(), victims.end(), [](const Session* a, const Session* b) {
      if (a->config.priority != b->config.priority) return a->config.priority < b->config.priority;
      return a->last_active > b->last_active;
    });
    for (Session* victim : victims) {
      if (Remaining(limit) == 0) return;
      Take& take = TakeFrom(victim);
      take.surplus = false;
      for (size_t stage = victim->stages.size(); stage > 0 && Remaining(limit) > 0; --stage) {
        take.first_stage = static_cast<uint32_t>(stage - 1);
        take.parameter_slabs += victim->stage_granted[stage - 1];
        plan_.slabs += victim->stage_granted[stage - 1];
      }
    }
  }

  // A floor is for whoever asks for it.
  void TakeKvOfSilent() {
    for (Session* victim : sessions_) {
      if (victim == request_.requester || !victim->SilentAt(now_) ||
          victim->last_active > request_.spare_active_after) {
        continue;
      }
      AddKv(victim, std::min(victim->RevocableKv() - TakenKv(victim), Remaining(request_.need)),
            false);
    }
  }

  void TakeKvByForce() {
    for (Session* victim : sessions_) {
      if (Done()) return;
      if (victim == request_.requester) continue;
      const Take* take = TakenFrom(victim);
      const uint32_t taken = take == nullptr ? 0 : take->kv_slabs + take->parameter_slabs;
      const uint32_t above = victim->AboveFloor() > taken ? victim->AboveFloor() - taken : 0;
      uint32_t revocable = victim->RevocableKv() - TakenKv(victim);
      if (request_.prefetch) {
        const uint32_t needed = victim->kv_needed + TakenKv(victim);
        const uint32_t kv = victim->kv_after_revokes();
        revocable = std::min(revocable, kv > needed ? kv - needed : 0);
      }
      const bool outranked = victim->config.priority < request_.requester->config.priority;
      const uint32_t allowed = Remaining(outranked ? request_.need : ForceForFloor());
      AddKv(victim, std::min({above, revocable, allowed}), false);
    }
  }

  void TakeOwnKv() {
    for (Session* session : sessions_) {
      if (session != request_.requester) continue;
      AddKv(session, std::min(session->RevocableKv() - TakenKv(session), Remaining(request_.need)),
            false);
    }
  }

  const SupplyRequest& request_;
  const absl::Time now_;
  std::vector<Session*> sessions_;
  SupplyPlan plan_;
};

}  // namespace

SupplyPlan PlanSupply(absl::Span<Session* const> sessions, const SupplyRequest& request,
                      absl::Time now) {
  return Planner(sessions, request, now).Run();
}

}  // namespace palimpsest
