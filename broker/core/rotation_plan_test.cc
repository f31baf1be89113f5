#include "broker/core/rotation_plan.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "broker/core/link_budget.h"
#include "broker/core/rotation_simulator.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr double kWhole[] = {1.0};

// 32 layers of 1 ms and 4 slabs each, copied in `copy_ms` with the whole link.
RotatingTenant Tenant(int32_t priority, double copy_ms, int32_t freed = 0, int32_t slots = 0) {
  return {.priority = priority,
          .whole_link = {.layers = 32,
                         .layer_bytes = Bytes(1'000'000),
                         .stage_slabs = 4,
                         .step_seconds = 0.032,
                         .outside_share = 0,
                         .link_bytes_per_second = 1e9 / copy_ms,
                         .cap_freed = 32},
          .freed = freed,
          .slots = slots,
          .link = 0};
}

std::string Text(const std::vector<RotationTake>& takes) {
  std::string text;
  for (const RotationTake& take : takes) {
    text += std::to_string(take.tenant) + ":" + std::to_string(take.choice.freed) + "/" +
            std::to_string(take.choice.slots) + "=" + std::to_string(take.slabs) + " ";
  }
  return text;
}

struct PlanCase {
  std::string rule;
  std::vector<RotatingTenant> tenants;
  std::vector<double> link_shares;
  SlotPreference slots;
  double headroom;
  int64_t need;
  // tenant:freed/slots=slabs
  std::string takes;
};

RotatingTenant Layers(RotatingTenant tenant, int32_t stage_slabs) {
  tenant.whole_link.stage_slabs = stage_slabs;
  return tenant;
}
RotatingTenant OnLink(RotatingTenant tenant, size_t link) {
  tenant.link = link;
  return tenant;
}
RotatingTenant Capped(RotatingTenant tenant, int32_t cap) {
  tenant.whole_link.cap_freed = cap;
  return tenant;
}

TEST(PlanRotationsTest, EachRule) {
  const SlotPreference any = SlotPreference::kAuto;
  const PlanCase cases[] = {
      {"nothing is needed", {Tenant(0, 0.1)}, {1.0}, any, 0.1, 0, ""},
      {"no more than is needed", {Tenant(0, 0.1)}, {1.0}, any, 0.1, 5, "0:2/1=8 "},
      {"one more than now", {Tenant(0, 0.1, 3, 1)}, {1.0}, any, 0.1, 4, "0:4/1=4 "},
      {"lower priority first", {Tenant(2, 0.1), Tenant(1, 0.1)}, {1.0}, any, 0.1, 8, "1:2/1=8 "},
      {"higher priority behind it",
       {Tenant(2, 1.0), Capped(Tenant(1, 1.0), 2)},
       {1.0},
       any,
       0.0,
       12,
       "0:1/1=4 1:2/1=8 "},
      {"equals take turns",
       {Tenant(0, 1.0), Tenant(0, 1.0)},
       {1.0},
       any,
       0.1,
       16,
       "0:2/1=8 1:2/1=8 "},
      {"the smallest excess among equals",
       {Layers(Tenant(0, 0.1), 9), Layers(Tenant(0, 1.0), 6)},
       {1.0},
       any,
       0.1,
       5,
       "1:1/1=6 "},
      {"the cap", {Capped(Tenant(0, 0.1), 3)}, {1.0}, any, 0.1, 100, "0:3/1=12 "},
      {"no further than copies are hidden", {Tenant(0, 8)}, {1.0}, any, 0.0, 100, "0:2/1=8 "},
      {"headroom", {Tenant(0, 8)}, {1.0}, any, 0.25, 100, "0:1/1=4 "},
      {"the share of the link", {Tenant(0, 8)}, {0.5}, any, 0.0, 100, ""},
      {"no link at all", {Tenant(0, 0.1)}, {0.0}, any, 0.0, 100, ""},
      // The first one's 2 layers need 8/9 of the link.
      {"the others' share of the link",
       {Tenant(0, 8, 2, 1), Tenant(0, 8)},
       {1.0},
       any,
       0.0,
       100,
       ""},
      {"a link of its own",
       {Tenant(0, 8, 2, 1), OnLink(Tenant(0, 8), 1)},
       {1.0, 1.0},
       any,
       0.0,
       100,
       "1:2/1=8 "},
      {"one slot when told so",
       {Tenant(0, 3.9)},
       {1.0},
       SlotPreference::kOne,
       0.0,
       100,
       "0:5/1=20 "},
      {"two slots where they free more", {Tenant(0, 3.9)}, {1.0}, any, 0.0, 100, "0:6/2=24 "},
  };
  for (const PlanCase& c : cases) {
    const RotationRules rules{.slots = c.slots, .headroom = c.headroom};
    EXPECT_EQ(Text(PlanRotations(c.tenants, c.link_shares, rules, c.need)), c.takes) << c.rule;
  }
}

struct ReversionCase {
  std::string rule;
  double copy_ms;
  int32_t cap;
  int32_t freed;
  int32_t slots;
  int64_t spare;
  ReversionReason reason;
  int32_t to;
};

TEST(ChooseReversionTest, EachRule) {
  const ReversionCase cases[] = {
      {"nothing to spare", 1, 32, 4, 1, 3, ReversionReason::kNone, 0},
      {"a layer that is paid for", 1, 32, 4, 1, 4, ReversionReason::kDemandFell, 3},
      {"as many as are paid for", 1, 32, 4, 1, 11, ReversionReason::kDemandFell, 2},
      {"all of them", 1, 32, 4, 1, 100, ReversionReason::kDemandFell, 0},
      // 7 ms for a copy with 3 freed, 9 ms with 2.
      {"copies became too slow", 7.5, 32, 3, 1, 0, ReversionReason::kTooSlow, 2},
      {"far too slow", 40, 32, 3, 1, 0, ReversionReason::kTooSlow, 0},
      {"the cap was lowered", 1, 2, 4, 1, 0, ReversionReason::kCap, 2},
      // Would not be taken with headroom (6.3 ms), but is kept.
      {"hysteresis", 6.9, 32, 3, 1, 0, ReversionReason::kNone, 0},
  };
  for (const ReversionCase& c : cases) {
    RotationCost cost = Tenant(0, c.copy_ms).whole_link;
    cost.cap_freed = c.cap;
    const Reversion reversion = ChooseReversion(cost, {.headroom = 0.1}, c.freed, c.slots, c.spare);
    EXPECT_EQ(ReversionReasonName(reversion.reason), ReversionReasonName(c.reason)) << c.rule;
    EXPECT_EQ(reversion.to.freed, c.to) << c.rule;
  }
}

TEST(ChooseReversionTest, GoesWithoutHeadroomWhereItHasNoneNow) {
  // 1 ms at most for a copy with 10 to 14 freed in one slot, of which headroom leaves 0.9 ms.
  const RotationCost cost = Tenant(0, 0.95).whole_link;
  const RotationRules rules{.slots = SlotPreference::kOne, .headroom = 0.1};
  const Reversion reversion = ChooseReversion(cost, rules, 12, 1, 4);
  EXPECT_EQ(reversion.reason, ReversionReason::kDemandFell);
  EXPECT_EQ(reversion.to.freed, 11);
}

TEST(ChooseReversionTest, UnknownNumbersTakeNothingAway) {
  RotationCost cost = Tenant(0, 1).whole_link;
  cost.step_seconds = 0;
  EXPECT_EQ(ChooseReversion(cost, {}, 4, 1, 0).reason, ReversionReason::kNone);
  EXPECT_EQ(ChooseReversion(cost, {}, 4, 1, 12).reason, ReversionReason::kNone);
  // With slabs for all of them nothing has to be known.
  EXPECT_EQ(ChooseReversion(cost, {}, 4, 1, 16).reason, ReversionReason::kDemandFell);
}

TEST(PersistenceTest, HoldsAfterTheDelayWithoutABreak) {
  const absl::Time start = absl::UnixEpoch();
  const absl::Duration delay = absl::Seconds(2);
  Persistence persistence;
  EXPECT_EQ(persistence.Due(delay), absl::InfiniteFuture());
  EXPECT_FALSE(persistence.Observe(true, start, delay));
  EXPECT_EQ(persistence.Due(delay), start + delay);
  EXPECT_FALSE(persistence.Observe(false, start + absl::Seconds(1), delay));
  EXPECT_FALSE(persistence.Observe(true, start + absl::Seconds(3), delay));
  EXPECT_FALSE(persistence.Observe(true, start + absl::Seconds(4), delay));
  EXPECT_TRUE(persistence.Observe(true, start + absl::Seconds(5), delay));
}

class RandomNode {
 public:
  explicit RandomNode(uint32_t seed) : random_(seed) {}

  int32_t Int(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(random_);
  }
  double Real(double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(random_);
  }

  void Fill() {
    tenants.clear();
    shares = {Real(0.3, 1.0), Real(0.0, 1.0)};
    rules.slots = static_cast<SlotPreference>(Int(0, 2));
    rules.headroom = Int(0, 1) == 0 ? 0.0 : Real(0.0, 0.5);
    need = Int(0, 400);
    const int32_t count = Int(1, 5);
    for (int32_t i = 0; i < count; ++i) {
      RotatingTenant tenant;
      tenant.priority = Int(0, 2);
      tenant.link = static_cast<size_t>(Int(0, 1));
      RotationCost& cost = tenant.whole_link;
      cost.layers = Int(3, 60);
      cost.stage_slabs = Int(1, 20);
      cost.layer_bytes = MiB(Int(1, 1000));
      cost.step_seconds = Real(1e-3, 0.5);
      cost.outside_share = Real(0.0, 0.4);
      const double copy = cost.step_seconds / cost.layers * std::exp(Real(-2.0, 3.0));
      cost.link_bytes_per_second = static_cast<double>(cost.layer_bytes.count()) / copy;
      cost.cap_freed = Int(0, cost.layers);
      tenants.push_back(tenant);
    }
    // Some rotate already: as a plan before may have left them.
    if (Int(0, 1) == 0) return;
    for (const RotationTake& take : PlanRotations(tenants, shares, rules, Int(0, 200))) {
      tenants[take.tenant].freed = take.choice.freed;
      tenants[take.tenant].slots = take.choice.slots;
    }
  }

  std::vector<RotatingTenant> tenants;
  std::vector<double> shares;
  RotationRules rules;
  int64_t need = 0;

 private:
  std::mt19937 random_;
};

void Apply(const std::vector<RotationTake>& takes, std::vector<RotatingTenant>& tenants) {
  for (const RotationTake& take : takes) {
    tenants[take.tenant].freed = take.choice.freed;
    tenants[take.tenant].slots = take.choice.slots;
  }
}

double Stalls(const RotatingTenant& tenant, double share, CopyOrder order) {
  const RotationCost& cost = tenant.whole_link;
  const SimulatedModel model{
      .layers = cost.layers,
      .layer_seconds = cost.step_seconds * (1 - cost.outside_share) / cost.layers,
      .outside_seconds = cost.step_seconds * cost.outside_share,
      .copy_seconds = CopySeconds(WithShare(cost, share))};
  return StalledSeconds(model, EvenRotation(0, cost.layers, tenant.freed, tenant.slots), order, 5);
}

TEST(PlanRotationsProperty, NoPlanStarvesATenantNorExceedsACap) {
  RandomNode node(7);
  int32_t planned = 0;
  for (int32_t round = 0; round < 250; ++round) {
    node.Fill();
    const std::vector<RotationTake> takes =
        PlanRotations(node.tenants, node.shares, node.rules, node.need);
    std::vector<RotatingTenant> after = node.tenants;
    Apply(takes, after);
    planned += static_cast<int32_t>(takes.size());
    std::vector<double> used(node.shares.size(), 0.0);
    for (size_t i = 0; i < after.size(); ++i) {
      const RotatingTenant& tenant = after[i];
      ASSERT_LE(tenant.freed, tenant.whole_link.cap_freed);
      ASSERT_GE(tenant.freed, node.tenants[i].freed);
      if (tenant.freed == 0) continue;
      ASSERT_LT(tenant.freed + tenant.slots, tenant.whole_link.layers);
      const double share = ShareNeeded(tenant.whole_link, tenant.freed, tenant.slots);
      used[tenant.link] += share;
      for (const CopyOrder order :
           {CopyOrder::kBySlotFree, CopyOrder::kByUse, CopyOrder::kFreeByUse}) {
        ASSERT_LE(Stalls(tenant, share, order), 1e-9 * tenant.whole_link.step_seconds);
      }
    }
    for (size_t link = 0; link < used.size(); ++link) {
      ASSERT_LE(used[link], node.shares[link] + 1e-9);
    }
  }
  EXPECT_GT(planned, 80);
}

TEST(PlanRotationsProperty, TakesEnoughWhereThereIsEnoughAndNoLayerTooMany) {
  RandomNode node(8);
  for (int32_t round = 0; round < 250; ++round) {
    node.Fill();
    const std::vector<RotationTake> takes =
        PlanRotations(node.tenants, node.shares, node.rules, node.need);
    int64_t gained = 0;
    for (const RotationTake& take : takes) gained += take.slabs;
    std::vector<RotatingTenant> after = node.tenants;
    Apply(takes, after);
    if (gained < node.need) {
      const std::vector<RotationTake> more = PlanRotations(after, node.shares, node.rules, 1);
      ASSERT_TRUE(more.empty()) << Text(more);
      continue;
    }
    // A tenant whose whole take could be left out would have been left out.
    for (const RotationTake& take : takes) ASSERT_LT(gained - take.slabs, node.need);
  }
}

TEST(PlanRotationsProperty, SameNodeSamePlan) {
  RandomNode a(9);
  RandomNode b(9);
  for (int32_t round = 0; round < 80; ++round) {
    a.Fill();
    b.Fill();
    ASSERT_EQ(Text(PlanRotations(a.tenants, a.shares, a.rules, a.need)),
              Text(PlanRotations(b.tenants, b.shares, b.rules, b.need)));
  }
}

TEST(ReversionProperty, WhatIsTakenWithHeadroomIsNotTooSlowWithinIt) {
  RandomNode node(10);
  for (int32_t round = 0; round < 150; ++round) {
    node.Fill();
    const RotationRules rules{.slots = SlotPreference::kAuto, .headroom = 0.2};
    for (const RotatingTenant& tenant : node.tenants) {
      const std::vector<RotationTake> takes =
          PlanRotations({RotatingTenant{.whole_link = tenant.whole_link}}, kWhole, rules, 1000);
      if (takes.empty()) continue;
      RotationCost wavering = tenant.whole_link;
      wavering.step_seconds *= node.Real(0.81, 1.5);
      EXPECT_EQ(
          ChooseReversion(wavering, rules, takes[0].choice.freed, takes[0].choice.slots, 0).reason,
          ReversionReason::kNone);
    }
  }
}

TEST(ReversionProperty, LeadsToLessThatOverlapsAndIsPaidFor) {
  RandomNode node(11);
  for (int32_t round = 0; round < 500; ++round) {
    node.Fill();
    const RotationCost& cost = node.tenants[0].whole_link;
    const int32_t freed = node.Int(1, cost.layers - 2);
    const int32_t slots = freed + 2 < cost.layers ? node.Int(1, 2) : 1;
    const int64_t spare = node.Int(0, 60);
    const Reversion reversion = ChooseReversion(cost, node.rules, freed, slots, spare);
    if (reversion.reason == ReversionReason::kNone) continue;
    ASSERT_LT(reversion.to.freed, freed);
    ASSERT_TRUE(Overlaps(cost, reversion.to.freed, reversion.to.slots));
    if (reversion.reason == ReversionReason::kDemandFell) {
      ASSERT_LE((freed - reversion.to.freed) * cost.stage_slabs, spare);
    }
  }
}

}  // namespace
}  // namespace palimpsest
