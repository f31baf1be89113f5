// Temporal sharing: the engine runs during its turns alone, and its tokens are the same.
#include "worker/server/engine_fixture.h"

namespace palimpsest {
namespace {

class EngineTurnsTest : public EngineTest {
 protected:
  EngineTurnsTest() {
    memory_.ConnectWithTurns();
    memory_.GrantKv(40);
    RunUntilIdle();
  }

  // Runs up to `turns` turns of the engine's thread.
  void Run(int turns) {
    for (int i = 0; i < turns; ++i) engine_->RunOnce();
  }
};

TEST_P(EngineTurnsTest, NothingRunsWithoutATurnButItIsAskedFor) {
  const auto request = Request({1, 2, 3}, 10);
  const auto stream = Submit(request);
  RunUntilIdle();
  EXPECT_EQ(runner_.steps(), 0);
  EXPECT_TRUE(memory_.load().active);
  memory_.BeginTurn();
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
  RunUntilIdle();
  EXPECT_FALSE(memory_.load().active);
}

TEST_P(EngineTurnsTest, ParametersAreAskedForBeforeTheTurn) {
  const RevokeId revoke = memory_.RevokeParameters();
  RunUntilIdle();
  EXPECT_TRUE(memory_.finished_revokes().contains(revoke));
  Submit(Request({1, 2, 3}));
  RunUntilIdle();
  ASSERT_FALSE(memory_.activations().empty());
  EXPECT_EQ(memory_.activations().back(), ActivationReason::kRequest);
}

TEST_P(EngineTurnsTest, TurnsThatEndAtAnyStepChangeNoToken) {
  const auto first = Request({1, 2, 3, 4, 5}, 30), second = Request({9, 8, 7}, 25, 4);
  const auto a = Submit(first), b = Submit(second);
  Outcome out_a, out_b;
  std::vector<TurnId> given;
  for (int round = 0; round < 200 && !(out_a.end.has_value() && out_b.end.has_value()); ++round) {
    given.push_back(memory_.BeginTurn());
    Run(1 + round % 4);
    memory_.EndTurn(given.back());
    Run(1);
    // The answer comes with nothing in flight (the fixture checks that), and nothing follows it.
    ASSERT_EQ(memory_.finished_turns(), given);
    const int64_t steps = runner_.steps();
    Run(3);
    ASSERT_EQ(runner_.steps(), steps);
    out_a.Take(*a);
    out_b.Take(*b);
  }
  EXPECT_EQ(out_a.tokens, Expected(first));
  EXPECT_EQ(out_b.tokens, Expected(second));
  EXPECT_GT(given.size(), 5u);
}

TEST_P(EngineTurnsTest, TurnIsKeptWithoutABrokerAndGoneAfterItsReturn) {
  const auto request = Request({1, 2, 3}, 30);
  const auto stream = Submit(request);
  memory_.BeginTurn();
  Run(4);
  memory_.Lose();
  Run(4);
  const int64_t steps = runner_.steps();
  EXPECT_GT(steps, 4);
  memory_.ConnectWithTurns(/*reattached=*/true);
  Run(1);
  const int64_t at_return = runner_.steps();
  Run(5);
  EXPECT_EQ(runner_.steps(), at_return);
  memory_.BeginTurn();
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
}

TEST_P(EngineTurnsTest, BrokerThatSharesInSpaceAgainFreesTheEngine) {
  const auto request = Request({1, 2, 3}, 5);
  const auto stream = Submit(request);
  RunUntilIdle();
  EXPECT_EQ(runner_.steps(), 0);
  memory_.Connect(/*reattached=*/true);
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
}

TEST_P(EngineTurnsTest, WaitForATurnIsBounded) {
  const auto stream = Submit(Request({1, 2, 3}));
  RunUntilIdle();
  clock_.Advance(options_.stall_timeout);
  RunUntilIdle();
  Outcome outcome;
  outcome.Take(*stream);
  ASSERT_TRUE(outcome.end.has_value());
  EXPECT_EQ(outcome.end->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_NE(outcome.end->status.message().find("other tenants had their turns"),
            absl::string_view::npos)
      << outcome.end->status;
}

INSTANTIATE_TEST_SUITE_P(Depth, EngineTurnsTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace palimpsest
