// Temporal sharing on a simulated node: who has the turn, and what it means for memory.
#include <algorithm>

#include "broker/core/arbiter_fixture.h"

namespace palimpsest {
namespace {

class ArbiterTurnsTest : public ArbiterTest {
 protected:
  static ArbiterOptions Temporal(uint32_t pool) {
    ArbiterOptions options = Options(pool);
    options.sharing = Sharing::kTemporal;
    return options;
  }
  void Quantum() { node().Advance(node().options().quantum); }
  // Attached, idle, with all parameters, past their residence.
  void BringIdle(uint32_t tenant) {
    Bring(tenant, 0, /*active=*/false);
    ASSERT_EQ(parameters(tenant), 20u);
  }
  // Both have requests; the first came first and runs.
  void BringHolderAndNext() {
    BringIdle(0);
    BringIdle(1);
    node().Report(worker(0), true, 0, 0);
    node().Settle();
    node().Report(worker(1), true, 0, 0);
  }
};

TEST_F(ArbiterTurnsTest, ThoseWithRequestsTakeTurns) {
  Start(Temporal(60), {Tenant("a", 0, 0), Tenant("b", 0, 0), Tenant("idle", 0, 0)});
  for (uint32_t tenant : {0u, 1u, 2u}) BringIdle(tenant);
  node().Report(worker(0), true, 0, 0);
  node().Settle();
  EXPECT_TRUE(status(0).has_turn);
  node().Report(worker(1), true, 0, 0);
  EXPECT_TRUE(status(1).waits_for_turn);
  const int idle_turns = worker(2).turns;
  for (uint32_t i = 0; i < 10; ++i) {
    EXPECT_TRUE(status(i % 2).has_turn) << i;
    Quantum();
    EXPECT_TRUE(worker(i % 2).turn_ending);
    EXPECT_FALSE(worker((i + 1) % 2).turn.has_value()) << "before the other one's has ended";
    node().Settle();
  }
  EXPECT_EQ(worker(2).turns, idle_turns);
}

TEST_F(ArbiterTurnsTest, TurnGoesOnAtOnceWhenItsHolderHasNothingToDo) {
  Start(Temporal(60), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  BringHolderAndNext();
  ASSERT_TRUE(status(0).has_turn);
  node().Report(worker(0), false, 0, 0);
  node().Settle();
  EXPECT_TRUE(status(1).has_turn);
}

TEST_F(ArbiterTurnsTest, ParametersOfWhoHasNoTurnGiveWayToTheHoldersKv) {
  Start(Temporal(50), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  BringIdle(0);
  BringIdle(1);
  node().Report(worker(1), true, 0, 0);
  node().Settle();
  node().Report(worker(0), true, 0, 0);
  Quantum();
  node().Settle();
  ASSERT_TRUE(status(0).has_turn);
  ASSERT_TRUE(status(1).load.active);
  node().SetKvTarget(worker(0), 18, 18);
  node().Settle();
  EXPECT_EQ(kv(0), 18u);
  EXPECT_EQ(parameters(1), 12u) << "two stages of four for eight slabs";
  EXPECT_EQ(parameters(0), 20u);
}

TEST_F(ArbiterTurnsTest, SequencesThatWaitGetParametersOfWhoHadATurnJustNow) {
  for (const bool sequences_wait : {false, true}) {
    Start(Temporal(60), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
    BringIdle(0);
    BringIdle(1);
    node().Report(worker(1), true, 0, 0);
    node().Settle();
    node().Report(worker(0), true, 0, 0, /*waiting=*/sequences_wait ? 9 : 0);
    Quantum();
    node().Settle();
    ASSERT_TRUE(status(0).has_turn);
    node().SetKvTarget(worker(0), 60, 0);
    for (int i = 0; i < 3; ++i) node().Settle();
    EXPECT_EQ(kv(0), sequences_wait ? 40u : 20u) << "all but room for the next one's parameters";
    EXPECT_EQ(parameters(1), sequences_wait ? 0u : 20u);
    if (sequences_wait) node().Activate(worker(1));
    Quantum();
    node().Settle();
    ASSERT_TRUE(status(1).has_turn);
    EXPECT_EQ(parameters(1), 20u);
    EXPECT_EQ(kv(0), sequences_wait ? 40u : 20u) << "nothing that is in use had to go";
  }
}

TEST_F(ArbiterTurnsTest, NextIsRestoredWhileTheHolderRuns) {
  Start(Temporal(46), {Tenant("a", 0, 0), Tenant("b", 0, 0), Tenant("idle", 0, 0)});
  BringIdle(2);
  BringIdle(0);
  ASSERT_TRUE(node().Attach(1).ok());
  node().Report(worker(0), true, 0, 0);
  node().Settle();
  ASSERT_TRUE(status(0).has_turn);
  node().Activate(worker(1));
  EXPECT_FALSE(status(1).has_turn);
  node().Settle();
  EXPECT_EQ(parameters(1), 20u) << "from 6 free slabs and those of a tenant without requests";
  EXPECT_EQ(parameters(0), 20u);
  EXPECT_LT(parameters(2), 20u);
  EXPECT_TRUE(status(0).has_turn);
}

TEST_F(ArbiterTurnsTest, NextThatNeedsTheHoldersMemoryGetsItWithItsTurn) {
  Start(Temporal(24), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  ASSERT_TRUE(node().Attach(0).ok());
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(0));
  node().Settle();
  node().Report(worker(0), true, 0, 0);
  node().Activate(worker(1));
  EXPECT_TRUE(worker(0).revokes.empty());
  node().Advance(absl::Milliseconds(1900));
  EXPECT_FALSE(worker(0).turn_ending);
  // The quantum, and the residence of what was restored for this turn.
  node().Advance(absl::Milliseconds(200));
  ASSERT_TRUE(worker(0).turn_ending);
  EXPECT_TRUE(worker(0).revokes.empty());
  node().AnswerEndTurn(worker(0));
  EXPECT_TRUE(status(1).has_turn);
  EXPECT_EQ(worker(0).revokes.size(), 1u);
  node().Settle();
  EXPECT_EQ(parameters(1), 20u);
  EXPECT_EQ(worker(1).refusals, 0);
}

TEST_F(ArbiterTurnsTest, QuantumCountsFromWhenTheParametersAreRestored) {
  ArbiterOptions options = Temporal(60);
  options.min_residence = absl::ZeroDuration();
  options.residence_restores = 0;
  Start(options, {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  BringIdle(1);
  ASSERT_TRUE(node().Attach(0).ok());
  node().Report(worker(0), true, 0, 0);
  node().Activate(worker(0));
  node().AnswerEndTurn(worker(1));
  ASSERT_TRUE(status(0).has_turn);
  node().Report(worker(1), true, 0, 0);
  node().Advance(options.quantum * 2);
  EXPECT_FALSE(worker(0).turn_ending) << "granted, but not mapped";
  node().Settle();
  node().Advance(options.quantum - absl::Milliseconds(1));
  EXPECT_FALSE(worker(0).turn_ending);
  node().Advance(absl::Milliseconds(1));
  EXPECT_TRUE(worker(0).turn_ending);
}

TEST_F(ArbiterTurnsTest, NothingRevertsWhileTheNextLacksMemory) {
  ArbiterOptions options = Temporal(36);
  options.quantum = absl::Hours(1);
  SimulatedTenant small = Tenant("small", 0, 0);
  small.stages = EvenStages(3, 2);
  Start(options, {Tenant("a", 0, 0), Tenant("b", 0, 0), small});
  Bring(2, 0, /*active=*/false);
  BringIdle(0);
  node().Report(worker(0), true, 0, 0);
  node().SetKvTarget(worker(0), 12, 12);
  node().Settle();
  ASSERT_EQ(parameters(2), 4u);
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(1));
  node().SetKvTarget(worker(0), 8, 8);
  node().ReleaseKv(worker(0), 4);
  node().Settle();
  // Enough is free for what the small one lost, but the next one will need it soon.
  node().Advance(options.reversion_delay * 3);
  node().Settle();
  EXPECT_EQ(parameters(2), 4u);
  EXPECT_EQ(parameters(1), 0u);
  node().LoseConnection(worker(1));
  node().Advance(options.reversion_delay * 3);
  node().Settle();
  EXPECT_EQ(parameters(2), 6u);
}

TEST_F(ArbiterTurnsTest, HolderGetsRoomForOneSequenceEvenFromKvInUse) {
  Start(Temporal(24), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  ASSERT_TRUE(node().Attach(1).ok());
  Bring(0, 4, /*active=*/true);
  ASSERT_EQ(kv(0), 4u);
  node().Report(worker(1), true, 0, 0);
  node().Activate(worker(1));
  node().SetKvTarget(worker(1), 3, 3);
  Quantum();
  node().Settle();
  ASSERT_TRUE(status(1).has_turn);
  EXPECT_EQ(parameters(1), 20u);
  EXPECT_EQ(kv(1), 2u) << "a longest sequence needs two slabs";
  EXPECT_EQ(kv(0), 2u);
}

TEST_F(ArbiterTurnsTest, HolderWithASequenceThatRunsLeavesTheKvOfOthers) {
  Start(Temporal(45), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  Bring(1, 1, /*active=*/false);
  Bring(0, 4, /*active=*/true);
  node().Report(worker(1), true, /*used=*/1, 0);
  node().SetKvTarget(worker(1), 30, 30);
  Quantum();
  node().Settle();
  ASSERT_TRUE(status(1).has_turn);
  EXPECT_EQ(kv(1), 21u) << "from the other one's parameters";
  EXPECT_EQ(kv(0), 4u);
}

TEST_F(ArbiterTurnsTest, HolderGetsItsParametersEvenFromKvInUseButNotFromAFloor) {
  for (const uint32_t floor : {0u, 24u}) {
    SimulatedTenant small = Tenant("small", 0, floor);
    small.stages = EvenStages(3, 2);
    Start(Temporal(30), {small, Tenant("b", 0, 0)});
    ASSERT_TRUE(node().Attach(1).ok());
    Bring(0, 24, /*active=*/true);
    ASSERT_EQ(kv(0), 24u);
    node().Report(worker(1), true, 0, 0);
    node().Activate(worker(1));
    Quantum();
    node().Settle();
    ASSERT_TRUE(status(1).has_turn);
    EXPECT_EQ(parameters(1), floor == 0 ? 20u : 0u);
    EXPECT_EQ(kv(0), floor == 0 ? 10u : 24u);
  }
}

TEST_F(ArbiterTurnsTest, ThoseBehindTheNextTakeNothing) {
  ArbiterOptions options = Temporal(44);
  options.quantum = absl::Hours(1);
  Start(options, {Tenant("a", 0, 0), Tenant("b", 1, 0), Tenant("c", 0, 0), Tenant("d", 0, 0)});
  BringIdle(0);
  node().Report(worker(0), true, 0, 0);
  node().Settle();
  for (uint32_t tenant : {1u, 2u, 3u}) {
    ASSERT_TRUE(node().Attach(tenant).ok());
    node().Activate(worker(tenant));
  }
  node().Report(worker(3), true, 0, 0);
  node().SetKvTarget(worker(3), 4, 4);
  node().Settle();
  EXPECT_EQ(parameters(1), 20u) << "the next one, by priority";
  EXPECT_EQ(parameters(2) + parameters(3) + kv(3), 0u);
  EXPECT_EQ(worker(3).pressures, 1);
  EXPECT_EQ(worker(2).refusals + worker(3).refusals, 0);
}

TEST_F(ArbiterTurnsTest, ActivationWaitsForItsTurnWithoutBeingRefused) {
  ArbiterOptions options = Temporal(24);
  options.quantum = absl::Seconds(30);
  Start(options, {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  BringIdle(0);
  node().Report(worker(0), true, 0, 0);
  node().Settle();
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(1));
  node().Advance(absl::Seconds(26));
  EXPECT_EQ(worker(1).refusals, 0) << "the activation deadline is 20 s";
  node().Advance(absl::Seconds(4));
  node().Settle();
  EXPECT_EQ(parameters(1), 20u);
}

TEST_F(ArbiterTurnsTest, WhoHoldsOnIsKilledAndTheTurnGoesOnWhenItIsGone) {
  Start(Temporal(60), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  BringHolderAndNext();
  Quantum();
  ASSERT_TRUE(worker(0).turn_ending);
  node().Advance(node().options().turn_deadline - absl::Milliseconds(1));
  EXPECT_FALSE(worker(0).killed);
  node().Advance(absl::Milliseconds(1));
  EXPECT_TRUE(worker(0).killed);
  EXPECT_FALSE(status(1).has_turn);
  node().ProcessGone(worker(0).session);
  EXPECT_TRUE(status(1).has_turn);
}

TEST_F(ArbiterTurnsTest, SilentHolderIsAskedAtOnce) {
  ArbiterOptions options = Temporal(60);
  options.quantum = absl::Hours(1);
  Start(options, {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  BringHolderAndNext();
  worker(0).hung = true;
  node().Advance(absl::Seconds(5));
  EXPECT_TRUE(worker(0).turn_ending);
  node().Advance(node().options().turn_deadline);
  EXPECT_TRUE(worker(0).killed);
}

TEST_F(ArbiterTurnsTest, WorkerThatReconnectsHasNoTurnUntilItIsGivenOne) {
  Start(Temporal(60), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  BringHolderAndNext();
  node().LoseConnection(worker(0));
  EXPECT_FALSE(status(1).has_turn) << "the other one may still run";
  ASSERT_TRUE(node().Reattach(worker(0)).ok());
  EXPECT_TRUE(status(1).has_turn);
  EXPECT_TRUE(status(0).waits_for_turn);
}

TEST_F(ArbiterTurnsTest, RestartedBrokerHandsTurnsOutAfreshWhenAllAreBack) {
  Start(Temporal(60), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  BringHolderAndNext();
  ASSERT_TRUE(worker(0).turn.has_value());
  const TurnId old = *worker(0).turn;
  node().RestartBroker();
  ASSERT_TRUE(node().Reattach(worker(1)).ok());
  EXPECT_FALSE(worker(1).turn.has_value());
  ASSERT_TRUE(node().Reattach(worker(0)).ok());
  EXPECT_TRUE(worker(1).turn.has_value());
  EXPECT_GT(*worker(1).turn, old);
  // An answer to the broker that is gone.
  node().arbiter().OnTurnEnded(worker(0).session, old, node().now());
  node().Advance(absl::Milliseconds(1));
  EXPECT_FALSE(worker(0).killed);
}

TEST_F(ArbiterTurnsTest, RestartedBrokerWaitsForTheMissingOnlyForTheDeadlineOfATurn) {
  Start(Temporal(60), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  BringIdle(0);
  BringIdle(1);
  node().Report(worker(1), true, 0, 0);
  node().Settle();
  node().RestartBroker();
  ASSERT_TRUE(node().Reattach(worker(1)).ok());
  node().Advance(node().options().turn_deadline);
  EXPECT_TRUE(status(1).has_turn);
}

TEST_F(ArbiterTurnsTest, AnswerThatWasNotAskedForCostsTheWorkerItsLife) {
  for (const bool temporal : {false, true}) {
    Start(temporal ? Temporal(60) : Options(60), {Tenant("a", 0, 0)});
    BringIdle(0);
    node().Report(worker(0), true, 0, 0);
    EXPECT_EQ(worker(0).turn.has_value(), temporal) << "nobody has turns in spatial sharing";
    node().arbiter().OnTurnEnded(worker(0).session,
                                 worker(0).turn.value_or(TurnId((1ull << 32) + 1)), node().now());
    node().Advance(absl::Milliseconds(1));
    EXPECT_TRUE(worker(0).killed);
  }
}

}  // namespace
}  // namespace palimpsest
