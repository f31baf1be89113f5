// What the scheduler plans while a step is in flight, and what becomes of it.
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/core/plan_copy.h"
#include "worker/core/scheduler.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr TokenId kEos = 29;

class Letters : public TokenBytes {
 public:
  absl::string_view BytesOf(TokenId token) const override {
    static constexpr char kText[] = "abcdefghijklmnopqrstuvwxyz";
    return token < 26 ? absl::string_view(kText + token, 1) : absl::string_view();
  }
};

SchedulerConfig TestConfig() {
  SchedulerConfig config;
  config.geometry = {
      .slab_bytes = Bytes(10), .block_bytes = Bytes(10), .region_slabs = 41, .block_tokens = 4};
  config.max_kv_slabs = 41;
  config.vocab_size = 30;
  config.max_sequence_tokens = 100;
  config.eos_token_ids = {kEos};
  config.max_batch_sequences = 3;
  config.max_step_tokens = 10;
  config.queue_capacity = 2;
  config.pipeline_depth = 2;
  return config;
}

class SchedulerPipelineTest : public ::testing::Test {
 protected:
  // Slab 0 holds the null block only; slab n holds block n.
  void Map(uint32_t count) {
    std::vector<RegionIndex> slabs;
    for (uint32_t i = 0; i < count; ++i) slabs.push_back(RegionIndex(i));
    scheduler_.OnSlabsMapped(slabs);
  }

  static SequenceRequest Request(int32_t size, TokenId token = 1, int32_t max_tokens = 0) {
    SequenceRequest request;
    request.prompt.assign(size, token);
    request.params.max_tokens = max_tokens;
    return request;
  }

  SequenceId Add(SequenceRequest request) { return scheduler_.Add(std::move(request)).value(); }

  // Plans a step and leaves it in flight, behind those that are.
  const StepPlan& Submit() {
    const StepPlan& plan = scheduler_.Schedule();
    if (!plan.chunks.empty()) flights_.emplace_back(plan);
    scheduler_.CheckInvariants();
    return plan;
  }

  // Ends the oldest step; every sampling chunk gets `token`.
  void Commit(TokenId token) {
    StepResult result;
    for (const SequenceChunk& chunk : flights_.front().plan().chunks) {
      result.sampled.emplace_back();
      if (chunk.sampling != nullptr) result.sampled.back().emplace().token = token;
    }
    flights_.erase(flights_.begin());
    scheduler_.Commit(std::move(result));
    scheduler_.CheckInvariants();
  }

  // The tokens that came out since the last call, in order.
  std::vector<TokenId> Tokens() {
    std::vector<TokenId> tokens;
    for (const SequenceOutput& output : scheduler_.TakeOutputs()) {
      if (output.token.has_value()) tokens.push_back(output.token->token);
    }
    return tokens;
  }

  Letters token_bytes_;
  Scheduler scheduler_{TestConfig(), &token_bytes_};
  std::vector<PlanCopy> flights_;
};

TEST_F(SchedulerPipelineTest, DecodeContinuesTheTokenInFlight) {
  Map(41);
  Add(Request(3, 1));
  Add(Request(5, 2));
  Submit();
  const StepPlan& next = Submit();
  ASSERT_THAT(next.chunks, SizeIs(2));
  EXPECT_EQ(next.chunks[0].token_from, 0);
  EXPECT_EQ(next.chunks[1].token_from, 1);
  EXPECT_EQ(next.chunks[1].first_position, 5);
  EXPECT_THAT(next.chunks[1].tokens, SizeIs(1));
  EXPECT_THAT(next.chunks[1].block_table, SizeIs(2));
  ASSERT_NE(next.chunks[1].sampling, nullptr);
  EXPECT_EQ(next.chunks[1].sampling->output_index, 1);
  EXPECT_THAT(next.chunks[1].sampling->history, ElementsAre(2, 2, 2, 2, 2));
  Commit(7);
  EXPECT_THAT(Tokens(), ElementsAre(7, 7));
  const StepPlan& third = Submit();
  EXPECT_EQ(third.chunks[0].token_from, 0);
  EXPECT_EQ(third.chunks[0].first_position, 4);
  EXPECT_THAT(third.chunks[0].sampling->history, ElementsAre(1, 1, 1, 7));
}

TEST_F(SchedulerPipelineTest, StopStringsAndPenaltiesDoNotWaitForTheToken) {
  Map(41);
  auto request = Request(3);
  request.params.repetition_penalty = 1.5f;
  request.params.stop = {"de"};
  request.params.stop_token_ids = {9};
  Add(std::move(request));
  Submit();
  for (TokenId token : {3, 3}) {
    EXPECT_THAT(Submit().chunks, SizeIs(1));
    Commit(token);
  }
  Submit();
  Commit(4);
  EXPECT_TRUE(scheduler_.idle());
  Commit(5);
  EXPECT_THAT(Tokens(), ElementsAre(3, 3, 4));
}

TEST_F(SchedulerPipelineTest, PromptChunksFollowEachOther) {
  Map(41);
  Add(Request(25));
  EXPECT_THAT(Submit().chunks[0].tokens, SizeIs(10));
  const StepPlan& second = Submit();
  EXPECT_EQ(second.chunks[0].first_position, 10);
  EXPECT_THAT(second.chunks[0].tokens, SizeIs(10));
  EXPECT_EQ(second.chunks[0].token_from, -1);
  Commit(0);
  const StepPlan& last = Submit();
  EXPECT_THAT(last.chunks[0].tokens, SizeIs(5));
  Commit(0);
  EXPECT_EQ(Submit().chunks[0].token_from, 0);
}

TEST_F(SchedulerPipelineTest, TokenThatIsTheLastByNumberIsNotContinued) {
  Map(41);
  Add(Request(4, 1, 2));
  Submit();
  EXPECT_THAT(Submit().chunks, SizeIs(1));
  Commit(5);
  EXPECT_THAT(Submit().chunks, IsEmpty());
  Commit(6);
  EXPECT_TRUE(scheduler_.idle());
  EXPECT_THAT(Tokens(), ElementsAre(5, 6));
  EXPECT_EQ(scheduler_.counters().discarded_tokens, 0);
}

TEST_F(SchedulerPipelineTest, WhatFollowsTheEndIsDiscarded) {
  Map(41);
  Add(Request(8, 1));
  const SequenceId other = Add(Request(2, 2, 3));
  Submit();
  Submit();
  Commit(kEos);  // ends both
  EXPECT_TRUE(scheduler_.idle());
  EXPECT_EQ(scheduler_.blocks().live_blocks(), 0);
  EXPECT_FALSE(scheduler_.Cancel(other));
  scheduler_.TakeOutputs();
  // The blocks are there for the next plan, although the step in flight still writes to them.
  Add(Request(6, 3));
  EXPECT_THAT(Submit().chunks, SizeIs(1));
  Commit(4);
  EXPECT_THAT(Tokens(), IsEmpty());
  EXPECT_EQ(scheduler_.counters().discarded_tokens, 2);
  Commit(4);
  EXPECT_THAT(Tokens(), ElementsAre(4));
}

TEST_F(SchedulerPipelineTest, CancelledInFlightSaysNothingMore) {
  Map(41);
  const SequenceId id = Add(Request(3));
  const SequenceId dropped = Add(Request(3, 2));
  Submit();
  Submit();
  EXPECT_TRUE(scheduler_.Cancel(id));
  EXPECT_TRUE(scheduler_.Drop(dropped));
  scheduler_.CheckInvariants();
  EXPECT_TRUE(scheduler_.idle());
  EXPECT_EQ(scheduler_.TakeOutputs().back().finish, FinishReason::kCancelled);
  Commit(1);
  Commit(1);
  EXPECT_THAT(scheduler_.TakeOutputs(), IsEmpty());
  EXPECT_EQ(scheduler_.in_flight(), 0);
}

TEST_F(SchedulerPipelineTest, PreemptedInFlightKeepsItsToken) {
  Map(5);  // four blocks
  Add(Request(2, 1));
  Add(Request(5, 2));
  Submit();
  Commit(3);
  EXPECT_THAT(scheduler_.GiveSlabs(1).moves, IsEmpty());
  Submit();
  Submit();
  Commit(3);
  Tokens();
  Submit();  // the older one's position 4 needs a block
  EXPECT_EQ(scheduler_.counters().preemptions, 1);
  EXPECT_EQ(scheduler_.waiting(), 1);
  Commit(4);
  EXPECT_THAT(Tokens(), ElementsAre(4, 4));
  Commit(4);
  EXPECT_THAT(Tokens(), ElementsAre(4));
}

TEST_F(SchedulerPipelineTest, PreemptedInFlightIsNotAdmittedBeforeItsTokenIsKnown) {
  Map(41);
  Add(Request(5));
  Submit();
  EXPECT_EQ(scheduler_.PreemptAll(), 1);
  EXPECT_THAT(Submit().chunks, IsEmpty());
  Commit(4);
  EXPECT_THAT(Tokens(), ElementsAre(4));
  EXPECT_THAT(Submit().chunks[0].tokens, ElementsAre(1, 1, 1, 1, 1, 4));
}

TEST_F(SchedulerPipelineTest, KvIsSharedOnlyOnceItExists) {
  Map(41);
  Add(Request(9, 1));
  Submit();
  Add(Request(9, 1));
  EXPECT_THAT(Submit().chunks[1].tokens, SizeIs(9));
  Commit(2);
  Add(Request(9, 1));
  EXPECT_THAT(Submit().chunks[2].tokens, SizeIs(1));
}

TEST_F(SchedulerPipelineTest, AbandonVoidsAllStepsInFlight) {
  Map(41);
  Add(Request(6));
  Submit();
  Commit(3);
  Submit();
  Submit();
  flights_.clear();
  scheduler_.Abandon();
  scheduler_.CheckInvariants();
  EXPECT_EQ(scheduler_.in_flight(), 0);
  EXPECT_THAT(Tokens(), ElementsAre(3));
  const StepPlan& again = Submit();
  EXPECT_THAT(again.chunks[0].tokens, ElementsAre(3));
  EXPECT_EQ(again.chunks[0].first_position, 6);
  EXPECT_EQ(again.chunks[0].token_from, -1);
}

TEST_F(SchedulerPipelineTest, DemandCountsWhatIsInFlight) {
  Map(3);  // two blocks
  Add(Request(7));
  Submit();
  EXPECT_EQ(scheduler_.Demand().needed, 3);
  Submit();  // token 8 fills the second block
  EXPECT_EQ(scheduler_.Demand().needed, 4);
  EXPECT_THAT(flights_, SizeIs(2));
}

}  // namespace
}  // namespace palimpsest
