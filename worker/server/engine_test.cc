#include "worker/server/engine.h"

#include <memory>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/server/engine_fixture.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

TEST_P(EngineTest, StreamsTheModelsTokens) {
  const auto request = Request({1, 2, 3, 4, 5, 6, 7}, 12);
  const auto stream = Submit(request);
  const Outcome outcome = RunToEnd(*stream);
  EXPECT_EQ(outcome.tokens, Expected(request));
  ASSERT_TRUE(outcome.end->status.ok());
  EXPECT_EQ(outcome.end->reason, FinishReason::kLength);
  EXPECT_EQ(outcome.end->usage.prompt_tokens, 7);
  EXPECT_EQ(outcome.end->usage.output_tokens, 12);
  EXPECT_EQ(engine_->Stats().running, 0);
  EXPECT_EQ(engine_->Stats().counters.generated_tokens, 12);
  EXPECT_TRUE(engine_->Stats().broker_connected);
}

TEST_P(EngineTest, ReusesThePrefixOfAnEarlierRequest) {
  const auto request = Request({1, 2, 3, 4, 5, 6, 7, 8, 9}, 4);
  RunToEnd(*Submit(request));
  const Outcome second = RunToEnd(*Submit(request));
  EXPECT_EQ(second.tokens, Expected(request));
  EXPECT_EQ(second.end->usage.cached_tokens, 8);
}

TEST_P(EngineTest, RefusesBadPromptsAtOnce) {
  const auto refuse = [&](SequenceRequest request) {
    return engine_->Submit(std::move(request), [] {}).status();
  };
  EXPECT_EQ(refuse(Request({})).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refuse(Request({50})).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refuse(Request({-1})).code(), absl::StatusCode::kInvalidArgument);
  const absl::Status too_long = refuse(Request(std::vector<TokenId>(80, 1)));
  EXPECT_EQ(too_long.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(too_long.message()), HasSubstr("80 tokens"));
}

TEST_P(EngineTest, RefusesMoreThanTheQueueHolds) {
  std::vector<std::shared_ptr<GenerationStream>> streams;
  for (int i = 0; i < options_.scheduler.max_sequences(); ++i)
    streams.push_back(Submit(Request({1})));
  EXPECT_EQ(engine_->Submit(Request({1}), [] {}).status().code(),
            absl::StatusCode::kResourceExhausted);
  for (const auto& stream : streams) EXPECT_TRUE(RunToEnd(*stream).end->status.ok());
  EXPECT_TRUE(RunToEnd(*Submit(Request({1}))).end->status.ok());
}

TEST_P(EngineTest, UnreadOutputsAreBounded) {
  std::vector<std::shared_ptr<GenerationStream>> unread;
  absl::Status status;
  while (status.ok() && unread.size() < 1000) {
    auto stream = engine_->Submit(Request({1}, 1), [] {});
    status = stream.status();
    if (stream.ok()) unread.push_back(*stream);
    memory_.GrantKvTarget();
    RunUntilIdle();
  }
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(static_cast<int>(unread.size()), 2 * options_.scheduler.max_sequences());
  unread.clear();
  EXPECT_TRUE(RunToEnd(*Submit(Request({1}))).end->status.ok());
}

TEST_P(EngineTest, CancelEndsTheSequenceAndFreesItsBlocks) {
  memory_.GrantKv(40);
  const auto stream = Submit(Request({1, 2, 3}, 60));
  for (int i = 0; i < 10; ++i) engine_->RunOnce();
  EXPECT_GT(engine_->Stats().blocks_used, 0);
  engine_->Cancel(*stream);
  engine_->Cancel(*stream);
  RunUntilIdle();
  Outcome outcome;
  outcome.Take(*stream);
  EXPECT_EQ(outcome.end->reason, FinishReason::kCancelled);
  EXPECT_EQ(engine_->Stats().blocks_used, 0);
  engine_->Cancel(*stream);
  RunUntilIdle();
}

TEST_P(EngineTest, CancelBeforeTheFirstTurnStillEndsTheStream) {
  const auto stream = Submit(Request({1}));
  engine_->Cancel(*stream);
  RunUntilIdle();
  Outcome outcome;
  outcome.Take(*stream);
  EXPECT_EQ(outcome.end->reason, FinishReason::kCancelled);
}

TEST_P(EngineTest, SlowReaderLosesItsOwnRequestOnly) {
  EngineOptions options = TestOptions(GetParam());
  options.stream_tokens = 5;
  Restart(options);
  memory_.GrantKv(40);
  const auto slow = Submit(Request({1, 2, 3}, 30));
  const auto request = Request({4, 5, 6}, 30);
  const auto fast = Submit(request);
  EXPECT_EQ(RunToEnd(*fast).tokens, Expected(request));
  Outcome outcome;
  outcome.Take(*slow);
  EXPECT_EQ(outcome.tokens.size(), 5);
  EXPECT_EQ(outcome.end->status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(engine_->Stats().running, 0);
}

TEST_P(EngineTest, ReadyIsCalledForTokensAndTheEnd) {
  memory_.GrantKv(40);
  int calls = 0;
  auto stream = engine_->Submit(Request({1}, 5), [&] { ++calls; });
  RunToEnd(**stream);
  EXPECT_EQ(calls, 5);
}

TEST_P(EngineTest, KvRevokedInTheMiddleChangesNoToken) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11}, 50);
  const auto stream = Submit(request);
  for (int i = 0; i < 20; ++i) engine_->RunOnce();
  const RevokeId some = memory_.RevokeKv(35);
  engine_->RunOnce();
  EXPECT_EQ(memory_.finished_revokes().at(some).size(), 35);
  const RevokeId all = memory_.RevokeKv(100);
  engine_->RunOnce();
  EXPECT_EQ(memory_.finished_revokes().at(all).size(), 5);
  EXPECT_EQ(memory_.Mapped().kv, 0);
  const Outcome outcome = RunToEnd(*stream);
  EXPECT_EQ(outcome.tokens, Expected(request));
  EXPECT_EQ(outcome.end->usage.preemptions, 1);
}

TEST_P(EngineTest, ParametersTakenAreAskedForAgain) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3}, 20);
  const auto stream = Submit(request);
  for (int i = 0; i < 5; ++i) engine_->RunOnce();
  const RevokeId id = memory_.RevokeParameters();
  engine_->RunOnce();
  EXPECT_TRUE(memory_.finished_revokes().contains(id));
  EXPECT_THAT(memory_.activations(), ::testing::Contains(ActivationReason::kRequest));
  const int64_t steps = runner_.steps();
  RunUntilIdle();
  EXPECT_EQ(runner_.steps(), steps);
  memory_.RestoreParameters();
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
}

TEST_P(EngineTest, ParametersAreAskedForEagerlyWhenNobodyWaits) {
  RunUntilIdle();
  memory_.RevokeParameters();
  RunUntilIdle();
  EXPECT_TRUE(memory_.activations().empty());
  memory_.Connect(true);
  RunUntilIdle();
  EXPECT_THAT(memory_.activations(), ::testing::ElementsAre(ActivationReason::kEager));
}

TEST_P(EngineTest, RefusedActivationFailsRequestsWithTheHint) {
  memory_.RevokeParameters();
  const auto stream = Submit(Request({1}));
  engine_->RunOnce();
  memory_.RefuseActivation("the pool is full", absl::Seconds(3));
  const Outcome outcome = RunToEnd(*stream);
  EXPECT_EQ(outcome.end->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(outcome.end->status.message()), HasSubstr("the pool is full"));
  EXPECT_EQ(outcome.end->retry_after, absl::Seconds(3));
  memory_.RestoreParameters();
  EXPECT_TRUE(RunToEnd(*Submit(Request({1}))).end->status.ok());
}

TEST_P(EngineTest, RefusedActivationPausesStreamsAndFailsWhatHasNotBegun) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3}, 20);
  const auto streaming = Submit(request);
  for (int i = 0; i < 5; ++i) engine_->RunOnce();
  auto resumed_request = Request({7, 8, 9}, 20);
  resumed_request.output_offset = 2;
  memory_.RevokeParameters();
  const auto resumed = Submit(resumed_request);
  const auto fresh = Submit(Request({4, 5}));
  engine_->RunOnce();
  const size_t asked = memory_.activations().size();
  memory_.RefuseActivation("the pool is full", absl::Seconds(3));
  RunUntilIdle();
  Outcome failed;
  failed.Take(*fresh);
  ASSERT_TRUE(failed.end.has_value());
  EXPECT_EQ(failed.end->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(failed.end->retry_after, absl::Seconds(3));
  EXPECT_EQ(engine_->Stats().running, 0);
  EXPECT_EQ(engine_->Stats().waiting, 2);
  EXPECT_EQ(engine_->Stats().blocks_used, 0) << "others could use its KV meanwhile";
  EXPECT_EQ(memory_.activations().size(), asked);
  clock_.Advance(absl::Seconds(3));
  RunUntilIdle();
  EXPECT_GT(memory_.activations().size(), asked);

  memory_.RestoreParameters();
  const Outcome outcome = RunToEnd(*streaming);
  EXPECT_TRUE(outcome.end->status.ok()) << outcome.end->status;
  EXPECT_EQ(outcome.tokens, Expected(request));
  EXPECT_EQ(outcome.end->usage.preemptions, 1);
  EXPECT_TRUE(RunToEnd(*resumed).end->status.ok());
}

TEST_P(EngineTest, StreamsPauseForTheStallTimeoutAtMost) {
  memory_.GrantKv(40);
  const auto stream = Submit(Request({1, 2, 3}, 20));
  for (int i = 0; i < 5; ++i) engine_->RunOnce();
  memory_.RevokeParameters();
  Outcome outcome;
  absl::Duration waited;
  for (; !outcome.end.has_value(); waited += absl::Seconds(1)) {
    ASSERT_LE(waited, options_.stall_timeout);
    memory_.RefuseActivation("the pool is full", absl::Seconds(2));
    engine_->RunOnce();
    outcome.Take(*stream);
    clock_.Advance(absl::Seconds(1));
  }
  EXPECT_GE(waited, options_.stall_timeout);
  EXPECT_EQ(outcome.end->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(outcome.end->status.message()),
              HasSubstr("the broker refused them: the pool is full"));
}

TEST_P(EngineTest, ANewRequestAsksAtOnceAfterARefusal) {
  memory_.RevokeParameters();
  RunUntilIdle();
  memory_.RefuseActivation("the pool is full", absl::Seconds(3));
  RunUntilIdle();
  const auto stream = Submit(Request({1}));
  RunUntilIdle();
  EXPECT_THAT(memory_.activations(), ::testing::Contains(ActivationReason::kRequest));
}

TEST_P(EngineTest, TokensAreHandedOutWhileStepsRun) {
  memory_.GrantKv(40);
  int calls = 0;
  auto stream = engine_->Submit(Request({1}, 8), [&] {
    // The last steps have none behind them.
    EXPECT_TRUE(++calls >= 7 || runner_.steps_in_flight() == GetParam());
  });
  RunToEnd(**stream);
  EXPECT_EQ(calls, 8);
}

TEST_P(EngineTest, RefusedPlanIsPlannedAgain) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3, 4, 5, 6}, 20);
  const auto stream = Submit(request);
  for (int i = 0; i < 5; ++i) engine_->RunOnce();
  runner_.RefuseNext();
  engine_->RunOnce();
  EXPECT_EQ(runner_.steps_in_flight(), 0);
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
}

TEST_P(EngineTest, StepThatFailsIsRepeatedWithThoseBehindIt) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3, 4, 5, 6}, 20);
  const auto stream = Submit(request);
  for (int i = 0; i < 5; ++i) engine_->RunOnce();
  const int64_t steps = runner_.steps();
  runner_.FailNext();
  for (int i = 0; i < 3; ++i) engine_->RunOnce();
  EXPECT_EQ(runner_.steps_in_flight(), 0);
  EXPECT_LE(runner_.steps(), steps + 1);
  clock_.Advance(absl::Seconds(1));
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
}

TEST_P(EngineTest, StepThatFailsAtTheGateIsRepeated) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3, 4, 5, 6}, 20);
  const auto stream = Submit(request);
  for (int i = 0; i < 5; ++i) engine_->RunOnce();
  memory_.FailStage(1);
  for (int i = 0; i < 5; ++i) {
    engine_->RunOnce();
    clock_.Advance(absl::Seconds(1));
  }
  memory_.FailStage(-1);
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
}

TEST_P(EngineTest, StepsThatKeepFailingFailTheRequests) {
  memory_.GrantKv(40);
  memory_.FailStage(2);
  const auto stream = Submit(Request({1, 2, 3}));
  Outcome outcome;
  for (int i = 0; i < 1000 && !outcome.end.has_value(); ++i) {
    engine_->RunOnce();
    clock_.Advance(absl::Seconds(1));
    outcome.Take(*stream);
  }
  ASSERT_TRUE(outcome.end.has_value());
  EXPECT_EQ(outcome.end->status.code(), absl::StatusCode::kUnavailable);
}

TEST_P(EngineTest, RequestsThatCannotRunFailAfterTheStallTimeout) {
  const auto no_kv = Submit(Request({1, 2, 3}));
  RunUntilIdle();
  clock_.Advance(options_.stall_timeout - absl::Seconds(1));
  RunUntilIdle();
  Outcome outcome;
  outcome.Take(*no_kv);
  EXPECT_FALSE(outcome.end.has_value());
  clock_.Advance(absl::Seconds(1));
  RunUntilIdle();
  outcome.Take(*no_kv);
  ASSERT_TRUE(outcome.end.has_value());
  EXPECT_EQ(outcome.end->status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(outcome.end->status.message()), HasSubstr("KV slabs"));
  // A quiet hour before it does not count against the next request.
  clock_.Advance(absl::Hours(1));
  EXPECT_TRUE(RunToEnd(*Submit(Request({1}))).end->status.ok());
}

TEST_P(EngineTest, HolesBetweenSlabsDoNotStarveARequest) {
  // Five slabs hold 15 blocks in a row, but only 2 each when none has a neighbour.
  memory_.GrantKvAt({1, 3, 5, 7, 9});
  const auto request = Request(std::vector<TokenId>(50, 3), 5);
  const auto stream = Submit(request);
  RunUntilIdle();
  EXPECT_EQ(runner_.steps(), 0);
  EXPECT_EQ(memory_.Mapped().kv, 5);
  clock_.Advance(absl::Seconds(1));
  RunUntilIdle();
  EXPECT_EQ(memory_.Mapped().kv, 2);
  EXPECT_EQ(memory_.GrantKv(3), 3);
  Outcome outcome;
  for (int i = 0; i < 100 && !outcome.end.has_value(); ++i) {
    engine_->RunOnce();
    outcome.Take(*stream);
  }
  EXPECT_EQ(outcome.tokens, Expected(request));
}

TEST_P(EngineTest, RunsOnWithoutTheBroker) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3}, 20);
  const auto stream = Submit(request);
  for (int i = 0; i < 5; ++i) engine_->RunOnce();
  memory_.Lose();
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
  EXPECT_FALSE(engine_->Stats().broker_connected);
  memory_.Connect(true);
  RunUntilIdle();
  EXPECT_TRUE(engine_->Stats().broker_connected);
}

TEST_P(EngineTest, ReportsLoadAndAsksForKvAheadOfNeed) {
  RunUntilIdle();
  EXPECT_FALSE(memory_.load().active);
  EXPECT_EQ(memory_.needed(), 0);
  const int32_t idle_target = memory_.target();
  EXPECT_GE(idle_target, 1);
  const auto stream = Submit(Request(std::vector<TokenId>(60, 3), 10));
  engine_->RunOnce();
  EXPECT_TRUE(memory_.load().active);
  EXPECT_GT(memory_.needed(), 0);
  EXPECT_GT(memory_.target(), idle_target);
  memory_.GrantKvTarget();
  engine_->RunOnce();
  engine_->RunOnce();
  EXPECT_GT(memory_.load().kv_slabs_used, 0);
  EXPECT_EQ(memory_.load().running_sequences, 1);
}

TEST_P(EngineTest, DrainRefusesNewRequestsAndWaitsForOldOnes) {
  memory_.GrantKv(40);
  const auto stream = Submit(Request({1, 2, 3}, 5));
  engine_->StartDrain();
  EXPECT_EQ(engine_->Submit(Request({1}), [] {}).status().code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ(engine_->AwaitDrained(absl::ZeroDuration()), 1);
  EXPECT_TRUE(RunToEnd(*stream).end->status.ok());
  EXPECT_EQ(engine_->AwaitDrained(absl::InfiniteDuration()), 0);
}

TEST_P(EngineTest, RunnerHearsOfARotationBetweenStepsAndBeforeTheNext) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3}, 30);
  const auto stream = Submit(request);
  for (int i = 0; i < 4; ++i) engine_->RunOnce();
  const Rotation rotation = {{1, 3, 5}, 2};
  memory_.SetRotation(rotation);
  memory_.HoldRotations(true);
  // Its steps in flight are done, and none follows while slabs are mapped.
  engine_->RunOnce();
  EXPECT_EQ(memory_.open_rotations(), 0);
  const int64_t steps = runner_.steps();
  for (int i = 0; i < 5; ++i) engine_->RunOnce();
  EXPECT_EQ(runner_.steps(), steps);
  EXPECT_EQ(runner_.rotation(), Rotation());
  memory_.HoldRotations(false);
  engine_->RunOnce();
  EXPECT_EQ(runner_.rotation(), rotation);
  const Outcome outcome = RunToEnd(*stream);
  EXPECT_EQ(outcome.tokens, Expected(request));
  EXPECT_GT(runner_.steps(), steps);
}

TEST_P(EngineTest, ARotationThatIsVoidChangesNothing) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3}, 10);
  const auto stream = Submit(request);
  engine_->RunOnce();
  memory_.SetRotation({{1, 3, 5}, 2});
  memory_.VoidRotations();
  const Outcome outcome = RunToEnd(*stream);
  EXPECT_EQ(outcome.tokens, Expected(request));
  EXPECT_EQ(runner_.rotation(), Rotation());
}

TEST_P(EngineTest, NothingRotatesForTheRunnerUntilAllRotationsAreSettled) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3}, 30);
  const auto stream = Submit(request);
  memory_.SetRotation({{1, 3, 5}, 2});
  for (int i = 0; i < 4; ++i) engine_->RunOnce();
  memory_.HoldRotations(true);
  memory_.SetRotation({{2, 4}, 1});
  memory_.SetRotation({{3, 5}, 1});
  engine_->RunOnce();
  memory_.SettleOldestRotation();
  engine_->RunOnce();
  EXPECT_EQ(runner_.rotation(), Rotation());
  memory_.SettleOldestRotation();
  engine_->RunOnce();
  EXPECT_EQ(runner_.rotation(), (Rotation{{3, 5}, 1}));
  memory_.HoldRotations(false);
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
}

TEST_P(EngineTest, NothingRotatesForTheRunnerWhileMemoryChanges) {
  memory_.GrantKv(40);
  const auto request = Request({1, 2, 3}, 30);
  const auto stream = Submit(request);
  const Rotation first = {{1, 3, 5}, 2};
  memory_.SetRotation(first);
  for (int i = 0; i < 4; ++i) engine_->RunOnce();
  EXPECT_EQ(runner_.rotation(), first);
  memory_.SetRotation({{2, 4}, 1});
  memory_.HoldRotations(true);
  engine_->RunOnce();
  EXPECT_EQ(runner_.rotation(), Rotation());
  memory_.HoldRotations(false);
  engine_->RunOnce();
  EXPECT_EQ(runner_.rotation(), (Rotation{{2, 4}, 1}));
  EXPECT_EQ(RunToEnd(*stream).tokens, Expected(request));
  engine_->Stop();
  EXPECT_EQ(runner_.rotation(), Rotation());
}

TEST_P(EngineTest, ReportsHowLongStepsTake) {
  memory_.GrantKv(40);
  const auto stream = Submit(Request({1, 2, 3, 4, 5}, 10));
  for (int i = 0; i < 8; ++i) {
    clock_.Advance(absl::Milliseconds(3));
    engine_->RunOnce();
  }
  // The clock stands still during a step of this runner; what counts is that phases are told apart.
  EXPECT_GT(memory_.load().prefill_share, 0);
  EXPECT_LT(memory_.load().prefill_share, 1);
  EXPECT_EQ(memory_.load().rotation_stall_seconds, 0);
  RunToEnd(*stream);
}

TEST_P(EngineTest, ReportsWhatASlabOfCachedBlocksSaves) {
  step_takes_ = absl::Milliseconds(2);
  const auto request = Request({1, 2, 3, 4, 5, 6, 7, 8, 9}, 4);
  RunToEnd(*Submit(request));
  RunUntilIdle();
  EXPECT_EQ(memory_.load().cached_slab_seconds, 0);
  RunToEnd(*Submit(request));
  RunUntilIdle();
  // Of 18 tokens of prompts 8 came from the cache; a slab has 12.8. No token took longer than a
  // step.
  EXPECT_GT(memory_.load().cached_slab_seconds, 0);
  EXPECT_LE(memory_.load().cached_slab_seconds, 12.8 * 0.002 * 8 / 18);
}

TEST_P(EngineTest, StopEndsEveryStream) {
  memory_.GrantKv(40);
  const auto running = Submit(Request({1, 2, 3}, 50));
  for (int i = 0; i < 3; ++i) engine_->RunOnce();
  const auto fresh = Submit(Request({4}));
  engine_->Stop();
  for (const auto& stream : {running, fresh}) {
    Outcome outcome;
    outcome.Take(*stream);
    ASSERT_TRUE(outcome.end.has_value());
    EXPECT_EQ(outcome.end->status.code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(engine_->Submit(Request({1}), [] {}).status().code(), absl::StatusCode::kUnavailable);
}

INSTANTIATE_TEST_SUITE_P(Depth, EngineTest, ::testing::Values(1, 2));

}  // namespace
}  // namespace palimpsest
