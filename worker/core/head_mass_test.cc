#include "worker/core/head_mass.h"

#include <cmath>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Random = std::mt19937_64;

int64_t Between(Random& random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random);
}

HeadMass Mass(const HeadMassOptions& options) {
  auto mass = HeadMass::Create(options);
  EXPECT_TRUE(mass.ok()) << mass.status();
  return *std::move(mass);
}

HeadMass Sampled(const std::vector<float>& shares) {
  HeadMass mass = Mass({.layers = 1, .kv_heads = static_cast<int32_t>(shares.size())});
  EXPECT_TRUE(mass.Sample(shares).ok());
  return mass;
}

TEST(HeadMass, IsAnAverageThatForgets) {
  HeadMass mass = Mass({.layers = 1, .kv_heads = 2, .sample_weight = 0.25});
  EXPECT_EQ(mass.mass(0), 0);
  ASSERT_TRUE(mass.Sample({0.5f, 0.0f}).ok());
  EXPECT_EQ(mass.mass(0), 0.5) << "not pulled towards zero by what was not seen";
  ASSERT_TRUE(mass.Sample({0.5f, 1.0f}).ok());
  EXPECT_EQ(mass.mass(0), 0.5);
  EXPECT_EQ(mass.mass(1), 0.25);
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(mass.Sample({0.125f, 0.0f}).ok());
  EXPECT_NEAR(mass.mass(0), 0.125, 1e-9);
  EXPECT_EQ(mass.samples(), 202);
}

TEST(HeadMass, RefusesSamplesAsAWhole) {
  HeadMass mass = Sampled({0.5f, 0.25f});
  EXPECT_THAT(std::string(mass.Sample({0.5f}).message()), HasSubstr("expected 2, got 1"));
  for (const float wrong : {-0.1f, 1.1f, std::nanf(""), INFINITY}) {
    EXPECT_THAT(std::string(mass.Sample({0.0f, wrong}).message()), HasSubstr("0 to 1"));
  }
  EXPECT_EQ(mass.mass(0), 0.5);
  EXPECT_EQ(mass.samples(), 1);
}

TEST(HeadMass, RefusesOptionsThatMakeNoSense) {
  const HeadMassOptions good = {.layers = 2, .kv_heads = 2};
  const auto refusal = [&good](auto change) {
    HeadMassOptions options = good;
    change(options);
    return std::string(HeadMass::Create(options).status().message());
  };
  EXPECT_TRUE(HeadMass::Create(good).ok());
  EXPECT_THAT(refusal([](auto& o) { o.layers = 0; }), HasSubstr("layers"));
  EXPECT_THAT(refusal([](auto& o) { o.layers = 1 << 30; }), HasSubstr("layers"));
  EXPECT_THAT(refusal([](auto& o) { o.kv_heads = 1 << 30; }), HasSubstr("kv_heads"));
  EXPECT_THAT(refusal([](auto& o) { o.sample_weight = 0; }), HasSubstr("sample_weight"));
  EXPECT_THAT(refusal([](auto& o) { o.sample_weight = NAN; }), HasSubstr("sample_weight"));
}

TEST(GroupHeads, AreNeighboursInTheRanking) {
  const HeadMass mass = Sampled({0.5f, 0.1f, 0.9f, 0.1f, 0.3f});
  EXPECT_THAT(mass.Ranking(), ElementsAre(1, 3, 4, 0, 2));
  EXPECT_THAT(*GroupHeads(mass, 2), ElementsAre(ElementsAre(1, 3), ElementsAre(4, 0, 2)));
  EXPECT_THAT(*GroupHeads(mass, 1), ElementsAre(ElementsAre(1, 3, 4, 0, 2)));
  EXPECT_FALSE(GroupHeads(mass, 0).ok());
  EXPECT_FALSE(GroupHeads(mass, 6).ok());
  const HeadMass many = Mass({.layers = 10, .kv_heads = 10});
  EXPECT_TRUE(GroupHeads(many, kMostHeadGroups).ok());
  EXPECT_FALSE(GroupHeads(many, kMostHeadGroups + 1).ok());
}

double LogWorth(const HeadWorth& worth, double mass, absl::Duration idle, int64_t distance) {
  return HeadWorth::LogMass(mass) + worth.LogRecency(idle) + std::log2(worth.Nearness(distance));
}

TEST(HeadWorth, HalvesWithIdleTimeAndWithDistance) {
  const HeadWorth worth = {.half_life = absl::Seconds(10), .distance_scale = 1000};
  const double fresh = LogWorth(worth, 0.5, absl::ZeroDuration(), 0);
  EXPECT_DOUBLE_EQ(fresh, -1);
  EXPECT_DOUBLE_EQ(LogWorth(worth, 0.5, absl::Seconds(20), 0), fresh - 2);
  EXPECT_DOUBLE_EQ(LogWorth(worth, 0.5, absl::ZeroDuration(), 1000), fresh - 1);
  EXPECT_GT(LogWorth(worth, 0, absl::ZeroDuration(), 0), LogWorth(worth, 0, absl::Seconds(1), 0))
      << "what has no mass is still ordered";
}

// What idles together keeps its order, so that what is ordered once stays so.
TEST(HeadWorthProperty, TimeDoesNotReorderWhatStaysIdle) {
  Random random(12);
  const HeadWorth worth;
  std::uniform_real_distribution<double> share(0, 1);
  for (int round = 0; round < 10'000; ++round) {
    const double masses[] = {share(random), share(random)};
    const absl::Duration idle[] = {absl::Milliseconds(Between(random, 0, 1'000'000)),
                                   absl::Milliseconds(Between(random, 0, 1'000'000))};
    const int64_t distances[] = {Between(random, 0, 1 << 20), Between(random, 0, 1 << 20)};
    const absl::Duration later = absl::Seconds(Between(random, 1, 1'000'000));
    const auto difference = [&](absl::Duration wait) {
      return LogWorth(worth, masses[0], idle[0] + wait, distances[0]) -
             LogWorth(worth, masses[1], idle[1] + wait, distances[1]);
    };
    ASSERT_NEAR(difference(absl::ZeroDuration()), difference(later), 1e-6);
  }
}

}  // namespace
}  // namespace palimpsest
