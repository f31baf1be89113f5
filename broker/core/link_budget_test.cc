#include "broker/core/link_budget.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "broker/core/rotation_plan.h"
#include "broker/core/rotation_simulator.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr double kNoLimit = std::numeric_limits<double>::infinity();

// 32 layers of 1 ms, copied in `copy_ms` with the whole link.
RotationCost Cost(double copy_ms) {
  return {.layers = 32,
          .layer_bytes = Bytes(1'000'000),
          .stage_slabs = 4,
          .step_seconds = 0.032,
          .outside_share = 0,
          .link_bytes_per_second = 1e9 / copy_ms,
          .cap_freed = 32};
}

TEST(LinkBudgetTest, WhatIsKeptForRestoresAndBlocks) {
  const LinkBudgetRules rules{.restore_share = 0.25, .most_block_share = 0.2};
  EXPECT_EQ(RotationShare({.bytes_per_second = 100}, rules), 1.0);
  EXPECT_EQ(RotationShare({.bytes_per_second = 100, .restores_expected = true}, rules), 0.75);
  EXPECT_DOUBLE_EQ(RotationShare({.bytes_per_second = 100, .block_bytes_per_second = 10}, rules),
                   0.9);
  EXPECT_DOUBLE_EQ(RotationShare({.bytes_per_second = 100, .block_bytes_per_second = 90}, rules),
                   0.8);
  EXPECT_DOUBLE_EQ(
      RotationShare(
          {.bytes_per_second = 100, .block_bytes_per_second = 90, .restores_expected = true},
          rules),
      0.55);
  EXPECT_EQ(RotationShare({.bytes_per_second = 1, .restores_expected = true},
                          {.restore_share = 2.0, .most_block_share = 0}),
            0.0);
}

TEST(LinkBudgetTest, AShareIsNeededExactlyWhereItSuffices) {
  const RotationCost whole = Cost(4.5);
  const double share = ShareNeeded(whole, 2, 1);
  EXPECT_NEAR(share, 0.5, 1e-12);
  EXPECT_TRUE(Overlaps(WithShare(whole, share * 1.0001), 2, 1));
  EXPECT_FALSE(Overlaps(WithShare(whole, share * 0.9999), 2, 1));
  EXPECT_EQ(ShareNeeded(whole, 0, 0), 0.0);
  EXPECT_GT(ShareNeeded(whole, 31, 1), 1.0);
}

TEST(LinkTrafficTest, FollowsTheRateOfACount) {
  LinkTraffic traffic;
  absl::Time now = absl::UnixEpoch();
  // What was counted before is of no time that is known.
  traffic.Observe(1'000'000'000, now);
  EXPECT_EQ(traffic.bytes_per_second(), 0.0);
  uint64_t total = 1'000'000'000;
  for (int i = 0; i < 100; ++i) {
    traffic.Observe(total += 50, now += absl::Milliseconds(100));
  }
  EXPECT_NEAR(traffic.bytes_per_second(), 500, 5);
  // Reports that come at other intervals tell the same.
  for (int i = 0; i < 10; ++i) traffic.Observe(total += 500, now += absl::Seconds(1));
  EXPECT_NEAR(traffic.bytes_per_second(), 500, 5);
  traffic.Observe(total += 500, now);
  EXPECT_NEAR(traffic.bytes_per_second(), 500, 5) << "no time has passed";
  for (int i = 0; i < 10; ++i) traffic.Observe(total, now += absl::Seconds(1));
  EXPECT_LT(traffic.bytes_per_second(), 10);
  traffic.Observe(7, now += absl::Seconds(1));
  EXPECT_LT(traffic.bytes_per_second(), 10) << "the count began anew";
}

struct LimitCase {
  std::string rule;
  std::vector<LinkUser> users;
  double link;
  std::vector<double> limits;
};

TEST(BackgroundLimitsTest, EachRule) {
  const LimitCase cases[] = {
      {"nothing rotates", {{.copies = true}, {.copies = true}}, 100, {kNoLimit, kNoLimit}},
      {"a link that is not known", {{.promised = 0.5}, {.copies = true}}, 0, {kNoLimit, kNoLimit}},
      {"what is not promised", {{.promised = 0.4}, {.copies = true}}, 100, {30, 60}},
      {"in equal parts",
       {{.promised = 0.4}, {.copies = true}, {.copies = true}},
       100,
       {20, 30, 30}},
      {"the promises of all",
       {{.promised = 0.2}, {.promised = 0.3, .copies = true}},
       100,
       {25, 50}},
      {"who rotates is held back, too", {{.promised = 0.4, .copies = true}}, 100, {60}},
      {"never less than the floor", {{.promised = 0.9}, {.copies = true}}, 100, {12.5, 25}},
      {"even if more is promised than there is",
       {{.promised = 1.0}, {.promised = 1.0}, {.copies = true}},
       100,
       {12.5, 12.5, 25}},
      {"deadlines of restores",
       {{.promised = 0.9}, {.copies = true, .least_bytes_per_second = 40}},
       100,
       {12.5, 40}},
  };
  for (const LimitCase& c : cases) {
    const std::vector<double> limits =
        BackgroundLimits(c.users, c.link, {.restore_share = 0.25, .most_block_share = 0.25});
    ASSERT_EQ(limits.size(), c.limits.size()) << c.rule;
    for (size_t i = 0; i < limits.size(); ++i) {
      if (std::isinf(c.limits[i])) {
        EXPECT_EQ(limits[i], c.limits[i]) << c.rule;
      } else {
        EXPECT_NEAR(limits[i], c.limits[i], 1e-9) << c.rule << ", worker " << i;
      }
    }
  }
}

class RandomLink {
 public:
  explicit RandomLink(uint32_t seed) : random_(seed) {}

  int32_t Int(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(random_);
  }
  double Real(double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(random_);
  }

  // Up to four tenants that rotate as a plan lets them, of a link of `rate`.
  std::vector<RotatingTenant> Rotating(double rate, double share, const RotationRules& rules) {
    std::vector<RotatingTenant> tenants(static_cast<size_t>(Int(1, 4)));
    for (RotatingTenant& tenant : tenants) {
      RotationCost& cost = tenant.whole_link;
      cost.layers = Int(3, 48);
      cost.stage_slabs = Int(1, 8);
      cost.layer_bytes = MiB(Int(1, 600));
      cost.link_bytes_per_second = rate;
      cost.outside_share = Real(0.0, 0.3);
      cost.step_seconds = CopySeconds(cost) * cost.layers * std::exp(Real(-2.0, 2.5));
      cost.cap_freed = cost.layers;
    }
    for (const RotationTake& take : PlanRotations(tenants, {share}, rules, Int(1, 200))) {
      tenants[take.tenant].freed = take.choice.freed;
      tenants[take.tenant].slots = take.choice.slots;
    }
    return tenants;
  }

 private:
  std::mt19937 random_;
};

double Stalls(const RotatingTenant& tenant, double share) {
  const RotationCost& cost = tenant.whole_link;
  const SimulatedModel model{
      .layers = cost.layers,
      .layer_seconds = cost.step_seconds * (1 - cost.outside_share) / cost.layers,
      .outside_seconds = cost.step_seconds * cost.outside_share,
      .copy_seconds = CopySeconds(WithShare(cost, share))};
  return StalledSeconds(model, EvenRotation(0, cost.layers, tenant.freed, tenant.slots),
                        CopyOrder::kBySlotFree, 4);
}

// Tenants rotate as they may while others restore and move blocks at their limits: nothing that
// rotates is late, and nobody waits for ever.
TEST(BackgroundLimitsProperty, NoRotatingLayerIsLateAndNothingStarves) {
  RandomLink link(21);
  const LinkBudgetRules rules;
  const RotationRules how;
  int rotating = 0;
  for (int round = 0; round < 400; ++round) {
    const double rate = link.Real(1e9, 60e9);
    const double blocks = link.Int(0, 1) == 0 ? 0.0 : link.Real(0.0, 0.5) * rate;
    const double share = RotationShare(
        {.bytes_per_second = rate, .block_bytes_per_second = blocks, .restores_expected = true},
        rules);
    const std::vector<RotatingTenant> tenants = link.Rotating(rate, share, how);
    std::vector<LinkUser> users;
    std::vector<double> needs;
    for (const RotatingTenant& tenant : tenants) {
      const double needed = ShareNeeded(tenant.whole_link, tenant.freed, tenant.slots);
      needs.push_back(needed);
      users.push_back({.promised = needed / (1.0 - how.headroom), .copies = link.Int(0, 2) == 0});
      rotating += tenant.freed > 0 ? 1 : 0;
    }
    for (int more = link.Int(0, 4); more > 0; --more) {
      users.push_back({.copies = link.Int(0, 1) == 0});
    }
    const std::vector<double> limits = BackgroundLimits(users, rate, rules);
    double background = 0;
    for (size_t i = 0; i < users.size(); ++i) {
      ASSERT_GE(limits[i], rules.restore_share * rate / static_cast<double>(users.size() + 1));
      if (users[i].copies && !std::isinf(limits[i])) background += limits[i] / rate;
    }
    double rest = 1.0 - background;
    for (const double needed : needs) rest -= needed;
    ASSERT_GE(rest, -1e-9);
    for (size_t i = 0; i < tenants.size(); ++i) {
      if (tenants[i].freed == 0) continue;
      ASSERT_LE(Stalls(tenants[i], needs[i]), 1e-9 * tenants[i].whole_link.step_seconds);
    }
  }
  EXPECT_GT(rotating, 300);
}

}  // namespace
}  // namespace palimpsest
