#include "worker/core/kv_target.h"

#include <algorithm>
#include <random>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr absl::Time kStart = absl::FromUnixSeconds(1000);

KvTargetPolicy::Config TestConfig() {
  return {.low_water_slabs = 2,
          .high_water_slabs = 8,
          .shrink_delay = absl::Seconds(10),
          .max_slabs = 100};
}

TEST(KvTargetPolicy, AsksForTheReserveBeforeAnyDemand) {
  KvTargetPolicy policy(TestConfig());
  EXPECT_EQ(policy.Update({0, 0}, kStart), (KvTargetPolicy::Target{5, 0}));
}

TEST(KvTargetPolicy, StaysWhileTheReserveIsBetweenTheMarks) {
  KvTargetPolicy policy(TestConfig());
  EXPECT_EQ(policy.Update({20, 20}, kStart).target_slabs, 25);
  EXPECT_EQ(policy.Update({23, 23}, kStart).target_slabs, 25);
  EXPECT_EQ(policy.Update({17, 17}, kStart + absl::Hours(1)).target_slabs, 25);
  EXPECT_EQ(policy.Update({24, 24}, kStart + absl::Hours(2)).target_slabs, 29);
}

TEST(KvTargetPolicy, ShrinksOnlyAfterTheDelayAndToTheLatestPeak) {
  KvTargetPolicy policy(TestConfig());
  policy.Update({50, 50}, kStart);
  EXPECT_EQ(policy.Update({10, 10}, kStart).target_slabs, 55);
  EXPECT_EQ(policy.Update({30, 30}, kStart + absl::Seconds(5)).target_slabs, 55);
  EXPECT_EQ(policy.Update({0, 0}, kStart + absl::Seconds(9)).target_slabs, 55);
  EXPECT_EQ(policy.Update({0, 0}, kStart + absl::Seconds(10)).target_slabs, 35);
  EXPECT_EQ(policy.Update({0, 0}, kStart + absl::Seconds(15)).target_slabs, 35);
  EXPECT_EQ(policy.Update({0, 0}, kStart + absl::Seconds(25)).target_slabs, 5);
}

TEST(KvTargetPolicy, ABurstInTheDelayStartsItAnew) {
  KvTargetPolicy policy(TestConfig());
  policy.Update({50, 50}, kStart);
  policy.Update({0, 0}, kStart + absl::Seconds(1));
  policy.Update({48, 48}, kStart + absl::Seconds(9));
  EXPECT_EQ(policy.Update({0, 0}, kStart + absl::Seconds(12)).target_slabs, 55);
  EXPECT_EQ(policy.Update({0, 0}, kStart + absl::Seconds(21)).target_slabs, 55);
  EXPECT_EQ(policy.Update({0, 0}, kStart + absl::Seconds(22)).target_slabs, 5);
}

TEST(KvTargetPolicy, TargetsAreWithinBoundsAndCoverDemand) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    KvTargetPolicy::Config config;
    config.low_water_slabs = random() % 5;
    config.high_water_slabs = config.low_water_slabs + random() % 10;
    config.max_slabs = 1 + random() % 60;
    config.shrink_delay = absl::Seconds(random() % 5);
    ASSERT_TRUE(config.Validate().ok());
    KvTargetPolicy policy(config);
    absl::Time now = kStart;
    for (int i = 0; i < 200; ++i) {
      KvDemand demand;
      demand.wanted = random() % 70;
      demand.needed = random() % (demand.wanted + 1);
      now += absl::Milliseconds(random() % 2000);
      const auto target = policy.Update(demand, now);
      ASSERT_LE(target.needed_slabs, target.target_slabs);
      ASSERT_LE(target.target_slabs, config.max_slabs);
      ASSERT_GE(target.target_slabs, std::min(demand.wanted, config.max_slabs));
      ASSERT_EQ(target.needed_slabs, std::min(demand.needed, config.max_slabs));
    }
  }
}

TEST(KvTargetPolicy, MarksMustBeOrdered) {
  KvTargetPolicy::Config config = TestConfig();
  EXPECT_TRUE(config.Validate().ok());
  config.low_water_slabs = 9;
  EXPECT_EQ(config.Validate().code(), absl::StatusCode::kInvalidArgument);
  config.low_water_slabs = -1;
  EXPECT_FALSE(config.Validate().ok());
  config = TestConfig();
  config.shrink_delay = absl::Seconds(-1);
  EXPECT_FALSE(config.Validate().ok());
}

}  // namespace
}  // namespace palimpsest
