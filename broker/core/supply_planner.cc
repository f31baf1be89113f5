#include "broker/core/supply_planner.h"

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>

#include "broker/core/layer_supply.h"

namespace palimpsest {
namespace {

// What copies from an image are taken for until the worker has measured them.
constexpr double kAssumedImageBytesPerSecond = 10e9;

absl::Duration ReloadTime(Bytes bytes, double measured_bytes_per_second) {
  const double rate =
      measured_bytes_per_second > 0 ? measured_bytes_per_second : kAssumedImageBytesPerSecond;
  return absl::Seconds(static_cast<double>(bytes.count()) / rate);
}

// Why parameters cannot go at all, apart from who uses them.
std::optional<RemapOutcome> Obstacle(const Session& session, absl::Time now) {
  if (session.config.pinned) return RemapOutcome::kPinned;
  if (now < session.irrevocable_until) return RemapOutcome::kJustRestored;
  if (session.ParameterGrantInFlight() || session.rotation.in_flight.has_value() ||
      (session.activation.has_value() && session.activation->committed)) {
    return RemapOutcome::kArriving;
  }
  return std::nullopt;
}

// Nobody runs on these parameters: the tenant has nothing to do, or cannot run for lack of some and
// does not wait for them, or hangs, or has no turn.
bool Idle(const Session& session, absl::Time now) {
  if (session.SilentAt(now) || !session.runs()) return true;
  if (session.activation.has_value()) return false;
  return !session.load.active || session.missing() > 0;
}

class Planner {
 public:
  Planner(absl::Span<Session* const> sessions, const SupplyRequest& request,
          const SupplyRules& rules, absl::Time now)
      : request_(request), rules_(rules), now_(now), sessions_(sessions.begin(), sessions.end()) {
    std::stable_sort(sessions_.begin(), sessions_.end(), [](const Session* a, const Session* b) {
      return a->config.priority < b->config.priority;
    });
  }

  SupplyPlan Run() {
    TakeSurplus(RemapRule::kSurplusKv);
    if (request_.surplus_only) {
      if (request_.any_cached) TakeSurplus(RemapRule::kCachedKv);
      return std::move(plan_);
    }
    TakeParameters(
        RemapRule::kInactiveParameters, [this](const Session& s) { return InUse(s); },
        request_.need);
    TakeSurplus(RemapRule::kCachedKv);
    TakeKvOfSilent();
    if (request_.gentle) return std::move(plan_);
    TakeLayers();
    TakeKvByForce();
    if (request_.activation) {
      TakeOwnKv();
      TakeKvByForce();
    }
    TakeParameters(
        RemapRule::kBestEffortParameters,
        [](const Session& s) -> std::optional<RemapOutcome> {
          if (s.guaranteed()) return RemapOutcome::kActive;
          if (s.activation.has_value()) return RemapOutcome::kArriving;
          return std::nullopt;
        },
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

  void AddKv(Session* victim, uint32_t slabs, RemapRule rule, const CachedKv& worth = {}) {
    if (slabs == 0) return;
    Take& take = TakeFrom(victim);
    take.kv_slabs += slabs;
    take.surplus = take.surplus && rule == RemapRule::kSurplusKv;
    plan_.slabs += slabs;
    plan_.candidates.push_back({.tenant = *victim->tenant,
                                .rule = rule,
                                .outcome = RemapOutcome::kTaken,
                                .slabs = slabs,
                                .priority = victim->config.priority,
                                .idle = now_ - victim->last_active,
                                .next_use = NextUseOf(*victim),
                                .reload = worth.saves,
                                .score = KvWorth(worth) / absl::ToDoubleSeconds(SlabReload())});
  }

  // What is worth more than reloading parameters waits for rule kCachedKv.
  void TakeSurplus(RemapRule rule) {
    Session* own = nullptr;
    for (Session* session : sessions_) {
      if (session == request_.requester) {
        own = session;
      } else {
        TakeSurplusOf(*session, rule);
      }
    }
    if (own != nullptr && request_.activation) TakeSurplusOf(*own, rule);
  }

  void TakeSurplusOf(Session& session, RemapRule rule) {
    const CachedKv cached{.next_use = NextUseOf(session), .saves = session.load.cached_slab};
    uint32_t surplus = session.SurplusKv(request_.hysteresis);
    if (rule == RemapRule::kSurplusKv && !KvGoesFirst(cached, SlabReload())) {
      const uint32_t empty = session.load.kv_slabs_free;
      surplus = std::min(surplus, empty - std::min(empty, session.kv_revoking));
    }
    surplus -= std::min(surplus, TakenKv(&session));
    AddKv(&session, std::min(surplus, Remaining(request_.need)), rule, cached);
  }

  // Of one slab of parameters, over the fastest link.
  absl::Duration SlabReload() const {
    double rate = 0;
    for (const Session* session : sessions_) {
      rate = std::max(rate, session->load.image_bytes_per_second);
    }
    return ReloadTime(rules_.slab_bytes, rate);
  }

  absl::Duration NextUseOf(const Session& session) const {
    return session.SilentAt(now_) ? absl::InfiniteDuration() : session.next_use.Expected(now_);
  }

  // Why the parameters are not free to be taken: who uses them.
  std::optional<RemapOutcome> InUse(const Session& session) const {
    if (session.last_active > request_.spare_active_after) return RemapOutcome::kRecentlyActive;
    if (Idle(session, now_)) return std::nullopt;
    const Session& requester = *request_.requester;
    const bool waits_behind =
        request_.activation && session.waiting() && session.missing() > 0 &&
        ((requester.guaranteed() && !session.guaranteed()) ||
         (requester.activation.has_value() && ActivatesBefore(requester, session)));
    return waits_behind ? std::nullopt : std::optional(RemapOutcome::kActive);
  }

  ParameterVictim VictimOf(const Session& session) const {
    return {.priority = session.config.priority,
            .last_active = session.last_active,
            .next_use = NextUseOf(session),
            .reload = ReloadTime(rules_.slab_bytes * int64_t{session.parameters_granted},
                                 session.load.image_bytes_per_second)};
  }

  // Takes parameters of those that `in_use` has nothing to say about.
  void TakeParameters(RemapRule rule,
                      const std::function<std::optional<RemapOutcome>(const Session&)>& in_use,
                      uint32_t limit) {
    if (Remaining(limit) == 0) return;
    struct Candidate {
      Session* session = nullptr;
      ParameterVictim victim;
    };
    std::vector<Candidate> victims;
    for (Session* session : sessions_) {
      const Take* take = TakenFrom(session);
      if (session == request_.requester || !session->connected() ||
          session->parameters_granted + session->rotation.slots_held == 0 ||
          (take != nullptr && take->parameter_slabs > 0)) {
        continue;
      }
      const Candidate candidate{session, VictimOf(*session)};
      std::optional<RemapOutcome> obstacle = Obstacle(*session, now_);
      if (!obstacle.has_value()) obstacle = in_use(*session);
      if (obstacle.has_value()) {
        Note(rule, *session, candidate.victim, *obstacle, 0);
      } else {
        victims.push_back(candidate);
      }
    }
    std::stable_sort(victims.begin(), victims.end(), [this](const auto& a, const auto& b) {
      return GivesBefore(rules_.victims, a.victim, b.victim);
    });
    for (const auto& [session, victim] : victims) {
      const uint32_t slabs = Remaining(limit) > 0 ? TakeStages(*session, limit) : 0;
      Note(rule, *session, victim, slabs > 0 ? RemapOutcome::kTaken : RemapOutcome::kNotNeeded,
           slabs);
    }
  }

  // From the last stage on, no more than is needed. It stops rotating first.
  uint32_t TakeStages(Session& victim, uint32_t limit) {
    Take& take = TakeFrom(&victim);
    take.surplus = false;
    LeaveLayers(take);
    const uint32_t before = plan_.slabs;
    take.first_stage = static_cast<uint32_t>(victim.stages.size());
    if (victim.rotation.slots_held > 0) {
      take.dissolves = true;
      take.parameter_slabs += victim.rotation.slots_held;
      plan_.slabs += victim.rotation.slots_held;
    }
    for (size_t stage = victim.stages.size(); stage > 0 && Remaining(limit) > 0; --stage) {
      take.first_stage = static_cast<uint32_t>(stage - 1);
      take.parameter_slabs += victim.stage_granted[stage - 1];
      plan_.slabs += victim.stage_granted[stage - 1];
    }
    return plan_.slabs - before;
  }

  // What rotation would have given was not enough: whole stages go instead.
  void LeaveLayers(Take& take) {
    if (!take.rotation.has_value()) return;
    plan_.slabs -= std::exchange(take.rotation_slabs, 0);
    take.rotation.reset();
    for (RemapCandidate& candidate : plan_.candidates) {
      if (candidate.tenant != *take.victim->tenant || candidate.rule != RemapRule::kRotation) {
        continue;
      }
      candidate.outcome = RemapOutcome::kNotEnough;
      candidate.slabs = 0;
    }
  }

  void Note(RemapRule rule, const Session& session, const ParameterVictim& victim,
            RemapOutcome outcome, uint32_t slabs) {
    plan_.candidates.push_back({.tenant = *session.tenant,
                                .rule = rule,
                                .outcome = outcome,
                                .slabs = slabs,
                                .priority = victim.priority,
                                .idle = now_ - victim.last_active,
                                .next_use = victim.next_use,
                                .reload = victim.reload,
                                .score = VictimScore(victim)});
  }

  void TakeLayers() {
    if (Done()) return;
    for (LayerOffer& offer : PlanLayers(sessions_, *request_.requester, LayersOf::kAll,
                                        Remaining(request_.need), rules_, now_)) {
      plan_.candidates.push_back(CandidateOf(offer, now_));
      if (offer.slabs == 0) continue;
      Take& take = TakeFrom(offer.victim);
      take.surplus = false;
      take.rotation = std::move(offer.rotation);
      take.rotation_slabs = offer.slabs;
      plan_.slabs += offer.slabs;
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
            RemapRule::kSilentKv);
    }
  }

  void TakeKvByForce() {
    for (Session* victim : sessions_) {
      if (Done()) return;
      if (victim == request_.requester) continue;
      const Take* take = TakenFrom(victim);
      const uint32_t taken =
          take == nullptr ? 0 : take->kv_slabs + take->parameter_slabs + take->rotation_slabs;
      const uint32_t above = victim->AboveFloor() > taken ? victim->AboveFloor() - taken : 0;
      uint32_t revocable = victim->RevocableKv() - TakenKv(victim);
      if (request_.prefetch) {
        const uint32_t needed = victim->kv_needed + TakenKv(victim);
        const uint32_t kv = victim->kv_after_revokes();
        revocable = std::min(revocable, kv > needed ? kv - needed : 0);
      }
      const bool outranked = victim->config.priority < request_.requester->config.priority;
      const uint32_t allowed = Remaining(outranked ? request_.need : ForceForFloor());
      AddKv(victim, std::min({above, revocable, allowed}), RemapRule::kKvByForce);
    }
  }

  void TakeOwnKv() {
    for (Session* session : sessions_) {
      if (session != request_.requester) continue;
      AddKv(session, std::min(session->RevocableKv() - TakenKv(session), Remaining(request_.need)),
            RemapRule::kOwnKv);
    }
  }

  const SupplyRequest& request_;
  const SupplyRules& rules_;
  const absl::Time now_;
  std::vector<Session*> sessions_;
  SupplyPlan plan_;
};

}  // namespace

SupplyPlan PlanSupply(absl::Span<Session* const> sessions, const SupplyRequest& request,
                      const SupplyRules& rules, absl::Time now) {
  return Planner(sessions, request, rules, now).Run();
}

}  // namespace palimpsest
