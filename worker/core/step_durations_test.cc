#include "worker/core/step_durations.h"

#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

class StepDurationsTest : public ::testing::Test {
 protected:
  StepPlan Plan(size_t tokens) {
    StepPlan plan;
    plan.chunks.push_back({.tokens = absl::MakeConstSpan(tokens_).first(tokens)});
    plan.chunks.back().sampling = &sampling_;
    return plan;
  }
  void Submit(size_t tokens = 1) { times_.Submitted(Plan(tokens), now_); }
  void End(absl::Duration later, StepTimes times = {}) { times_.Ended(times, now_ += later); }

  const std::vector<TokenId> tokens_ = std::vector<TokenId>(8);
  const SamplingRequest sampling_ = {};
  absl::Time now_ = absl::UnixEpoch();
  StepDurations times_;
};

TEST_F(StepDurationsTest, PhasesAreAveragedApart) {
  EXPECT_EQ(times_.decode_seconds(), 0);
  for (int i = 0; i < 3; ++i) {
    Submit();
    End(absl::Milliseconds(10));
  }
  Submit(8);
  End(absl::Milliseconds(50));
  EXPECT_NEAR(times_.decode_seconds(), 0.010, 1e-9);
  EXPECT_NEAR(times_.prefill_seconds(), 0.050, 1e-9);
  EXPECT_NEAR(times_.prompt_token_seconds(), 0.050 / 8, 1e-9);
  EXPECT_NEAR(times_.prefill_share(), 0.25, 0.02);
  StepPlan unfinished = Plan(1);
  unfinished.chunks.back().sampling = nullptr;
  times_.Submitted(unfinished, now_);
  End(absl::Milliseconds(50));
  EXPECT_NEAR(times_.prefill_share(), 0.4, 0.03);
}

TEST_F(StepDurationsTest, NewTimesReplaceOldOnes) {
  for (int i = 0; i < 300; ++i) {
    Submit();
    End(absl::Milliseconds(i < 100 ? 100 : 10));
  }
  EXPECT_NEAR(times_.decode_seconds(), 0.010, 0.001);
}

TEST_F(StepDurationsTest, AStepBehindAnotherBeginsWhenThatOneEnds) {
  Submit();
  Submit();
  End(absl::Milliseconds(10));
  Submit();
  End(absl::Milliseconds(10));
  times_.Failed(now_ += absl::Milliseconds(70));
  Submit();
  End(absl::Milliseconds(10));
  EXPECT_NEAR(times_.decode_seconds(), 0.010, 1e-9);
}

TEST_F(StepDurationsTest, StallsAreCountedApart) {
  Submit();
  End(absl::Milliseconds(30), {.rotation_stall = absl::Milliseconds(20)});
  Submit();
  End(absl::Milliseconds(30),
      {.device = absl::Milliseconds(15), .rotation_stall = absl::Milliseconds(5)});
  EXPECT_NEAR(times_.decode_seconds(), 0.010, 1e-9);
  EXPECT_EQ(times_.rotation_stall(), absl::Milliseconds(25));
}

// Chunks of 1 to 8 tokens at positions up to `span`, each token 2 ms and 3 us a position.
void Fit(StepDurations& times, int32_t span) {
  const std::vector<TokenId> tokens(8);
  absl::Time now = absl::UnixEpoch();
  for (int32_t i = 0; i < 200; ++i) {
    StepPlan plan;
    const auto size = static_cast<size_t>(1 + i % 8);
    plan.chunks.push_back(
        {.tokens = absl::MakeConstSpan(tokens).first(size), .first_position = span * (i % 7)});
    double seconds = 0;
    for (size_t t = 0; t < size; ++t) seconds += 2e-3 + 3e-6 * (span * (i % 7) + t);
    times.Submitted(plan, now);
    now += absl::Seconds(seconds);
    times.Ended({}, now);
  }
}

TEST(PrefillFit, TellsTokensFromPositions) {
  StepDurations times;
  EXPECT_EQ(times.prefill_fit().token_seconds, 0);
  Fit(times, 1000);
  EXPECT_NEAR(times.prefill_fit().token_seconds, 2e-3, 1e-6);
  EXPECT_NEAR(times.prefill_fit().position_seconds, 3e-6, 1e-9);
}

TEST(PrefillFit, OfStepsThatAreAlikeIsTheirMean) {
  StepDurations times;
  const std::vector<TokenId> tokens(8);
  absl::Time now = absl::UnixEpoch();
  for (int i = 0; i < 20; ++i) {
    StepPlan plan;
    plan.chunks.push_back({.tokens = tokens, .first_position = 100});
    times.Submitted(plan, now);
    times.Ended({}, now += absl::Milliseconds(i % 2 == 0 ? 15 : 17));
  }
  EXPECT_NEAR(times.prefill_fit().token_seconds, 2e-3, 1e-4);
  EXPECT_EQ(times.prefill_fit().position_seconds, 0);
}

}  // namespace
}  // namespace palimpsest
