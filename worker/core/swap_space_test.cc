#include "worker/core/swap_space.h"

#include <map>
#include <random>
#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST(SwapSpace, GivesTheLowestFreeSlotsInOrder) {
  SwapSpace space(8);
  const auto first = *space.Allocate(5);
  EXPECT_EQ(first.front(), SwapSlot(0));
  EXPECT_EQ(first.back(), SwapSlot(4));
  space.Release(SwapSlot(1));
  space.Release(SwapSlot(2));
  EXPECT_EQ(*space.Allocate(3), (std::vector{SwapSlot(1), SwapSlot(2), SwapSlot(5)}));
}

TEST(SwapSpace, GivesAllOrNothing) {
  SwapSpace space(3);
  EXPECT_FALSE(space.Allocate(4).has_value());
  EXPECT_EQ(space.free(), 3);
  EXPECT_TRUE(space.Allocate(3).has_value());
  EXPECT_FALSE(space.Allocate(1).has_value());
  EXPECT_TRUE(space.Allocate(0).has_value());
}

TEST(SwapSpace, WithoutSlotsHasNothing) {
  SwapSpace space(0);
  EXPECT_FALSE(space.Allocate(1).has_value());
  EXPECT_TRUE(space.Allocate(0)->empty());
  space.CheckInvariants();
}

// Against a map of references.
TEST(SwapSpace, AgreesWithItsModel) {
  for (uint32_t seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&random](size_t n) { return static_cast<int32_t>(random() % n); };
    const int32_t slots = below(40);
    SwapSpace space(slots);
    std::map<SwapSlot, int32_t> model;
    const auto any = [&] { return std::next(model.begin(), below(model.size()))->first; };
    for (int step = 0; step < 300; ++step) {
      switch (below(4)) {
        case 0: {
          const int32_t count = below(8);
          const auto got = space.Allocate(count);
          ASSERT_EQ(got.has_value(), count <= slots - static_cast<int32_t>(model.size()));
          if (!got.has_value()) break;
          ASSERT_EQ(static_cast<int32_t>(got->size()), count);
          for (const SwapSlot slot : *got) {
            ASSERT_LT(slot.value(), static_cast<uint32_t>(slots));
            ASSERT_TRUE(model.emplace(slot, 1).second) << "given twice";
          }
          break;
        }
        case 1: {
          if (model.empty()) break;
          const SwapSlot slot = any();
          space.AddReference(slot);
          ++model[slot];
          break;
        }
        default: {
          if (model.empty()) break;
          const SwapSlot slot = any();
          space.Release(slot);
          if (--model[slot] == 0) model.erase(slot);
        }
      }
      ASSERT_EQ(space.used(), static_cast<int32_t>(model.size()));
      for (const auto& [slot, references] : model) ASSERT_EQ(space.references(slot), references);
      space.CheckInvariants();
    }
  }
}

}  // namespace
}  // namespace palimpsest
