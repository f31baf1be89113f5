// What the directory ranks by: the tree of blocks, the ranking of a tier, worth and prices.
#include <algorithm>
#include <cmath>
#include <functional>
#include <memory>
#include <random>
#include <set>
#include <vector>

#include "broker/core/blocks/block_tree.h"
#include "broker/core/blocks/placement.h"
#include "broker/core/blocks/tier_rank.h"
#include "broker/core/cache/score_policies.h"
#include "broker/core/reuse/predictive_policy.h"
#include "gtest/gtest.h"

namespace palimpsest::blocks {
namespace {

TEST(BlockTree, ForgetsWhatNobodyRetainsFromTheLeavesOn) {
  BlockTree tree(2);
  const BlockHandle first = tree.Add({0, 1}, kNoBlock);
  const BlockHandle second = tree.Add({0, 2}, first);
  const BlockHandle third = tree.Add({0, 3}, second);
  const BlockHandle other = tree.Add({0, 4}, kNoBlock);
  tree.Retain(second);
  std::vector<BlockHandle> forgotten;
  const auto trim = [&] { tree.Trim([&](BlockHandle block) { forgotten.push_back(block); }); };
  trim();
  EXPECT_EQ(forgotten, std::vector<BlockHandle>{third});
  EXPECT_EQ(tree.position(second), 1);
  tree.Add({0, 5}, kNoBlock);
  trim();
  EXPECT_EQ(forgotten.back(), other);
  tree.Release(second);
  tree.Add({0, 6}, kNoBlock);
  trim();
  EXPECT_EQ(tree.size(), 2);
  EXPECT_EQ(tree.Find({0, 2}), kNoBlock);
  EXPECT_EQ(tree.Find({0, 1}), first) << "it was touched last, when nothing hung on it any more";
}

// Blocks come, go and are pinned at random, in holes and out of order. A rank's victims are those
// that brute force finds, and the policy, which asserts its owner's duties, has nothing to say.
void CompareWithBruteForce(uint64_t seed, std::unique_ptr<cache::EvictionPolicy> policy) {
  std::mt19937_64 random(seed);
  const auto roll = [&](uint64_t below) { return random() % below; };
  BlockTree tree(1 << 20);
  TierRank rank(tree, std::move(policy));
  std::vector<BlockHandle> blocks;
  std::set<BlockHandle> ranked;
  std::vector<uint32_t> pins;
  absl::Time now = absl::UnixEpoch();
  for (int i = 0; i < 150; ++i) {
    const BlockHandle parent = i < 4 ? kNoBlock : blocks[roll(static_cast<uint64_t>(i))];
    blocks.push_back(tree.Add({0, static_cast<uint64_t>(i)}, parent));
    const cache::RequestId request(static_cast<uint64_t>(i) + 1);
    rank.policy().OnRequest({.id = request, .arrival = now}, {.path = {&blocks.back(), 1}});
    rank.policy().OnRequestEnd({.id = request, .time = now});
    now += absl::Seconds(1);
  }
  pins.resize(blocks.size());
  const std::function<bool(BlockHandle)> any_below = [&](BlockHandle block) {
    for (BlockHandle child = tree.first_child(block); child != kNoBlock;
         child = tree.next_sibling(child)) {
      if (ranked.contains(child) || any_below(child)) return true;
    }
    return false;
  };
  for (int step = 0; step < 2000; ++step) {
    const BlockHandle block = blocks[roll(blocks.size())];
    if (!ranked.contains(block)) {
      rank.Insert(block);
      ranked.insert(block);
    } else if (roll(3) == 0) {
      rank.Remove(block);
      ranked.erase(block);
      pins[block.value()] = 0;
    } else if (roll(2) == 0) {
      rank.Pin(block);
      ++pins[block.value()];
    } else if (pins[block.value()] > 0) {
      rank.Unpin(block);
      --pins[block.value()];
    }
    size_t candidates = 0;
    for (const BlockHandle candidate : ranked) {
      candidates += pins[candidate.value()] == 0 && !any_below(candidate) ? 1 : 0;
    }
    ASSERT_EQ(rank.size(), ranked.size());
    ASSERT_EQ(rank.candidates(), candidates) << "step " << step;
    const auto victim = rank.ChooseVictim(now, kNoBlock, false);
    ASSERT_EQ(victim.has_value(), candidates > 0);
    if (victim.has_value()) {
      ASSERT_TRUE(ranked.contains(*victim) && pins[victim->value()] == 0 && !any_below(*victim));
    }
    if (step % 100 == 0) {
      ASSERT_EQ(rank.CheckConsistency(), absl::OkStatus());
    }
  }
}

TEST(TierRankProperty, VictimsAreThoseThatBruteForceFinds) {
  for (uint64_t seed = 0; seed < 3; ++seed) {
    CompareWithBruteForce(seed, std::make_unique<cache::LruPolicy>());
    CompareWithBruteForce(seed, std::make_unique<reuse::PredictivePolicy>());
  }
}

TEST(Placement, WorthIsWhatAReuseSavesLessTheMove) {
  const cache::Outlook outlook = {.reuse = 0.5, .hits_per_second = 0.01};
  PlacementCosts costs = {
      .otherwise = absl::Seconds(3), .load = absl::Seconds(1), .move = absl::Milliseconds(250)};
  EXPECT_DOUBLE_EQ(Worth(outlook, costs), 0.75);
  // Held for 50 s until it is used or given up.
  EXPECT_DOUBLE_EQ(WorthRate(outlook, costs, Bytes(100)), 0.75 / 50 / 100);
  costs.load = absl::Seconds(4);
  EXPECT_EQ(Worth(outlook, costs), 0);
  EXPECT_EQ(WorthRate({}, costs, Bytes(1)), 0);
}

TEST(TierPrice, FollowsWhatIsEvictedWithHysteresisAndFallsWithoutEvictions) {
  TierPrice price;
  absl::Time now = absl::UnixEpoch();
  EXPECT_EQ(price.At(now), 0);
  price.OnEvicted(8, now);
  EXPECT_EQ(price.At(now), 8);
  for (int i = 0; i < 4; ++i) price.OnEvicted(9, now);
  EXPECT_EQ(price.At(now), 8) << "inside the band";
  for (int i = 0; i < 100; ++i) price.OnEvicted(16, now);
  EXPECT_GT(price.At(now), 12);
  EXPECT_LE(price.At(now), 16);
  const double before = price.At(now);
  now += TierPrice::kHalfLife * 4;
  EXPECT_LT(price.At(now), before / 8);
}

TEST(LinkUse, IsTheShareOfTheLastMinuteThatLoadsTook) {
  LinkUse use;
  absl::Time now = absl::UnixEpoch();
  EXPECT_EQ(use.ShareAt(now), 0);
  for (int i = 0; i < 600; ++i) {
    use.OnLoad(absl::Milliseconds(250), now);
    now += absl::Seconds(1);
  }
  EXPECT_NEAR(use.ShareAt(now), 0.25, 0.01);
  EXPECT_NEAR(use.ShareAt(now + LinkUse::kMemory), 0.25 / std::exp(1), 0.01);
  use.OnLoad(absl::Hours(1), now);
  EXPECT_EQ(use.ShareAt(now), 1);
}

}  // namespace
}  // namespace palimpsest::blocks
