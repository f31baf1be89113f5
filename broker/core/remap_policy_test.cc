#include "broker/core/remap_policy.h"

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "broker/core/rotation_simulator.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

// 32 layers of 1 ms each, copied in `copy_ms`.
RotationCost Copies(double copy_ms) {
  return {.layers = 32,
          .layer_bytes = Bytes(1'000'000),
          .stage_slabs = 4,
          .step_seconds = 0.032,
          .outside_share = 0,
          .link_bytes_per_second = 1e9 / copy_ms,
          .cap_freed = 32};
}

struct LongestCase {
  std::string rule;
  int32_t freed;
  int32_t slots;
  double longest_ms;
};

TEST(LongestCopyTest, EachConditionBindsWhereItShould) {
  const LongestCase cases[] = {
      // 4 of 32 rotate: 7 other layers for each.
      {"one slot: the copies fit the compute of the others", 3, 1, 7.0},
      // Gaps of 11, 11 and 10 layers: the others' 29 ms would allow 9.67 for each.
      {"one slot: each copy fits its own gap", 2, 1, 9.0},
      {"one slot: two rotate", 1, 1, 15.0},
      {"two slots: the copies fit the compute of all", 2, 2, 8.0},
      {"two slots: six rotate", 4, 2, 32.0 / 6},
      // Layers 5, 15 and 26: the last and the first of the next step have the same slot.
      {"two slots in an odd number: the slot that is not alternated", 1, 2, 10.0},
      {"some layer must not rotate", 31, 1, 0.0},
      {"nothing is freed", 0, 1, 0.0},
      {"no such slots", 3, 3, 0.0},
  };
  for (const LongestCase& c : cases) {
    EXPECT_NEAR(LongestCopySeconds(Copies(1), c.freed, c.slots) * 1e3, c.longest_ms, 1e-9)
        << c.rule;
  }
}

TEST(LongestCopyTest, TimeOutsideOfLayersHidesOnlyWhatIsCopiedThen) {
  RotationCost cost = Copies(1);
  cost.step_seconds = 0.040;
  cost.outside_share = 0.2;  // 8 ms, layers as before
  EXPECT_NEAR(LongestCopySeconds(cost, 3, 1), 0.007, 1e-9);
  EXPECT_NEAR(LongestCopySeconds(cost, 2, 2), 0.008, 1e-9);
}

struct MostCase {
  std::string rule;
  RotationCost cost;
  SlotPreference preference;
  int32_t freed;
  int32_t slots;
  RotationLimit limit;
};

RotationCost Capped(double copy_ms, int32_t cap) {
  RotationCost cost = Copies(copy_ms);
  cost.cap_freed = cap;
  return cost;
}

RotationCost Unmeasured(bool step, bool link) {
  RotationCost cost = Copies(1);
  if (step) cost.step_seconds = 0;
  if (link) cost.link_bytes_per_second = 0;
  return cost;
}

TEST(ChooseRotationTest, MostUnderEachRule) {
  const MostCase cases[] = {
      {"one slot on a tie", Copies(8), SlotPreference::kAuto, 2, 1, RotationLimit::kSum},
      {"two slots where they free more", Copies(3.9), SlotPreference::kAuto, 6, 2,
       RotationLimit::kSum},
      {"one slot when told so", Copies(3.9), SlotPreference::kOne, 5, 1, RotationLimit::kSum},
      {"two slots when told so", Copies(8), SlotPreference::kTwo, 2, 2, RotationLimit::kSum},
      {"the gap binds before the sum", Copies(9.5), SlotPreference::kOne, 1, 1,
       RotationLimit::kGap},
      {"cap", Capped(1, 4), SlotPreference::kAuto, 4, 1, RotationLimit::kCap},
      {"a cap of nothing", Capped(1, 0), SlotPreference::kAuto, 0, 0, RotationLimit::kCap},
      {"some layer stays", Copies(1e-6), SlotPreference::kTwo, 29, 2, RotationLimit::kLayers},
      {"neighbours cannot share one slot", Copies(1e-6), SlotPreference::kOne, 15, 1,
       RotationLimit::kGap},
      {"a slow link", Copies(17), SlotPreference::kAuto, 0, 0, RotationLimit::kSum},
      {"no step yet", Unmeasured(true, false), SlotPreference::kAuto, 0, 0,
       RotationLimit::kUnmeasured},
      {"no link yet", Unmeasured(false, true), SlotPreference::kAuto, 0, 0,
       RotationLimit::kUnmeasured},
  };
  for (const MostCase& c : cases) {
    const RotationChoice choice = ChooseRotation(c.cost, c.preference);
    EXPECT_EQ(choice.freed, c.freed) << c.rule;
    EXPECT_EQ(choice.slots, c.slots) << c.rule;
    EXPECT_EQ(RotationLimitName(choice.limit), RotationLimitName(c.limit)) << c.rule;
  }
}

TEST(ChooseRotationTest, FreesNoMoreThanWanted) {
  RotationChoice choice = ChooseRotation(Copies(3.9), SlotPreference::kAuto, 3);
  EXPECT_EQ(choice.freed, 3);
  EXPECT_EQ(choice.slots, 1);
  EXPECT_EQ(choice.limit, RotationLimit::kNone);
  EXPECT_NEAR(choice.copy_seconds, 0.0039, 1e-12);
  EXPECT_NEAR(choice.longest_copy_seconds, 0.007, 1e-12);
  EXPECT_EQ(ChooseRotation(Copies(3.9), SlotPreference::kAuto, 0).freed, 0);
  // Beyond what one slot can do.
  choice = ChooseRotation(Copies(3.9), SlotPreference::kAuto, 6);
  EXPECT_EQ(choice.freed, 6);
  EXPECT_EQ(choice.slots, 2);
  // Beyond what is possible: the most.
  EXPECT_EQ(ChooseRotation(Copies(3.9), SlotPreference::kAuto, 20).freed, 6);
}

TEST(ChooseRotationTest, SkipsNumbersInWhichSlotsTakeTurnsBadly) {
  // Seven of 20 layers in two slots: the last one and the first have the same slot, and two layers
  // between them.
  RotationCost cost = Copies(2.2);
  cost.layers = 20;
  cost.step_seconds = 0.020;
  ASSERT_TRUE(Overlaps(cost, 4, 2));
  ASSERT_FALSE(Overlaps(cost, 5, 2));
  ASSERT_TRUE(Overlaps(cost, 6, 2));
  EXPECT_EQ(LeastFreed(cost, 2, 5), 6);
  EXPECT_EQ(ChooseRotation(cost, SlotPreference::kTwo, 5).freed, 6);
}

TEST(BindingStepTest, TheShortestPhaseThatCounts) {
  EXPECT_EQ(BindingStepSeconds({}), 0);
  EXPECT_EQ(
      BindingStepSeconds({.decode_seconds = 0.02, .prefill_seconds = 0.2, .prefill_share = 0.3}),
      0.02);
  EXPECT_EQ(
      BindingStepSeconds({.decode_seconds = 0.03, .prefill_seconds = 0.01, .prefill_share = 0.3}),
      0.01);
  // Prompts alone: decodes are too rare to count.
  EXPECT_EQ(
      BindingStepSeconds({.decode_seconds = 0.02, .prefill_seconds = 0.2, .prefill_share = 0.97}),
      0.2);
  EXPECT_EQ(
      BindingStepSeconds({.decode_seconds = 0.03, .prefill_seconds = 0.01, .prefill_share = 0.01}),
      0.03);
  // The phase that counts was not measured.
  EXPECT_EQ(BindingStepSeconds({.decode_seconds = 0, .prefill_seconds = 0.2, .prefill_share = 0}),
            0);
}

TEST(ChooseRotationTest, TheSlowestRankBindsForAllInLockstep) {
  // A slab spans the ranks: what is chosen with the slowest link is hidden on every other.
  const RotationChoice choice = ChooseRotation(Copies(8), SlotPreference::kAuto);
  for (const double other_rank_ms : {8.0, 3.0, 1.0}) {
    EXPECT_TRUE(Overlaps(Copies(other_rank_ms), choice.freed, choice.slots));
  }
}

class RandomCosts {
 public:
  RotationCost Next() {
    RotationCost cost;
    cost.layers = Int(2, 80);
    cost.stage_slabs = Int(1, 20);
    cost.layer_bytes = MiB(Int(1, 1000));
    cost.step_seconds = std::exp(Real(std::log(1e-3), std::log(1.0)));
    cost.outside_share = Int(0, 1) == 0 ? 0.0 : Real(0.0, 0.5);
    // So that a copy takes from a tenth of a layer's time to that of all layers.
    const double copy = cost.step_seconds / cost.layers *
                        std::exp(Real(std::log(0.1), std::log(1.0 * cost.layers)));
    cost.link_bytes_per_second = static_cast<double>(cost.layer_bytes.count()) / copy;
    cost.cap_freed = Int(0, cost.layers);
    return cost;
  }
  int32_t Int(int32_t least, int32_t most) {
    return std::uniform_int_distribution<int32_t>(least, most)(random_);
  }
  double Real(double least, double most) {
    return std::uniform_real_distribution<double>(least, most)(random_);
  }

 private:
  std::mt19937 random_{20261130};
};

double Stalls(const RotationCost& cost, int32_t freed, int32_t slots, double copy_seconds,
              int32_t steps) {
  const SimulatedModel model{
      .layers = cost.layers,
      .layer_seconds = cost.step_seconds * (1 - cost.outside_share) / cost.layers,
      .outside_seconds = cost.step_seconds * cost.outside_share,
      .copy_seconds = copy_seconds};
  const Rotation rotation = EvenRotation(0, cost.layers, freed, slots);
  return std::max({StalledSeconds(model, rotation, CopyOrder::kBySlotFree, steps),
                   StalledSeconds(model, rotation, CopyOrder::kByUse, steps),
                   StalledSeconds(model, rotation, CopyOrder::kFreeByUse, steps)});
}

TEST(RemapPolicyProperty, NoChoiceStallsNorExceedsTheCap) {
  RandomCosts costs;
  int32_t rotating = 0;
  for (int32_t i = 0; i < 500; ++i) {
    const RotationCost cost = costs.Next();
    const auto preference = static_cast<SlotPreference>(costs.Int(0, 2));
    const RotationChoice choice = costs.Int(0, 1) == 0
                                      ? ChooseRotation(cost, preference)
                                      : ChooseRotation(cost, preference, costs.Int(0, cost.layers));
    ASSERT_LE(choice.freed, cost.cap_freed);
    ASSERT_EQ(choice.freed == 0, choice.slots == 0);
    if (choice.freed == 0) continue;
    ++rotating;
    ASSERT_LT(choice.freed + choice.slots, cost.layers);
    ASSERT_LE(Stalls(cost, choice.freed, choice.slots, choice.copy_seconds, 5),
              1e-9 * cost.step_seconds)
        << cost.layers << " layers, " << choice.freed << " freed in " << choice.slots << " slots";
  }
  EXPECT_GT(rotating, 150);
}

TEST(RemapPolicyProperty, TheLongestCopyIsExact) {
  // Enough for a link that is a twentieth too slow to fall behind.
  constexpr int32_t kSteps = 60;
  RandomCosts costs;
  for (int32_t i = 0; i < 150; ++i) {
    RotationCost cost = costs.Next();
    cost.outside_share = 0;
    const int32_t slots = costs.Int(1, 2);
    if (cost.layers < slots + 2) continue;
    const int32_t freed = costs.Int(1, cost.layers - slots - 1);
    const double longest = LongestCopySeconds(cost, freed, slots);
    ASSERT_LE(Stalls(cost, freed, slots, longest, 5), 1e-9 * cost.step_seconds);
    ASSERT_GT(Stalls(cost, freed, slots, longest * 1.05 + 1e-6 * cost.step_seconds, kSteps), 0.0)
        << cost.layers << " layers, " << freed << " freed in " << slots << " slots";
  }
}

TEST(RemapPolicyProperty, MoreLinkAndLongerStepsNeverFreeLess) {
  RandomCosts costs;
  for (int32_t i = 0; i < 300; ++i) {
    const RotationCost cost = costs.Next();
    RotationCost faster = cost;
    faster.link_bytes_per_second *= costs.Real(1.0, 3.0);
    RotationCost slower_steps = cost;
    slower_steps.step_seconds *= costs.Real(1.0, 3.0);
    RotationCost higher_cap = cost;
    higher_cap.cap_freed += costs.Int(0, 5);
    for (int32_t slots = 1; slots <= kMaxSlots; ++slots) {
      const int32_t freed = MostFreed(cost, slots);
      for (const RotationCost& better : {faster, slower_steps, higher_cap}) {
        ASSERT_GE(MostFreed(better, slots), freed);
      }
    }
  }
}

TEST(RemapPolicyProperty, SameNumbersSameChoice) {
  RandomCosts first;
  RandomCosts second;
  for (int32_t i = 0; i < 100; ++i) {
    const RotationChoice a = ChooseRotation(first.Next(), SlotPreference::kAuto);
    const RotationChoice b = ChooseRotation(second.Next(), SlotPreference::kAuto);
    ASSERT_EQ(a.freed, b.freed);
    ASSERT_EQ(a.slots, b.slots);
    ASSERT_EQ(a.longest_copy_seconds, b.longest_copy_seconds);
  }
}

}  // namespace
}  // namespace palimpsest
