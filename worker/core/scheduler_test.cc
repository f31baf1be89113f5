#include "worker/core/scheduler.h"

#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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
  config.eos_token_ids = {29};
  config.max_batch_sequences = 3;
  config.max_step_tokens = 10;
  config.queue_capacity = 2;
  return config;
}

class SchedulerTest : public ::testing::Test {
 protected:
  explicit SchedulerTest(const SchedulerConfig& config = TestConfig())
      : scheduler_(config, &token_bytes_) {}

  // Slab 0 holds the null block only; slab n holds block n.
  void Map(uint32_t first, uint32_t count) {
    std::vector<RegionIndex> slabs;
    for (uint32_t i = 0; i < count; ++i) slabs.push_back(RegionIndex(first + i));
    scheduler_.OnSlabsMapped(slabs);
  }

  static SequenceRequest Request(int32_t size, TokenId token = 1, int32_t max_tokens = 0) {
    SequenceRequest request;
    request.prompt.assign(size, token);
    request.params.max_tokens = max_tokens;
    return request;
  }

  SequenceId Add(SequenceRequest request) {
    auto id = scheduler_.Add(std::move(request));
    EXPECT_TRUE(id.ok()) << id.status();
    return id.ok() ? *id : SequenceId();
  }

  // One step in which every sampling chunk gets `token`; returns the sizes of its chunks.
  std::vector<size_t> Step(TokenId token = 2) {
    std::vector<size_t> sizes;
    const StepPlan& plan = scheduler_.Schedule();
    StepResult result;
    for (const SequenceChunk& chunk : plan.chunks) {
      sizes.push_back(chunk.tokens.size());
      result.sampled.emplace_back();
      if (chunk.sampling != nullptr) result.sampled.back().emplace().token = token;
    }
    if (!sizes.empty()) scheduler_.Commit(std::move(result));
    scheduler_.CheckInvariants();
    return sizes;
  }

  Letters token_bytes_;
  Scheduler scheduler_;
};

TEST_F(SchedulerTest, PromptsShareWhatDecodesLeaveOfTheBudget) {
  Map(0, 41);
  Add(Request(4));
  EXPECT_THAT(Step(), ElementsAre(4));
  Add(Request(25, 5));
  Add(Request(3, 6));
  EXPECT_THAT(Step(), ElementsAre(1, 9));
  EXPECT_THAT(Step(), ElementsAre(1, 9));
  EXPECT_THAT(Step(), ElementsAre(1, 7, 2));
  EXPECT_THAT(Step(), ElementsAre(1, 1, 1));
  EXPECT_EQ(scheduler_.running(), 3);
}

TEST_F(SchedulerTest, BatchAndQueueAreBounded) {
  Map(0, 41);
  for (int i = 0; i < 5; ++i) Add(Request(2, i));
  EXPECT_EQ(scheduler_.Add(Request(2)).status().code(), absl::StatusCode::kResourceExhausted);
  Step();
  EXPECT_EQ(scheduler_.running(), 3);
  EXPECT_EQ(scheduler_.waiting(), 2);
}

TEST_F(SchedulerTest, ImpossibleRequestsAreRefusedWithTheSizes) {
  const auto message = [&](SequenceRequest request) {
    const auto id = scheduler_.Add(std::move(request));
    EXPECT_EQ(id.status().code(), absl::StatusCode::kInvalidArgument);
    return std::string(id.status().message());
  };
  EXPECT_THAT(message(Request(0)), HasSubstr("empty"));
  EXPECT_THAT(message(Request(100)), HasSubstr("has 100 tokens, but a sequence has at most 100"));
  EXPECT_THAT(message(Request(3, 30)), HasSubstr("from 0 to 29"));
  auto offset = Request(3);
  offset.output_offset = 3;
  EXPECT_THAT(message(offset), HasSubstr("output_offset"));
  SchedulerConfig small = TestConfig();
  small.max_kv_slabs = 6;
  Scheduler scheduler(small, &token_bytes_);
  EXPECT_EQ(scheduler.longest_sequence(), 21);
  EXPECT_THAT(std::string(scheduler.Add(Request(21)).status().message()),
              HasSubstr("6 KV slabs that this worker may hold have room for 5 blocks of 4"));
  EXPECT_TRUE(scheduler.Add(Request(20)).ok());
}

TEST_F(SchedulerTest, YoungestGivesWayAndComesBackFirst) {
  Map(0, 7);  // six blocks
  const SequenceId old_id = Add(Request(8, 1));
  const SequenceId young_id = Add(Request(8, 3));
  for (int i = 0; i < 5; ++i) Step();
  EXPECT_EQ(scheduler_.running(), 2);
  for (int i = 0; i < 4; ++i) Step();
  EXPECT_EQ(scheduler_.running(), 1);
  EXPECT_EQ(scheduler_.counters().preemptions, 1);
  Add(Request(2, 5));
  scheduler_.Cancel(old_id);
  scheduler_.TakeOutputs();
  Step();
  std::vector<SequenceId> seen;
  for (const SequenceOutput& output : scheduler_.TakeOutputs()) seen.push_back(output.id);
  EXPECT_EQ(scheduler_.running(), 2);
  ASSERT_FALSE(seen.empty());
  EXPECT_EQ(seen[0], young_id);
}

TEST_F(SchedulerTest, CachedPrefixIsNotComputedAgainButForItsLastToken) {
  Map(0, 41);
  const SequenceId first = Add(Request(8, 1, 1));
  Step();
  EXPECT_TRUE(scheduler_.idle());
  EXPECT_EQ(scheduler_.TakeOutputs().back().id, first);
  Add(Request(8, 1, 1));
  EXPECT_THAT(Step(), ElementsAre(4));
  EXPECT_EQ(scheduler_.TakeOutputs().back().usage.cached_tokens, 4);
  Add(Request(9, 1, 1));
  EXPECT_THAT(Step(), ElementsAre(1));
  EXPECT_EQ(scheduler_.TakeOutputs().back().usage.cached_tokens, 8);
}

TEST_F(SchedulerTest, AbandonedStepIsPlannedAgain) {
  Map(0, 41);
  Add(Request(6));
  ASSERT_EQ(scheduler_.Schedule().chunks.size(), 1);
  scheduler_.Abandon();
  EXPECT_THAT(scheduler_.TakeOutputs(), IsEmpty());
  EXPECT_EQ(scheduler_.blocks().cached_blocks(), 0);
  EXPECT_THAT(Step(), ElementsAre(6));
}

TEST_F(SchedulerTest, EndsAreReportedOnceWithTheirReason) {
  Map(0, 41);
  const auto last = [&](SequenceRequest request, const std::vector<TokenId>& tokens) {
    Add(std::move(request));
    for (TokenId token : tokens) Step(token);
    EXPECT_TRUE(scheduler_.idle());
    auto outputs = scheduler_.TakeOutputs();
    EXPECT_EQ(outputs.size(), tokens.size());
    for (size_t i = 0; i + 1 < outputs.size(); ++i) EXPECT_FALSE(outputs[i].finish.has_value());
    return outputs.back();
  };
  EXPECT_EQ(last(Request(3, 1, 2), {4, 4}).finish, FinishReason::kLength);
  EXPECT_EQ(last(Request(3), {4, 29}).finish, FinishReason::kStopToken);
  auto ignoring = Request(3, 1, 3);
  ignoring.params.ignore_eos = true;
  EXPECT_EQ(last(ignoring, {29, 29, 29}).finish, FinishReason::kLength);
  auto stopping = Request(3);
  stopping.params.stop = {"xyz", "cde"};
  const SequenceOutput stopped = last(stopping, {1, 2, 3, 4});
  EXPECT_EQ(stopped.finish, FinishReason::kStopString);
  EXPECT_EQ(stopped.stop_trim_bytes, 3);
  EXPECT_EQ(stopped.usage.output_tokens, 4);
}

TEST_F(SchedulerTest, OutputOfAnotherWorkerCountsFromItsStart) {
  Map(0, 41);
  // "ab" is output already; the stop string ends with the next token.
  auto request = Request(3);
  request.prompt.insert(request.prompt.end(), {0, 1});
  request.output_offset = 2;
  request.params.stop = {"abc"};
  Add(request);
  const StepPlan& plan = scheduler_.Schedule();
  EXPECT_EQ(plan.chunks[0].sampling->output_index, 2);
  scheduler_.Abandon();
  Step(2);
  const auto outputs = scheduler_.TakeOutputs();
  ASSERT_EQ(outputs.size(), 1);
  EXPECT_EQ(outputs[0].finish, FinishReason::kStopString);
  EXPECT_EQ(outputs[0].stop_trim_bytes, 3);
  EXPECT_EQ(outputs[0].usage.prompt_tokens, 5);
}

TEST_F(SchedulerTest, OutputThatIsCompleteAlreadyEndsAtOnce) {
  const auto end_of = [&](SequenceRequest request, int32_t offset) {
    request.output_offset = offset;
    Add(std::move(request));
    EXPECT_TRUE(scheduler_.idle());
    const auto outputs = scheduler_.TakeOutputs();
    EXPECT_EQ(outputs.size(), 1);
    EXPECT_FALSE(outputs[0].token.has_value());
    return outputs[0].finish;
  };
  EXPECT_EQ(end_of(Request(10, 1, 4), 4), FinishReason::kLength);
  EXPECT_EQ(end_of(Request(10, 29), 1), FinishReason::kStopToken);
  EXPECT_EQ(end_of(Request(100, 1), 7), FinishReason::kLength);
  auto stopped = Request(10, 3);
  stopped.params.stop = {"ddd"};
  EXPECT_EQ(end_of(stopped, 5), FinishReason::kStopString);
}

TEST_F(SchedulerTest, DemandCoversWhatRunsAndWhatWaits) {
  EXPECT_EQ(scheduler_.Demand().needed, 0);
  Add(Request(20, 1));
  Add(Request(20, 2));
  EXPECT_EQ(scheduler_.Demand().needed, 6);  // five blocks and the null block
  EXPECT_GE(scheduler_.Demand().wanted, 11);
  Map(0, 6);
  EXPECT_THAT(Step(), ElementsAre(10));
  EXPECT_EQ(scheduler_.running(), 1);
  EXPECT_GE(scheduler_.Demand().wanted, 11);
}

TEST_F(SchedulerTest, DropForgetsASequence) {
  Map(0, 41);
  const SequenceId a = Add(Request(5)), b = Add(Request(5));
  Step();
  const SequenceId c = Add(Request(5));
  EXPECT_TRUE(scheduler_.Drop(b));
  EXPECT_TRUE(scheduler_.Drop(c));
  EXPECT_EQ(scheduler_.running() + scheduler_.waiting(), 1);
  scheduler_.CheckInvariants();
  EXPECT_TRUE(scheduler_.Drop(a));
  EXPECT_FALSE(scheduler_.Drop(a));
  EXPECT_TRUE(scheduler_.idle());
  EXPECT_EQ(scheduler_.blocks().live_blocks(), 0);
  EXPECT_FALSE(scheduler_.Cancel(a));
  scheduler_.CheckInvariants();
}

TEST_F(SchedulerTest, PreemptAllFreesEveryBlockAndKeepsTheCache) {
  Map(0, 41);
  Add(Request(5));
  Add(Request(7));
  Step();
  Add(Request(5));
  EXPECT_EQ(scheduler_.PreemptAll(), 2);
  EXPECT_EQ(scheduler_.running(), 0);
  EXPECT_EQ(scheduler_.waiting(), 3);
  EXPECT_EQ(scheduler_.blocks().live_blocks(), 0);
  scheduler_.CheckInvariants();
  EXPECT_THAT(Step(), ElementsAre(2, 3, 1));
}

TEST(SchedulerConfig, ValidateNamesWhatIsWrong) {
  const auto expect = [](auto change, const std::string& words) {
    SchedulerConfig config = TestConfig();
    change(config);
    EXPECT_THAT(std::string(config.Validate().message()), HasSubstr(words));
  };
  EXPECT_TRUE(TestConfig().Validate().ok());
  expect([](auto& c) { c.max_step_tokens = 2; }, "max_step_tokens (2)");
  expect([](auto& c) { c.max_kv_slabs = 42; }, "region's 41; got 42");
  expect([](auto& c) { c.max_kv_slabs = 0; }, "max_kv_slabs");
  expect([](auto& c) { c.sliding_window = -1; }, "sliding window");
  expect([](auto& c) { c.vocab_size = 0; }, "vocabulary");
  expect([](auto& c) { c.geometry.block_tokens = 0; }, "tokens per KV block");
}

}  // namespace
}  // namespace palimpsest
