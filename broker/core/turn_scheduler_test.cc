#include "broker/core/turn_scheduler.h"

#include <algorithm>
#include <random>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using Presence = TurnCandidate::Presence;

constexpr absl::Duration kQuantum = absl::Seconds(2);
constexpr absl::Duration kEnd = absl::Seconds(3);
constexpr absl::Duration kStart = absl::Seconds(5);

TurnOptions Options() {
  return {.quantum = kQuantum, .start_patience = kStart, .end_deadline = kEnd, .generation = 7};
}

// Sessions 1, 2, ... that the test moves; decisions in words.
class TurnSchedulerTest : public ::testing::Test {
 protected:
  TurnCandidate& Add(int32_t priority = 0, bool wants = true, bool ready = true) {
    candidates_.push_back({.session = SessionId(candidates_.size() + 1),
                           .priority = priority,
                           .wants = wants,
                           .ready = ready});
    return candidates_.back();
  }
  TurnCandidate& at(size_t session) { return candidates_[session - 1]; }
  void Advance(absl::Duration duration) { now_ += duration; }

  std::string Update() {
    std::string out;
    while (const auto decision = scheduler_.Update(candidates_, now_)) {
      if (const auto* begin = std::get_if<BeginTurn>(&*decision)) {
        turn_ = begin->turn;
        absl::StrAppend(&out, "begin ", begin->session.value(), " ");
      } else if (const auto* end = std::get_if<EndTurn>(&*decision)) {
        EXPECT_EQ(end->turn, turn_);
        EXPECT_EQ(end->deadline, now_ + kEnd);
        absl::StrAppend(&out, "end ", end->session.value(), " ");
      } else {
        const auto& overdue = std::get<TurnOverdue>(*decision);
        EXPECT_EQ(overdue.turn, turn_);
        absl::StrAppend(&out, "overdue ", overdue.session.value(), " ");
      }
    }
    return out;
  }
  bool Ended(size_t session) { return scheduler_.OnTurnEnded(SessionId(session), turn_); }

  std::vector<TurnCandidate> candidates_;
  TurnScheduler scheduler_{Options()};
  absl::Time now_ = absl::FromUnixSeconds(100);
  TurnId turn_;
};

TEST_F(TurnSchedulerTest, TwoTakeTurnsOfAQuantum) {
  Add();
  Add();
  EXPECT_EQ(Update(), "begin 1 ");
  EXPECT_EQ(turn_.value() >> 32, 7u);
  EXPECT_EQ(scheduler_.NextDeadline(), now_ + kQuantum);
  Advance(kQuantum - absl::Milliseconds(1));
  EXPECT_EQ(Update(), "");
  Advance(absl::Milliseconds(1));
  EXPECT_EQ(Update(), "end 1 ");
  EXPECT_EQ(scheduler_.holder(), SessionId(1)) << "until it has ended";
  EXPECT_TRUE(Ended(1));
  EXPECT_EQ(Update(), "begin 2 ");
  Advance(kQuantum);
  EXPECT_EQ(Update(), "end 2 ");
  EXPECT_TRUE(Ended(2));
  EXPECT_EQ(Update(), "begin 1 ");
}

TEST_F(TurnSchedulerTest, AloneItKeepsTheTurnIdleOrNot) {
  Add();
  Add(0, /*wants=*/false);
  EXPECT_EQ(Update(), "begin 1 ");
  Advance(kQuantum * 100);
  EXPECT_EQ(Update(), "");
  EXPECT_EQ(scheduler_.NextDeadline(), absl::InfiniteFuture());
  at(1).wants = false;
  EXPECT_EQ(Update(), "");
  EXPECT_EQ(scheduler_.holder(), SessionId(1));
  at(1).wants = true;
  at(2).wants = true;
  EXPECT_EQ(Update(), "end 1 ") << "its quantum is long over";
}

TEST_F(TurnSchedulerTest, WhoHasNothingToDoGivesItUpAtOnce) {
  Add();
  Add();
  EXPECT_EQ(Update(), "begin 1 ");
  Advance(absl::Milliseconds(10));
  at(1).wants = false;
  EXPECT_EQ(Update(), "end 1 ");
  EXPECT_TRUE(Ended(1));
  EXPECT_EQ(Update(), "begin 2 ");
}

TEST_F(TurnSchedulerTest, PriorityGoesFirstButPassesNobodyTwice) {
  Add(0);
  Add(5);
  Add(0);
  EXPECT_EQ(Update(), "begin 2 ");
  EXPECT_EQ(scheduler_.next(), SessionId(1));
  for (const char* expected : {"begin 1 ", "begin 3 ", "begin 2 ", "begin 1 ", "begin 3 "}) {
    Advance(kQuantum);
    Update();
    ASSERT_TRUE(Ended(scheduler_.holder()->value()));
    // 2 had its turn while 1 and 3 waited, and may not have another one before both.
    EXPECT_EQ(Update(), expected);
  }
}

TEST_F(TurnSchedulerTest, QuantumCountsFromWhenTheParametersAreThere) {
  Add(0, true, /*ready=*/false);
  Add();
  Add(0, false);
  EXPECT_EQ(Update(), "begin 1 ");
  Advance(absl::Seconds(4));
  EXPECT_EQ(Update(), "");
  at(1).ready = true;
  EXPECT_EQ(Update(), "");
  EXPECT_EQ(scheduler_.NextDeadline(), now_ + kQuantum);
  Advance(kQuantum);
  EXPECT_EQ(Update(), "end 1 ");
}

TEST_F(TurnSchedulerTest, WithoutParametersATurnIsBounded) {
  Add(0, true, /*ready=*/false);
  Add();
  EXPECT_EQ(Update(), "begin 1 ");
  EXPECT_EQ(scheduler_.NextDeadline(), now_ + kStart);
  Advance(kStart);
  EXPECT_EQ(Update(), "end 1 ");
}

TEST_F(TurnSchedulerTest, ParametersThatMayNotBeTakenAreUsedUntilTheNextHasItsOwn) {
  Add().keep_until = now_ + absl::Seconds(9);
  Add(0, true, /*ready=*/false);
  EXPECT_EQ(Update(), "begin 1 ");
  EXPECT_EQ(scheduler_.NextDeadline(), now_ + absl::Seconds(9));
  Advance(absl::Seconds(5));
  EXPECT_EQ(Update(), "");
  at(2).ready = true;
  EXPECT_EQ(Update(), "end 1 ");
}

TEST_F(TurnSchedulerTest, WhatIsRestoredDuringATurnMakesItNoLonger) {
  Add(0, true, /*ready=*/false);
  Add(0, true, /*ready=*/false);
  EXPECT_EQ(Update(), "begin 1 ");
  at(1).ready = true;
  at(1).keep_until = now_ + absl::Seconds(4);
  EXPECT_EQ(Update(), "");
  Advance(absl::Seconds(3));
  at(1).keep_until = now_ + absl::Seconds(4);
  EXPECT_EQ(Update(), "");
  Advance(absl::Seconds(1));
  EXPECT_EQ(Update(), "end 1 ");
}

TEST_F(TurnSchedulerTest, WhoHoldsOnIsOverdueOnceAndTheNextWaitsUntilItIsGone) {
  Add();
  Add();
  EXPECT_EQ(Update(), "begin 1 ");
  Advance(kQuantum);
  EXPECT_EQ(Update(), "end 1 ");
  EXPECT_EQ(scheduler_.NextDeadline(), now_ + kEnd);
  Advance(kEnd);
  EXPECT_EQ(Update(), "overdue 1 ");
  EXPECT_EQ(Update(), "");
  at(1).presence = Presence::kLeaving;
  EXPECT_EQ(Update(), "");
  EXPECT_FALSE(scheduler_.holder().has_value());
  EXPECT_FALSE(Ended(1)) << "it has lost the turn";
  candidates_.erase(candidates_.begin());
  EXPECT_EQ(Update(), "begin 2 ");
}

TEST_F(TurnSchedulerTest, ProcessThatLingersDelaysTheNextOnlyForTheDeadline) {
  Add();
  Add();
  EXPECT_EQ(Update(), "begin 1 ");
  at(1).presence = Presence::kLeaving;
  EXPECT_EQ(Update(), "");
  EXPECT_EQ(scheduler_.NextDeadline(), now_ + kEnd);
  Advance(kEnd);
  EXPECT_EQ(Update(), "begin 2 ");
}

TEST_F(TurnSchedulerTest, SilentHolderIsAskedAtOnceAndSilentOnesGetNone) {
  Add();
  Add();
  Add().presence = Presence::kSilent;
  EXPECT_EQ(Update(), "begin 1 ");
  at(1).presence = Presence::kSilent;
  EXPECT_EQ(Update(), "end 1 ");
  EXPECT_TRUE(Ended(1));
  EXPECT_EQ(Update(), "begin 2 ");
  EXPECT_FALSE(scheduler_.next().has_value());
}

TEST_F(TurnSchedulerTest, DisconnectedHolderLosesItAndComesBackWithoutOne) {
  Add();
  Add();
  EXPECT_EQ(Update(), "begin 1 ");
  at(1).presence = Presence::kAway;
  EXPECT_EQ(Update(), "") << "it may still run";
  at(1).presence = Presence::kHere;
  EXPECT_EQ(Update(), "begin 2 ");
  EXPECT_FALSE(scheduler_.OnTurnEnded(SessionId(1), turn_));
}

TEST_F(TurnSchedulerTest, AfterARestartTheFirstTurnWaitsForThoseWhoMayHaveOne) {
  Add().presence = Presence::kAway;
  Add().presence = Presence::kAway;
  Add();
  EXPECT_EQ(Update(), "");
  at(1).presence = Presence::kHere;
  EXPECT_EQ(Update(), "");
  EXPECT_EQ(scheduler_.NextDeadline(), now_ + kEnd);
  at(2).presence = Presence::kHere;
  EXPECT_EQ(Update(), "begin 3 ") << "who waits longest";
}

TEST_F(TurnSchedulerTest, AnswersThatWereNotAskedForAreRefused) {
  Add();
  Add();
  EXPECT_FALSE(scheduler_.OnTurnEnded(SessionId(1), TurnId(1)));
  EXPECT_EQ(Update(), "begin 1 ");
  EXPECT_FALSE(Ended(1)) << "it was not asked back";
  Advance(kQuantum);
  EXPECT_EQ(Update(), "end 1 ");
  EXPECT_FALSE(Ended(2));
  EXPECT_FALSE(scheduler_.OnTurnEnded(SessionId(1), TurnId(turn_.value() + 1)));
  EXPECT_TRUE(Ended(1));
  EXPECT_FALSE(Ended(1));
}

// Sessions that come, want, stop wanting, answer late, hang and go at random. With `faults` off
// they all answer within kAnswer, and the waits are bounded.
class Walk {
 public:
  static constexpr absl::Duration kAnswer = absl::Milliseconds(300);

  Walk(uint32_t seed, bool faults) : random_(seed), faults_(faults) {}

  void Run(int steps) {
    for (int i = 0; i < steps && problem.empty(); ++i) {
      Change();
      Settle();
      Advance();
    }
  }

  std::string problem;
  int begun = 0, ended = 0, overdue = 0;
  absl::Duration longest_wait;

 private:
  struct Worker {
    TurnCandidate candidate;
    absl::Time waits_from = absl::InfiniteFuture();
    int others_since = 0;
    std::optional<absl::Time> answers_at;
    bool hangs = false;
  };

  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  void Problem(const std::string& what) {
    if (problem.empty()) problem = what;
  }

  void Change() {
    if (workers_.size() < 2 || (workers_.size() < 6 && Below(40) == 0)) {
      Worker worker;
      worker.candidate = {.session = SessionId(++ids_),
                          .priority = static_cast<int32_t>(Below(3)),
                          .ready = !faults_ || Below(2) == 0};
      if (faults_ && Below(8) == 0) worker.candidate.presence = Presence::kAway;
      workers_.push_back(worker);
    }
    Worker& worker = workers_[Below(static_cast<uint32_t>(workers_.size()))];
    if (Below(3) == 0) worker.candidate.wants = !worker.candidate.wants;
    if (!faults_) return;
    worker.candidate.ready = Below(4) != 0;
    if (Below(4) == 0) worker.candidate.keep_until = now_ + absl::Milliseconds(Below(6000));
    worker.hangs = Below(10) == 0;
    const uint32_t fate = Below(60);
    if (worker.candidate.presence == Presence::kLeaving) {
      if (fate < 20) Erase(worker.candidate.session);
    } else if (fate < 4) {
      worker.candidate.presence = static_cast<Presence>(fate);
    } else if (fate == 4) {
      Erase(worker.candidate.session);
    } else if (fate < 20) {
      worker.candidate.presence = Presence::kHere;
    }
  }

  void Erase(SessionId session) {
    std::erase_if(workers_, [&](const Worker& w) { return w.candidate.session == session; });
  }

  Worker* Of(SessionId session) {
    for (Worker& worker : workers_) {
      if (worker.candidate.session == session) return &worker;
    }
    return nullptr;
  }

  std::vector<TurnCandidate> Candidates() const {
    std::vector<TurnCandidate> candidates;
    for (const Worker& worker : workers_) candidates.push_back(worker.candidate);
    return candidates;
  }

  static bool Waits(const Worker& worker) {
    return worker.candidate.wants && worker.candidate.presence == Presence::kHere;
  }

  bool MayStillRun(SessionId session) {
    const Worker* const worker = Of(session);
    return worker != nullptr && worker->candidate.presence > Presence::kSilent;
  }

  void Lost() {
    lost_ = *std::exchange(running_, std::nullopt);
    lost_until_ = now_ + kEnd;
  }

  void Settle() {
    int rounds = 0;
    if (running_.has_value() && (Of(*running_) == nullptr || MayStillRun(*running_))) {
      Lost();
    }
    if (!MayStillRun(lost_)) lost_until_ = absl::InfinitePast();
    while (const auto decision = scheduler_.Update(Candidates(), now_)) {
      if (++rounds > 30) return Problem("no end of decisions");
      std::visit([this](const auto& d) { Do(d); }, *decision);
    }
    for (Worker& worker : workers_) {
      const bool waits = Waits(worker) && scheduler_.holder() != worker.candidate.session;
      if (!waits) {
        worker.waits_from = absl::InfiniteFuture();
      } else if (worker.waits_from == absl::InfiniteFuture()) {
        worker.waits_from = now_;
        worker.others_since = 0;
      }
      if (waits != scheduler_.waits(worker.candidate.session)) Problem("who waits is unclear");
    }
    Check();
  }

  void Do(const BeginTurn& begin) {
    ++begun;
    Worker* const worker = Of(begin.session);
    if (worker == nullptr || !Waits(*worker)) return Problem("a turn for who cannot use it");
    if (running_.has_value()) return Problem("two run at once");
    if (now_ < lost_until_) Problem("the one before may still run");
    running_ = begin.session;
    worker->answers_at.reset();
    longest_wait = std::max(longest_wait, begin.waited);
    if (!faults_ && worker->waits_from <= now_) {
      const int others = static_cast<int>(workers_.size()) - 1;
      if (worker->others_since > others) Problem("one was passed twice");
      if (begin.waited > (kQuantum + kAnswer) * others) Problem("the wait was too long");
    }
  }

  void Do(const EndTurn& end) {
    ++ended;
    if (running_ != end.session) return Problem("a turn is asked back from who has none");
    const bool wanted = std::any_of(workers_.begin(), workers_.end(), [&](const Worker& w) {
      return w.candidate.session != end.session && Waits(w);
    });
    if (!wanted) Problem("a turn ends for nobody");
    if (end.deadline != now_ + kEnd) Problem("another deadline");
    if (!Of(end.session)->hangs) {
      Of(end.session)->answers_at = now_ + absl::Milliseconds(Below(300));
    }
  }

  void Do(const TurnOverdue& late) {
    ++overdue;
    if (running_ != late.session || !faults_) return Problem("overdue without a turn");
    Of(late.session)->candidate.presence = Presence::kLeaving;
    Lost();
  }

  void Check() {
    if (scheduler_.NextDeadline() <= now_) Problem("a deadline stays behind the clock");
    const bool anyone = std::any_of(workers_.begin(), workers_.end(),
                                    [](const Worker& worker) { return Waits(worker); });
    if (!faults_ && anyone && !scheduler_.holder().has_value()) Problem("nobody runs");
    if (anyone && !scheduler_.holder().has_value() &&
        scheduler_.NextDeadline() > now_ + std::max(kEnd, kStart)) {
      Problem("nobody runs, without a bound");
    }
    if (scheduler_.holder().has_value() && scheduler_.holder() != running_) Problem("two accounts");
  }

  void Advance() {
    const absl::Time end = now_ + absl::Milliseconds(Below(1500));
    while (now_ < end && problem.empty()) {
      absl::Time next = std::min(end, scheduler_.NextDeadline());
      for (const Worker& worker : workers_) next = std::min(next, worker.answers_at.value_or(end));
      now_ = std::max(now_, next);
      for (Worker& worker : workers_) {
        if (!worker.answers_at.has_value() || *worker.answers_at > now_) continue;
        worker.answers_at.reset();
        const SessionId session = worker.candidate.session;
        if (scheduler_.holder() != session) continue;
        if (!scheduler_.OnTurnEnded(session, TurnId((uint64_t{7} << 32) + begun))) {
          Problem("an answer was refused");
        }
        running_.reset();
        for (Worker& other : workers_) other.others_since += other.candidate.session != session;
      }
      Settle();
    }
  }

  std::mt19937 random_;
  const bool faults_;
  TurnScheduler scheduler_{Options()};
  std::vector<Worker> workers_;
  std::optional<SessionId> running_;
  SessionId lost_;
  absl::Time lost_until_ = absl::InfinitePast();
  absl::Time now_ = absl::FromUnixSeconds(1000);
  uint64_t ids_ = 0;
};

TEST(TurnSchedulerProperty, WaitIsAtMostTheTurnsOfTheOthers) {
  int begun = 0;
  absl::Duration longest;
  for (uint32_t seed = 0; seed < 200; ++seed) {
    Walk walk(seed, /*faults=*/false);
    walk.Run(500);
    ASSERT_EQ(walk.problem, "") << "seed " << seed;
    begun += walk.begun;
    longest = std::max(longest, walk.longest_wait);
  }
  EXPECT_GT(begun, 5000);
  EXPECT_GT(longest, kQuantum * 2) << "the walk did not come near the bound";
}

TEST(TurnSchedulerFuzz, OneAtATimeWhateverHappens) {
  int begun = 0, ended = 0, overdue = 0;
  for (uint32_t seed = 0; seed < 300; ++seed) {
    Walk walk(seed, /*faults=*/true);
    walk.Run(500);
    ASSERT_EQ(walk.problem, "") << "seed " << seed;
    begun += walk.begun;
    ended += walk.ended;
    overdue += walk.overdue;
  }
  EXPECT_GT(begun, 5000);
  EXPECT_GT(ended, 3000);
  EXPECT_GT(overdue, 100);
}

}  // namespace
}  // namespace palimpsest
