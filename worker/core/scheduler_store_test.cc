// What the scheduler plans beside a block store: which prefixes are looked up, awaited, loaded or
// computed, and who waits for it.
#include <numeric>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/core/scheduler_store_fixture.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;

// Keys that collide for blocks whose tokens have the same sum.
BlockKey SumKey(const BlockKey& parent, absl::Span<const TokenId> tokens) {
  return {parent.low + 1, std::accumulate(tokens.begin(), tokens.end(), parent.low)};
}

TEST_F(SchedulerStoreTest, PrefixComesBackAndTheRestIsComputed) {
  Remember(Tokens(14));
  EXPECT_EQ(scheduler_.offload_counters().stored, 3);
  Add(Tokens(18));
  Ask();
  EXPECT_THAT(Step(), IsEmpty()) << "it is loaded";
  Settle();
  EXPECT_THAT(Step(), ElementsAre(12));
  EXPECT_EQ(scheduler_.counters().blocks_loaded, 3);
  const auto outputs = scheduler_.TakeOutputs();
  EXPECT_EQ(outputs.back().usage.cached_tokens, 12);
  EXPECT_EQ(store_.held(), 0u);
  // It is in T0 for others.
  Add(Tokens(18));
  EXPECT_THAT(Step(), ElementsAre(16));
}

TEST_F(SchedulerStoreTest, OthersAreAdmittedWhileOneAsks) {
  Remember(Tokens(14));
  Add(Tokens(18), 5);
  EXPECT_THAT(Step(), IsEmpty());
  Add(Tokens(3, 50), 5);
  EXPECT_THAT(Step(), ElementsAre(0)) << "one whose prompt has no full block asks nothing";
  EXPECT_EQ(scheduler_.waiting(), 1);
  Settle();
  EXPECT_THAT(Step(), ElementsAre(3)) << "and runs on while the older one is loaded";
  Settle();
  EXPECT_THAT(Step(), ElementsAre(12, 4));
}

TEST_F(SchedulerStoreTest, LaterTurnFindsTheAnswerOfTheOneBefore) {
  std::vector<TokenId> prompt = Tokens(14);
  Add(prompt, 8);
  Ask();
  for (int i = 0; i < 8; ++i) Step(5);
  EXPECT_TRUE(scheduler_.idle());
  Clear();
  // The last token's KV does not exist.
  EXPECT_EQ(scheduler_.offload_counters().stored, 5);
  prompt.insert(prompt.end(), 8, 5);
  prompt.push_back(1);
  Add(prompt);
  Ask();
  Step();
  Settle();
  EXPECT_THAT(Step(), ElementsAre(20));
  Settle();
  ASSERT_EQ(store_.ended_requests().size(), 2u);
  EXPECT_EQ(store_.ended_requests()[0].how, StoreRequestEnd::How::kUnknown);
  EXPECT_EQ(store_.ended_requests()[0].output_tokens, 8);
}

TEST_F(SchedulerStoreTest, StoreHearsWhatTheClientTells) {
  SequenceRequest request;
  request.prompt = Tokens(14);
  request.params.max_tokens = 6;
  request.params.stop_token_ids = {77};
  request.hints.conversation = 9;
  request.hints.parts = {{BlockType::kSystemPrompt, 5}, {BlockType::kUserContext, 3}};
  request.hints.expected_idle = absl::Seconds(8);
  request.hints.then = CacheAction{.kind = CacheAction::Kind::kDemote};
  request.hints.tool_call_tokens = {55};
  scheduler_.Add(request).value();
  Ask();
  EXPECT_EQ(store_.last_query().conversation, 9u);
  EXPECT_THAT(store_.last_query().types,
              ElementsAre(BlockType::kSystemPrompt, BlockType::kUserContext));
  for (const TokenId token : {5, 55, 5, 77}) Step(token);
  EXPECT_TRUE(scheduler_.idle());
  EXPECT_THAT(store_.ended_requests(), IsEmpty()) << "its blocks are not stored yet";
  Settle();
  ASSERT_EQ(store_.ended_requests().size(), 1u);
  const StoreRequestEnd& end = store_.ended_requests()[0];
  EXPECT_EQ(scheduler_.offload_counters().stored, 4);
  EXPECT_EQ(end.how, StoreRequestEnd::How::kToolCall);
  EXPECT_EQ(end.expected_idle, absl::Seconds(8));
  EXPECT_FALSE(end.last_turn);
  EXPECT_EQ(end.then->kind, CacheAction::Kind::kDemote);

  // Another one without such a token, whose text (a byte each) calls no tool either.
  request.hints = {};
  request.hints.last_turn = true;
  request.hints.tool_call_texts = {"xxxxx"};
  scheduler_.Add(request).value();
  for (const TokenId token : {5, 55, 5, 77}) Step(token);
  Settle();
  ASSERT_EQ(store_.ended_requests().size(), 2u);
  EXPECT_EQ(store_.ended_requests()[1].how, StoreRequestEnd::How::kEndOfTurn);
  EXPECT_TRUE(store_.ended_requests()[1].last_turn);
  EXPECT_FALSE(store_.ended_requests()[1].then.has_value());
  request.hints.tool_call_texts = {"xxxx"};
  scheduler_.Add(request).value();
  for (const TokenId token : {5, 55, 5, 77}) Step(token);
  Settle();
  EXPECT_EQ(store_.ended_requests().back().how, StoreRequestEnd::How::kToolCall);
}

TEST_F(SchedulerStoreTest, LastTurnEndsBeforeTheNextOneBegins) {
  SequenceRequest request;
  request.prompt = Tokens(14);
  request.params.max_tokens = 1;
  request.hints.conversation = 9;
  scheduler_.Add(request).value();
  Ask();
  EXPECT_THAT(Step(), ElementsAre(0));
  EXPECT_THAT(store_.ended_requests(), IsEmpty()) << "its blocks are not stored yet";
  scheduler_.Add(request).value();
  scheduler_.Schedule();
  EXPECT_EQ(store_.ended_requests().size(), 1u);
  EXPECT_EQ(store_.open_requests(), 1u);
}

TEST_F(SchedulerStoreTest, WhatIsCorruptedIsComputed) {
  Remember(Tokens(14));
  store_.Corrupt();
  Add(Tokens(18));
  Ask();
  Step();
  Settle();
  EXPECT_THAT(Step(), ElementsAre(0));
  EXPECT_EQ(scheduler_.counters().failed_loads, 1);
  EXPECT_EQ(scheduler_.TakeOutputs().back().usage.cached_tokens, 0);
}

TEST_F(SchedulerStoreTest, LoadsOnlyWhatIsFasterThanComputing) {
  Remember(Tokens(14));
  scheduler_.SetLoadCosts({.token_seconds = 1e-3, .block_seconds = 5e-3});
  Add(Tokens(18));
  Ask();
  EXPECT_THAT(Step(), ElementsAre(0));
  EXPECT_EQ(scheduler_.counters().blocks_recomputed, 3);
  EXPECT_EQ(store_.held(), 0u);
}

TEST_F(SchedulerStoreTest, DoesNotAskForLessThanTheAnswerTakes) {
  Remember(Tokens(14));
  scheduler_.SetLoadCosts({.token_seconds = 1e-6, .answer_seconds = 1e-3});
  Add(Tokens(18));
  EXPECT_THAT(Step(), ElementsAre(0));
  EXPECT_EQ(store_.queries(), 2) << "but the store hears of every request";
  Settle();
  EXPECT_EQ(store_.held(), 0u);
  EXPECT_EQ(store_.open_requests(), 0u);
}

TEST_F(SchedulerStoreTest, AwaitsWhatALowerTierBringsInTime) {
  Remember(Tokens(14));
  for (int i = 0; i < 50; ++i) store_.DemoteOne();
  scheduler_.SetLoadCosts({.token_seconds = 1, .block_seconds = 1e-3, .answer_seconds = 1e-3});
  Add(Tokens(18));
  Ask();
  EXPECT_EQ(scheduler_.counters().promotions_awaited, 1);
  ASSERT_THAT(Step(), Not(IsEmpty()));
  Settle();
  EXPECT_GT(scheduler_.counters().blocks_loaded, 0);
}

TEST_F(SchedulerStoreTest, PrefixThatT0LosesMeanwhileIsAskedForAnew) {
  Remember(Tokens(14));
  Add(Tokens(6));  // T0 has the first block
  Ask();
  Step();
  Settle();
  Step();
  Add(Tokens(18));
  Step();
  Settle();  // two are pinned behind it, and loading begins with the next step
  scheduler_.GiveSlabs(config_.geometry.region_slabs);
  EXPECT_THAT(Step(), IsEmpty());
  scheduler_.OnSlabsMapped(AllSlabs());
  for (int i = 0; i < 4 && !scheduler_.idle(); ++i) {
    Step();
    Settle();
  }
  EXPECT_TRUE(scheduler_.idle());
  EXPECT_EQ(scheduler_.counters().blocks_loaded, 4);
  EXPECT_EQ(store_.held(), 0u);
}

TEST_F(SchedulerStoreTest, PinsAreGivenBackWhenTheirMemoryIsWanted) {
  Remember(Tokens(14));
  scheduler_.GiveSlabs(config_.geometry.region_slabs);
  Add(Tokens(18));
  Ask();
  EXPECT_EQ(store_.held(), 3u) << "there is no room for it";
  store_.WantPlaces();
  scheduler_.PollStore(now_);
  EXPECT_EQ(store_.held(), 0u);
  EXPECT_THAT(Step(), IsEmpty());
  Settle();
  EXPECT_EQ(store_.held(), 3u) << "asked anew";
  EXPECT_TRUE(scheduler_.Cancel(SequenceId(2)));
  EXPECT_EQ(store_.held(), 0u);
}

TEST_F(SchedulerStoreTest, CancelledWhileAskingAndWhileLoading) {
  Remember(Tokens(14));
  for (const bool loading : {false, true}) {
    const SequenceId id = Add(Tokens(18));
    Step();
    if (loading) {
      store_.AnswerAll();
      scheduler_.PollStore(now_);
      Step();
    }
    EXPECT_TRUE(scheduler_.Cancel(id));
    Settle();
    EXPECT_EQ(store_.held(), 0u);
    EXPECT_EQ(store_.open_requests(), 0u);
    EXPECT_EQ(scheduler_.blocks().live_blocks(), 0);
  }
}

TEST_F(SchedulerStoreTest, LostStoreIsFilledAgain) {
  Add(Tokens(14));
  Ask();
  Step();
  Settle();
  store_.Lose();
  Settle();
  EXPECT_EQ(store_.blocks(), 0u);
  Add(Tokens(14), 1);
  EXPECT_THAT(Step(), ElementsAre(12)) << "T0 still has it";
  Settle();
  EXPECT_EQ(store_.blocks(), 3u);
}

// Loading ends before computing would: 16 tokens take 16 ms.
constexpr LoadCosts kKnown{.token_seconds = 1e-3};

TEST_F(SchedulerStoreTest, AnswerThatIsLateIsNotAwaited) {
  Remember(Tokens(14));
  scheduler_.SetLoadCosts(kKnown);
  Add(Tokens(18));
  EXPECT_THAT(Step(), IsEmpty());
  const absl::Time asked = now_;
  EXPECT_EQ(scheduler_.next_give_up(), asked + absl::Milliseconds(16));
  now_ = asked + absl::Milliseconds(15);
  scheduler_.PollStore(now_);
  EXPECT_THAT(Step(), IsEmpty());
  now_ = asked + absl::Milliseconds(16);
  scheduler_.PollStore(now_);
  EXPECT_THAT(Step(), ElementsAre(0)) << "computed, after as long as that takes";
  EXPECT_EQ(scheduler_.counters().late_answers, 1);
  Settle();
  EXPECT_EQ(store_.held(), 0u) << "what comes later is given back";
  EXPECT_EQ(store_.open_requests(), 0u);
}

TEST_F(SchedulerStoreTest, PromotionThatIsLateIsNotAwaited) {
  Remember(Tokens(14));
  for (int i = 0; i < 50; ++i) store_.DemoteOne();
  scheduler_.SetLoadCosts({.token_seconds = 1, .answer_seconds = 1e-3});
  Add(Tokens(18));
  Step();
  store_.AnswerAll();
  scheduler_.PollStore(now_);
  ASSERT_EQ(scheduler_.counters().promotions_awaited, 1);
  EXPECT_THAT(Step(), IsEmpty());
  now_ += absl::Seconds(16);
  scheduler_.PollStore(now_);
  EXPECT_THAT(Step(), ElementsAre(0));
  EXPECT_EQ(scheduler_.counters().late_answers, 1);
  Settle();
  EXPECT_EQ(store_.held(), 0u);
}

TEST_F(SchedulerStoreTest, LoadOverASlowLinkIsGivenUp) {
  Remember(Tokens(18));
  scheduler_.SetLoadCosts(kKnown);
  for (const bool begun : {true, false}) {
    SCOPED_TRACE(begun);
    Add(Tokens(18));
    Step();
    store_.AnswerAll();
    scheduler_.PollStore(now_);
    EXPECT_THAT(Step(), IsEmpty()) << "four blocks are loaded";
    if (begun) {
      for (SwapTransfer& transfer : scheduler_.TakeTransfers()) copier_.Start(std::move(transfer));
    }
    EXPECT_EQ(scheduler_.next_give_up(), now_ + absl::Milliseconds(16));
    now_ += absl::Milliseconds(16);
    scheduler_.PollStore(now_);
    EXPECT_THAT(Step(), ElementsAre(0)) << "computed, after as long as that takes";
    Settle();
    EXPECT_EQ(store_.held(), 0u);
    EXPECT_EQ(scheduler_.blocks().live_blocks(), 0);
    EXPECT_EQ(scheduler_.TakeOutputs().back().usage.cached_tokens, 0);
    Clear();
  }
  EXPECT_EQ(scheduler_.counters().late_loads, 2);
}

TEST_F(SchedulerStoreTest, RestIsComputedWhileThePrefixIsLoadedIfNobodyElseWaits) {
  Remember(Tokens(14));
  scheduler_.SetLoadCosts({.token_seconds = 1e-3, .block_seconds = 1e-3});
  Add(Tokens(18));
  Ask();
  const StepPlan& plan = scheduler_.Schedule();
  ASSERT_EQ(plan.chunks.size(), 1u);
  EXPECT_EQ(plan.chunks[0].first_position, 12);
  EXPECT_TRUE(plan.arriving) << "behind the copies, layer by layer";
  const auto transfers = scheduler_.TakeTransfers();
  ASSERT_EQ(transfers.size(), 1u);
  EXPECT_TRUE(transfers[0].awaited);
  EXPECT_EQ(transfers[0].moves.size(), 3u);
  EXPECT_EQ(scheduler_.next_give_up(), absl::InfiniteFuture());
  for (const SwapTransfer& transfer : transfers) copier_.Start(transfer);
  copier_.AwaitAll();
  StepResult result;
  result.sampled.emplace_back().emplace().token = 1;
  scheduler_.Commit(std::move(result));
  for (const SwapEnded& ended : copier_.TakeEnded()) scheduler_.OnTransferEnded(ended);
  Settle();
  EXPECT_EQ(scheduler_.counters().blocks_loaded, 3);
}

TEST_F(SchedulerStoreTest, OthersDoNotWaitForALoad) {
  Remember(Tokens(14));
  Add(Tokens(3, 50), 30);
  EXPECT_THAT(Step(), ElementsAre(0));
  scheduler_.SetLoadCosts({.token_seconds = 1e-3, .block_seconds = 1e-3});
  Add(Tokens(18), 5);
  EXPECT_THAT(Step(), ElementsAre(3));
  store_.AnswerAll();
  scheduler_.PollStore(now_);
  EXPECT_THAT(Step(), ElementsAre(4)) << "while the prefix is loaded";
  Settle();
  EXPECT_THAT(Step(), ElementsAre(5, 12));
}

TEST_F(SchedulerStoreTest, WhatTheStoreLostIsStoredAgainWhenItIsUsed) {
  Add(Tokens(14));
  Ask();
  Step();
  Settle();
  ASSERT_EQ(store_.blocks(), 3u);
  while (store_.blocks() > 0) store_.DropOne();
  Add(Tokens(14));
  EXPECT_THAT(Step(), ElementsAre(12)) << "T0 has it";
  Settle();
  EXPECT_EQ(store_.blocks(), 0u) << "the answer came too late for this one";
  Add(Tokens(14), 3);
  Step();
  Settle();
  Step();
  Step();
  Settle();
  EXPECT_EQ(store_.blocks(), 4u) << "with what was generated";
  EXPECT_EQ(scheduler_.offload_counters().lost, 3);
}

class SmallSchedulerStoreTest : public SchedulerStoreTest {
 protected:
  SmallSchedulerStoreTest() : SchedulerStoreTest(/*blocks=*/8) {}
};

TEST_F(SmallSchedulerStoreTest, PreemptedSequenceResumesFromTheStore) {
  Add(Tokens(9, 1), 20);
  Add(Tokens(9, 50), 20);
  Ask();
  while (scheduler_.counters().preemptions == 0) {
    ASSERT_THAT(Step(5), Not(IsEmpty()));
    Settle();
  }
  while (!scheduler_.idle()) {
    Step(5);
    Settle();
  }
  EXPECT_GT(scheduler_.counters().blocks_loaded, 0);
}

class CollidingSchedulerStoreTest : public SchedulerStoreTest {
 protected:
  CollidingSchedulerStoreTest() : SchedulerStoreTest(/*blocks=*/20, SumKey) {}
};

TEST_F(CollidingSchedulerStoreTest, EqualKeysOfOtherTokensAreNoHit) {
  Remember({1, 2, 3, 4, 5, 5, 5, 5, 9});
  EXPECT_EQ(store_.blocks(), 2u);
  // The same sums in both blocks, other tokens in the first.
  Add({4, 3, 2, 1, 5, 5, 5, 5, 9});
  Ask();
  EXPECT_THAT(Step(), ElementsAre(0));
  Settle();
  EXPECT_EQ(scheduler_.counters().blocks_loaded, 0);
  EXPECT_GT(scheduler_.offload_counters().refused, 0);
  EXPECT_EQ(store_.blocks(), 2u);
}

}  // namespace
}  // namespace palimpsest
