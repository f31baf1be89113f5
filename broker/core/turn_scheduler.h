// Temporal sharing: whose turn it is. One tenant at a time runs, on all GPUs of the pool at once. A
// turn lasts for a quantum, counted from when the tenant has its parameters; one that has nothing
// to do gives it up at once, one that nobody waits for keeps it.
//
// Order: of those who wait, A is held back while another tenant B waits that A had a turn in spite
// of (A's last turn ended after B began to wait). Of those who are not held back the highest
// priority goes, then who waits longest. Whoever waits longest is never held back, so nobody
// starves: while a tenant waits, each other one ends at most one turn, and the wait is at most the
// sum of theirs.
//
// Every phase of a turn is bounded: `start_patience` to get the parameters, the quantum (or
// keep_until), `end_deadline` to finish what was submitted, after which the process is to be
// killed. A session that loses its connection or is ending loses the turn; as it may still run a
// little, the next turn begins when it is back or gone, after end_deadline at the latest. The same
// goes for sessions that an earlier broker process knew and that have not returned, since any of
// them may have had a turn.
//
// Pure: no clock of its own, which must not run backwards. The caller serializes.
#ifndef PALIMPSEST_BROKER_CORE_TURN_SCHEDULER_H_
#define PALIMPSEST_BROKER_CORE_TURN_SCHEDULER_H_

#include <cstdint>
#include <map>
#include <optional>
#include <variant>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/ids.h"

namespace palimpsest {

struct TurnOptions {
  absl::Duration quantum = absl::Seconds(2);
  // How long a turn may last without the tenant's parameters, if others wait.
  absl::Duration start_patience = absl::Seconds(20);
  // How long a worker may take to end its turn. Well above the longest step.
  absl::Duration end_deadline = absl::Seconds(10);
  // Of the broker; in the high 32 bits of turn ids.
  uint32_t generation = 1;
};

// A session as it is now.
struct TurnCandidate {
  enum class Presence : uint8_t {
    kHere,
    kSilent,   // connected, but has not reported for too long: gets no turn and soon loses its own
    kAway,     // its connection broke, or it belongs to an earlier broker process
    kLeaving,  // detached or killed, until its process is gone
  };
  SessionId session;
  int32_t priority = 0;
  Presence presence = Presence::kHere;
  // Requests run or wait.
  bool wants = false;
  // It waits for no parameters: they are mapped and restored, or it has not asked for them.
  bool ready = false;
  // Restored parameters stay until then: a turn is not ended before for the sake of a tenant that
  // lacks its own. What counts is the time known when the turn's parameters are there.
  absl::Time keep_until = absl::InfinitePast();
};

struct BeginTurn {
  SessionId session;
  TurnId turn;
  absl::Duration quantum;
  // Since it began to wait.
  absl::Duration waited;
};
struct EndTurn {
  SessionId session;
  TurnId turn;
  absl::Time deadline;
};
// It missed the deadline of its EndTurn: kill it. Comes once for each turn.
struct TurnOverdue {
  SessionId session;
  TurnId turn;
};
using TurnDecision = std::variant<BeginTurn, EndTurn, TurnOverdue>;

class TurnScheduler {
 public:
  explicit TurnScheduler(const TurnOptions& options) : options_(options) {}

  // Looks at all sessions that have not ended. At most one decision; call again, with what it
  // changed, until none comes.
  std::optional<TurnDecision> Update(absl::Span<const TurnCandidate> candidates, absl::Time now);

  // The session's answer to EndTurn. False if this turn was not asked back from it.
  bool OnTurnEnded(SessionId session, TurnId turn);

  // Who may run. A turn that is being ended counts until it has ended.
  std::optional<SessionId> holder() const;
  // Who is to have the next turn, if it were now.
  std::optional<SessionId> next() const { return next_; }
  bool waits(SessionId session) const;

  // When Update has something to do although nothing else changed; as of the last Update.
  absl::Time NextDeadline() const { return wake_; }

 private:
  struct Known {
    // Counts of `sequence_`: what came earlier has the smaller one.
    std::optional<uint64_t> waiting_since;
    absl::Time waiting_from;
    uint64_t last_end = 0;
  };
  struct Turn {
    SessionId session;
    TurnId id;
    absl::Time begun;
    std::optional<absl::Time> ready;
    absl::Time keep_until = absl::InfinitePast();
    std::optional<absl::Time> end_deadline;  // set once EndTurn was sent
    bool overdue = false;
  };

  void Sync(absl::Span<const TurnCandidate> candidates, absl::Time now);
  void NoteReady(const TurnCandidate& holder, absl::Time now);
  void LoseTurn();
  std::optional<SessionId> Choose(absl::Span<const TurnCandidate> candidates) const;
  bool HeldBack(SessionId session) const;
  // When the turn ends for `next`.
  absl::Time Due(const TurnCandidate& holder, const TurnCandidate& next, absl::Time now) const;
  std::optional<TurnDecision> Decide(absl::Span<const TurnCandidate> candidates, absl::Time now);

  const TurnOptions options_;
  std::map<SessionId, Known> known_;
  std::optional<Turn> turn_;
  std::optional<SessionId> next_;
  // Sessions that may run without having a turn, and until when the others wait for that.
  std::map<SessionId, absl::Time> suspects_;
  uint64_t sequence_ = 0;
  uint32_t turns_ = 0;
  absl::Time wake_ = absl::InfiniteFuture();
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_TURN_SCHEDULER_H_
