// Temporal sharing: what the turn scheduler is told of the sessions, and what follows from what it
// decides.
#include <algorithm>

#include "absl/strings/str_cat.h"
#include "broker/core/arbiter_impl.h"

namespace palimpsest {
namespace {

TurnCandidate::Presence PresenceOf(const Session& session, absl::Time now) {
  using Presence = TurnCandidate::Presence;
  switch (session.phase) {
    case SessionPhase::kConnected:
      return session.SilentAt(now) ? Presence::kSilent : Presence::kHere;
    case SessionPhase::kDisconnected:
    case SessionPhase::kLost:
      return Presence::kAway;
    case SessionPhase::kLeaving:
      break;
  }
  return Presence::kLeaving;
}

}  // namespace

std::vector<TurnCandidate> Arbiter::Impl::TurnCandidates(absl::Time now) const {
  std::vector<TurnCandidate> candidates;
  for (const Session* session : list_) {
    const std::optional<Activation>& activation = session->activation;
    const bool complete = session->missing() == 0 && session->parameters_revoking == 0;
    const bool requests = activation.has_value() && activation->asked &&
                          activation->reason == MoveReason::kActivation;
    candidates.push_back(
        {.session = session->id,
         .priority = session->config.priority,
         .presence = PresenceOf(*session, now),
         .wants = session->load.active || requests,
         .ready = (complete || !activation.has_value()) && !session->ParameterGrantInFlight(),
         .keep_until = session->irrevocable_until});
  }
  return candidates;
}

void Arbiter::Impl::HandOutTurns(absl::Time now) {
  if (options_.sharing == Sharing::kSpatial) return;
  while (const auto decision = turns_.Update(TurnCandidates(now), now)) Carry(*decision, now);
  wake_ = std::min(wake_, turns_.NextDeadline());
  const std::optional<SessionId> holder = turns_.holder();
  for (Session* session : list_) {
    if (holder == session->id) {
      session->turn = TurnRank::kRuns;
      if (turns_.next().has_value() && session->silent_from > now) {
        wake_ = std::min(wake_, session->silent_from);
      }
    } else {
      session->turn = turns_.next() == session->id ? TurnRank::kNext : TurnRank::kWaits;
    }
    if (!session->activation.has_value()) continue;
    Activation& activation = *session->activation;
    if (!session->runs() && !activation.committed) {
      activation.deadline = absl::InfiniteFuture();
    } else if (activation.deadline == absl::InfiniteFuture()) {
      activation.deadline = now + options_.activation_deadline;
    }
  }
}

int64_t Arbiter::Impl::ForcedGap(const Session& session, uint64_t held, uint32_t need) const {
  const int64_t gap = session.FloorGap(held);
  return HasTurn(session) ? std::max<int64_t>(gap, need) : gap;
}

bool Arbiter::Impl::NextLacksMemory() const {
  return std::any_of(list_.begin(), list_.end(), [](const Session* session) {
    return session->turn == TurnRank::kNext && session->waiting();
  });
}

void Arbiter::Impl::Carry(const TurnDecision& decision, absl::Time now) {
  if (const auto* begin = std::get_if<BeginTurn>(&decision)) {
    Session& session = *sessions_.at(begin->session);
    session.last_active = now;
    Act(SendTakeTurn{.session = begin->session,
                     .turn = begin->turn,
                     .quantum = begin->quantum,
                     .tenant = *session.tenant,
                     .waited = begin->waited});
  } else if (const auto* end = std::get_if<EndTurn>(&decision)) {
    Act(SendEndTurn{.session = end->session, .turn = end->turn, .deadline = end->deadline});
  } else {
    const auto& overdue = std::get<TurnOverdue>(decision);
    Kill(*sessions_.at(overdue.session),
         absl::StrCat("turn ", overdue.turn.value(), " was not given up within ",
                      absl::FormatDuration(options_.turn_deadline)),
         now);
  }
}

void Arbiter::Impl::OnTurnEnded(SessionId id, TurnId turn, absl::Time now) {
  Session* const session = FindConnected(id);
  if (session == nullptr) return;
  if (turns_.OnTurnEnded(id, turn)) {
    session->last_active = now;
  } else if ((turn.value() >> 32) >= options_.generation) {
    Kill(*session,
         absl::StrCat("protocol violation: TurnEnded ", turn.value(),
                      ", a turn that was not asked back from it"),
         now);
  }
  Pump(now);
}

}  // namespace palimpsest
