#include "broker/tier/extent_allocator.h"

#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST(ExtentAllocator, SmallestFittingHoleIsTaken) {
  ExtentAllocator allocator(100);
  for (const uint64_t count : {10, 5, 20, 5, 60}) ASSERT_TRUE(allocator.Allocate(count));
  EXPECT_FALSE(allocator.Allocate(1));
  allocator.Free({0, 10});
  allocator.Free({15, 20});
  EXPECT_EQ(allocator.largest_free(), 20u);
  EXPECT_EQ(allocator.Allocate(9), (Extent{0, 9}));
  EXPECT_EQ(allocator.Allocate(2), (Extent{15, 2}));
  EXPECT_FALSE(allocator.Allocate(19));
  EXPECT_EQ(allocator.free_units(), 19u);
}

TEST(ExtentAllocator, NeighboursMergeInAnyOrder) {
  ExtentAllocator allocator(9);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(allocator.Allocate(3));
  allocator.Free({0, 3});
  allocator.Free({6, 3});
  EXPECT_EQ(allocator.largest_free(), 3u);
  allocator.Free({3, 3});
  EXPECT_EQ(allocator.Allocate(9), (Extent{0, 9}));
}

TEST(ExtentAllocator, ClaimTakesFreeExtentsInsideAlone) {
  ExtentAllocator allocator(10);
  EXPECT_TRUE(allocator.Claim({3, 4}));
  EXPECT_FALSE(allocator.Claim({6, 2}));
  EXPECT_FALSE(allocator.Claim({2, 2}));
  EXPECT_FALSE(allocator.Claim({9, 2}));
  EXPECT_FALSE(allocator.Claim({8, UINT64_MAX}));
  EXPECT_FALSE(allocator.Claim({0, 0}));
  EXPECT_TRUE(allocator.Claim({7, 3}));
  EXPECT_EQ(allocator.free_units(), 3u);
}

TEST(ExtentAllocatorDeathTest, FreeOfWhatIsFreeAborts) {
  ExtentAllocator allocator(10);
  ASSERT_TRUE(allocator.Claim({2, 4}));
  EXPECT_DEATH(allocator.Free({2, 5}), "not in use");
  EXPECT_DEATH(allocator.Free({1, 2}), "not in use");
  EXPECT_DEATH(allocator.Free({8, 4}), "not in use");
}

// Beside a bitmap: what is free, that an extent is given only once, and that one is refused only if
// no run of free units is long enough.
TEST(ExtentAllocator, RandomActionsAgreeWithABitmap) {
  constexpr uint64_t kUnits = 200;
  std::mt19937_64 random(7);
  for (int round = 0; round < 40; ++round) {
    ExtentAllocator allocator(kUnits);
    std::vector<bool> used(kUnits);
    std::vector<Extent> extents;
    const auto mark = [&](Extent extent, bool value) {
      for (uint64_t i = 0; i < extent.count; ++i) {
        ASSERT_NE(used[extent.first + i], value);
        used[extent.first + i] = value;
      }
    };
    for (int i = 0; i < 1500; ++i) {
      uint64_t run = 0, longest = 0, free = 0;
      for (const bool unit : used) {
        run = unit ? 0 : run + 1;
        longest = std::max(longest, run);
        free += unit ? 0 : 1;
      }
      ASSERT_EQ(allocator.free_units(), free);
      ASSERT_EQ(allocator.largest_free(), longest);
      const uint64_t count = 1 + random() % (round % 2 == 0 ? 8 : 40);
      if (random() % 9 == 0) {
        const Extent wanted{random() % kUnits, count};
        bool all_free = wanted.first + count <= kUnits;
        for (uint64_t u = wanted.first; all_free && u < wanted.first + count; ++u) {
          all_free = !used[u];
        }
        ASSERT_EQ(allocator.Claim(wanted), all_free);
        if (!all_free) continue;
        mark(wanted, true);
        extents.push_back(wanted);
      } else if (extents.empty() || random() % 2 == 0) {
        const std::optional<Extent> extent = allocator.Allocate(count);
        ASSERT_EQ(extent.has_value(), count <= longest);
        if (!extent) continue;
        ASSERT_EQ(extent->count, count);
        mark(*extent, true);
        extents.push_back(*extent);
      } else {
        std::swap(extents[random() % extents.size()], extents.back());
        allocator.Free(extents.back());
        mark(extents.back(), false);
        extents.pop_back();
      }
    }
    for (const Extent extent : extents) allocator.Free(extent);
    EXPECT_EQ(allocator.Allocate(kUnits), (Extent{0, kUnits}));
  }
}

}  // namespace
}  // namespace palimpsest
