#include "broker/core/turn_scheduler.h"

#include <algorithm>

namespace palimpsest {
namespace {

using Presence = TurnCandidate::Presence;

const TurnCandidate* Find(absl::Span<const TurnCandidate> candidates, SessionId session) {
  for (const TurnCandidate& candidate : candidates) {
    if (candidate.session == session) return &candidate;
  }
  return nullptr;
}

bool MayRun(const TurnCandidate& candidate) {
  return candidate.presence == Presence::kHere || candidate.presence == Presence::kSilent;
}

}  // namespace

std::optional<SessionId> TurnScheduler::holder() const {
  if (!turn_.has_value()) return std::nullopt;
  return turn_->session;
}

bool TurnScheduler::waits(SessionId session) const {
  const auto found = known_.find(session);
  return found != known_.end() && found->second.waiting_since.has_value();
}

std::optional<TurnDecision> TurnScheduler::Update(absl::Span<const TurnCandidate> candidates,
                                                  absl::Time now) {
  Sync(candidates, now);
  next_ = Choose(candidates);
  wake_ = absl::InfiniteFuture();
  std::optional<TurnDecision> decision = Decide(candidates, now);
  if (decision.has_value()) next_ = Choose(candidates);
  return decision;
}

void TurnScheduler::Sync(absl::Span<const TurnCandidate> candidates, absl::Time now) {
  std::erase_if(known_,
                [&](const auto& entry) { return Find(candidates, entry.first) == nullptr; });
  if (turn_.has_value()) {
    const TurnCandidate* const holder = Find(candidates, turn_->session);
    if (holder == nullptr) {
      turn_.reset();
    } else if (!MayRun(*holder)) {
      suspects_[turn_->session] = now + options_.end_deadline;
      LoseTurn();
    } else {
      NoteReady(*holder, now);
    }
  }
  for (const TurnCandidate& candidate : candidates) {
    const auto [entry, is_new] = known_.try_emplace(candidate.session);
    Known& known = entry->second;
    if (is_new && candidate.presence == Presence::kAway) {
      suspects_[candidate.session] = now + options_.end_deadline;
    }
    const bool waits =
        candidate.wants && candidate.presence == Presence::kHere && holder() != candidate.session;
    if (!waits) {
      known.waiting_since.reset();
    } else if (!known.waiting_since.has_value()) {
      known.waiting_since = ++sequence_;
      known.waiting_from = now;
    }
  }
  std::erase_if(suspects_, [&](const auto& suspect) {
    const TurnCandidate* const candidate = Find(candidates, suspect.first);
    return suspect.second <= now || candidate == nullptr || MayRun(*candidate);
  });
}

void TurnScheduler::NoteReady(const TurnCandidate& holder, absl::Time now) {
  if (!holder.ready || turn_->ready.has_value()) return;
  turn_->ready = now;
  turn_->keep_until = holder.keep_until;
}

void TurnScheduler::LoseTurn() {
  known_[turn_->session].last_end = ++sequence_;
  turn_.reset();
}

bool TurnScheduler::HeldBack(SessionId session) const {
  const uint64_t last_end = known_.at(session).last_end;
  return std::any_of(known_.begin(), known_.end(), [&](const auto& other) {
    return other.first != session && other.second.waiting_since.has_value() &&
           last_end > *other.second.waiting_since;
  });
}

std::optional<SessionId> TurnScheduler::Choose(absl::Span<const TurnCandidate> candidates) const {
  const TurnCandidate* best = nullptr;
  for (const TurnCandidate& candidate : candidates) {
    const auto& since = known_.at(candidate.session).waiting_since;
    if (!since.has_value() || HeldBack(candidate.session)) continue;
    if (best == nullptr || candidate.priority > best->priority ||
        (candidate.priority == best->priority &&
         *since < *known_.at(best->session).waiting_since)) {
      best = &candidate;
    }
  }
  if (best == nullptr) return std::nullopt;
  return best->session;
}

absl::Time TurnScheduler::Due(const TurnCandidate& holder, const TurnCandidate& next,
                              absl::Time now) const {
  if (!holder.wants || holder.presence == Presence::kSilent) return now;
  if (!turn_->ready.has_value()) return turn_->begun + options_.start_patience;
  const absl::Time due = *turn_->ready + options_.quantum;
  return next.ready ? due : std::max(due, turn_->keep_until);
}

std::optional<TurnDecision> TurnScheduler::Decide(absl::Span<const TurnCandidate> candidates,
                                                  absl::Time now) {
  if (turn_.has_value()) {
    if (turn_->overdue) return std::nullopt;
    if (turn_->end_deadline.has_value()) {
      if (*turn_->end_deadline > now) {
        wake_ = *turn_->end_deadline;
        return std::nullopt;
      }
      turn_->overdue = true;
      return TurnOverdue{turn_->session, turn_->id};
    }
    if (!next_.has_value()) return std::nullopt;
    const absl::Time due = Due(*Find(candidates, turn_->session), *Find(candidates, *next_), now);
    if (due > now) {
      wake_ = due;
      return std::nullopt;
    }
    turn_->end_deadline = now + options_.end_deadline;
    wake_ = *turn_->end_deadline;
    return EndTurn{turn_->session, turn_->id, *turn_->end_deadline};
  }
  if (!next_.has_value()) return std::nullopt;
  if (!suspects_.empty()) {
    for (const auto& [session, until] : suspects_) wake_ = std::min(wake_, until);
    return std::nullopt;
  }
  Known& known = known_.at(*next_);
  turn_ = Turn{.session = *next_,
               .id = TurnId((uint64_t{options_.generation} << 32) | ++turns_),
               .begun = now,
               .ready = std::nullopt,
               .keep_until = absl::InfinitePast(),
               .end_deadline = std::nullopt};
  NoteReady(*Find(candidates, *next_), now);
  known.waiting_since.reset();
  return BeginTurn{turn_->session, turn_->id, options_.quantum, now - known.waiting_from};
}

bool TurnScheduler::OnTurnEnded(SessionId session, TurnId turn) {
  if (!turn_.has_value() || turn_->session != session || turn_->id != turn ||
      !turn_->end_deadline.has_value()) {
    return false;
  }
  LoseTurn();
  return true;
}

}  // namespace palimpsest
