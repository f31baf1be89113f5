#include "common/rotation.h"

#include <algorithm>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST(EvenRotationTest, GapsDifferByAtMostOneAlsoAroundTheEnd) {
  for (int32_t layers = 2; layers <= 80; ++layers) {
    for (int32_t slots = 1; slots <= kMaxSlots; ++slots) {
      for (int32_t freed = 1; freed + slots <= layers; ++freed) {
        const Rotation rotation = EvenRotation(1, layers, freed, slots);
        ASSERT_EQ(rotation.freed(), freed);
        ASSERT_TRUE(ValidateRotation(rotation, layers + 1).ok());
        int32_t least = layers;
        int32_t most = 0;
        for (size_t i = 0; i < rotation.stages.size(); ++i) {
          const int32_t next =
              i + 1 < rotation.stages.size() ? rotation.stages[i + 1] : rotation.stages[0] + layers;
          least = std::min(least, next - rotation.stages[i]);
          most = std::max(most, next - rotation.stages[i]);
        }
        EXPECT_LE(most - least, 1) << layers << " layers, " << freed << " freed, " << slots;
      }
    }
  }
}

TEST(EvenRotationTest, NothingFreedMeansNothingRotates) {
  EXPECT_EQ(EvenRotation(1, 32, 0, 2), Rotation());
}

TEST(ValidateRotationTest, RefusesWhatWorkersCouldNotMap) {
  EXPECT_TRUE(ValidateRotation({}, 4).ok());
  EXPECT_TRUE(ValidateRotation({{1, 3}, 1}, 4).ok());
  for (const Rotation& bad :
       {Rotation{{}, 1}, Rotation{{1, 3}, 0}, Rotation{{1, 3}, 2}, Rotation{{1, 2, 3}, 3},
        Rotation{{3, 1}, 1}, Rotation{{1, 1}, 1}, Rotation{{-1, 1}, 1}, Rotation{{1, 4}, 1}}) {
    EXPECT_FALSE(ValidateRotation(bad, 4).ok());
  }
}

}  // namespace
}  // namespace palimpsest
