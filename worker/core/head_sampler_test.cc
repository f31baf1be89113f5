#include "worker/core/head_sampler.h"

#include <optional>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/core/far_keys.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;

TEST(FarKeys, LieBetweenTheFirstTileAndTheRecentWindow) {
  EXPECT_EQ(FarKeysEnd(0, 256), 64);
  EXPECT_EQ(FarKeysEnd(382, 256), 64) << "the window begins at 127, in the second tile";
  EXPECT_EQ(FarKeysEnd(383, 256), 128);
  EXPECT_EQ(FarKeysEnd(447, 256), 192);
  for (int32_t position = 0; position < 2000; ++position) {
    const int32_t end = FarKeysEnd(position, 100);
    ASSERT_EQ(end % kFarKeyTile, 0);
    ASSERT_TRUE(end == kFarKeyTile || end <= position - 99) << "a recent key is never far";
    ASSERT_GT(end + kFarKeyTile, position - 99);
  }
}

class Plans {
 public:
  // A step in which sequences of these lengths decode.
  StepPlan Decode(const std::vector<int32_t>& lengths) const {
    StepPlan plan;
    for (const int32_t length : lengths) plan.chunks.push_back({token_, length - 1, {}});
    return plan;
  }

 private:
  const std::vector<TokenId> token_ = {1};
};

TEST(HeadSampler, SamplesEverySoManySteps) {
  HeadSampler sampler({.every = 3, .recent_tokens = 64});
  const Plans plans;
  std::vector<int> sampled;
  for (int step = 1; step <= 9; ++step) {
    if (sampler.Choose(plans.Decode({1000})).has_value()) sampled.push_back(step);
  }
  EXPECT_THAT(sampled, ElementsAre(3, 6, 9));
}

TEST(HeadSampler, NeverUnlessAsked) {
  HeadSampler sampler({});
  const Plans plans;
  for (int step = 0; step < 100; ++step) EXPECT_FALSE(sampler.Choose(plans.Decode({5000})));
}

TEST(HeadSampler, LongSequencesTakeTurns) {
  HeadSampler sampler({.every = 1, .recent_tokens = 256});
  const Plans plans;
  std::vector<std::optional<int32_t>> chosen;
  chosen.reserve(4);
  for (int i = 0; i < 4; ++i) chosen.push_back(sampler.Choose(plans.Decode({1000, 383, 384, 700})));
  EXPECT_THAT(chosen, ElementsAre(0, 2, 3, 0)) << "383 tokens have no far key";
  EXPECT_EQ(sampler.Choose(plans.Decode({100, 200})), std::nullopt);
}

}  // namespace
}  // namespace palimpsest
