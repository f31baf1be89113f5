#include "worker/core/tier_one_parts.h"

#include <cstdint>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/core/tier_one_parts_fixture.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Pair;
using ::testing::SizeIs;

using Demotion = TierOneParts::Demotion;

// Blocks `first` to `last` of sequence `number`, which shares no block with others.
BlockChain Sequence(uint64_t number, uint64_t blocks, uint64_t first = 0) {
  std::vector<BlockKey> keys;
  for (uint64_t i = first; i < blocks; ++i) keys.push_back({number, i});
  return Chain(first == 0 ? kRoot : BlockKey{number, first - 1}, std::move(keys));
}

void CameAll(TierOneParts& parts, const BlockChain& chain, int32_t groups) {
  for (const BlockKey& key : chain.keys) {
    for (int32_t group = 0; group < groups; ++group) parts.Came(key, group);
  }
}

// A request that runs from one time to another, for which all is stored.
void Use(TierOneParts& parts, uint64_t request, const BlockChain& chain, int64_t ends,
         int32_t groups = 2) {
  parts.Begin(request, chain);
  CameAll(parts, chain, groups);
  parts.End(request, At(ends));
}

// Sequence and group of each, in order.
std::vector<std::pair<uint64_t, int32_t>> Names(const std::vector<Demotion>& demotions) {
  std::vector<std::pair<uint64_t, int32_t>> names;
  for (const Demotion& demotion : demotions) {
    names.emplace_back(demotion.chain.keys.back().high, demotion.group);
  }
  return names;
}

TEST(TierOneParts, NothingLeavesAsLongAsThereIsRoom) {
  TierOneParts parts(Options(2, 8), Mass({0.1f, 0.9f}));
  Use(parts, 1, Sequence(1, 4), 10);
  EXPECT_EQ(parts.parts(), 8);
  EXPECT_THAT(parts.TakeDemotions(nullptr), IsEmpty());
  Use(parts, 2, Sequence(2, 1), 11);
  const auto demotions = parts.TakeDemotions(nullptr);
  EXPECT_THAT(Names(demotions), ElementsAre(Pair(1, 0)));
  EXPECT_EQ(demotions[0].first, 2) << "the last two of four";
  EXPECT_EQ(demotions[0].chain.keys, Sequence(1, 4).keys);
  EXPECT_EQ(demotions[0].chain.tokens, Sequence(1, 4).tokens);
  EXPECT_EQ(demotions[0].chain.parent, kRoot);
  EXPECT_EQ(parts.parts(), 8);
  EXPECT_THAT(parts.TakeDemotions(nullptr), IsEmpty());
}

// Two sequences; which of their four extents is worth least, and so on.
TEST(TierOneParts, MassRecencyAndDistanceDecide) {
  struct Case {
    const char* what;
    std::vector<float> masses;
    uint64_t old_blocks, fresh_blocks;
    int64_t old_ends, fresh_ends;
    std::vector<std::pair<uint64_t, int32_t>> order;  // 1: old, 2: fresh
  };
  // Half-lives are of 60 seconds, the scale is 4096 tokens or 256 blocks.
  const Case cases[] = {
      {"a hot head of an old block stays longer than a cold one of a fresh block",
       {0.01f, 0.9f},
       2,
       2,
       0,
       60,
       {{1, 0}, {2, 0}, {1, 1}, {2, 1}}},
      {"until it is old enough", {0.3f, 0.9f}, 2, 2, 0, 120, {{1, 0}, {1, 1}, {2, 0}, {2, 1}}},
      {"of equal heads the one that idles longer",
       {0.5f, 0.5f},
       2,
       2,
       0,
       1,
       {{1, 0}, {1, 1}, {2, 0}, {2, 1}}},
      {"of blocks that are as old, those far from their sequence's end",
       {0.5f, 0.6f},
       400,
       2,
       60,
       60,
       {{1, 0}, {1, 1}, {2, 0}, {2, 1}}},
      {"a long sequence before a short one that idles for somewhat longer",
       {0.8f, 0.9f},
       2,
       1024,
       0,
       30,
       {{2, 0}, {2, 1}, {1, 0}, {1, 1}}},
      {"heads without mass are still ordered",
       {0.0f, 0.0f},
       2,
       2,
       0,
       60,
       {{1, 0}, {1, 1}, {2, 0}, {2, 1}}},
  };
  for (const Case& c : cases) {
    TierOneParts parts(Options(2, 0), Mass(c.masses));
    parts.Begin(1, Sequence(1, c.old_blocks));
    parts.Begin(2, Sequence(2, c.fresh_blocks));
    CameAll(parts, Sequence(1, c.old_blocks), 2);
    CameAll(parts, Sequence(2, c.fresh_blocks), 2);
    parts.End(1, At(c.old_ends));
    parts.End(2, At(c.fresh_ends));
    EXPECT_EQ(Names(parts.TakeDemotions(nullptr)), c.order) << c.what;
    EXPECT_EQ(parts.parts(), 0);
  }
}

TEST(TierOneParts, SampledMassesDecideOnceThereAreEnough) {
  const HeadMass few = Mass({0.9f, 0.1f}, TierOneParts::kEnoughSamples - 1);
  const HeadMass enough = Mass({0.9f, 0.1f}, TierOneParts::kEnoughSamples);
  const std::pair<const HeadMass*, int32_t> cases[] = {{nullptr, 0}, {&few, 0}, {&enough, 1}};
  for (const auto& [live, coldest] : cases) {
    TierOneParts parts(Options(2, 3), Mass({0.1f, 0.9f}));
    Use(parts, 1, Sequence(1, 2), 0);
    EXPECT_THAT(Names(parts.TakeDemotions(live)), ElementsAre(Pair(1, coldest)));
  }
}

TEST(TierOneParts, MassOfAGroupIsTheMeanOfItsHeads) {
  TierOneParts::Options options = Options(2, 3);
  options.groups = {{0, 3}, {1, 2}};
  TierOneParts parts(std::move(options), Mass({0.9f, 0.2f, 0.3f, 0.0f}));
  Use(parts, 1, Sequence(1, 2), 0);
  EXPECT_THAT(Names(parts.TakeDemotions(nullptr)), ElementsAre(Pair(1, 1)));
}

TEST(TierOneParts, WhatIsUsedStaysUntilItsLastRequestEnds) {
  TierOneParts parts(Options(2, 0), Mass({0.1f, 0.9f}));
  parts.Begin(1, Sequence(1, 3));
  CameAll(parts, Sequence(1, 3), 2);
  EXPECT_THAT(parts.TakeDemotions(nullptr), IsEmpty());
  parts.Begin(2, Sequence(1, 2));
  parts.End(1, At(0));
  const auto demotions = parts.TakeDemotions(nullptr);
  ASSERT_THAT(demotions, SizeIs(2));
  EXPECT_EQ(demotions[0].first, 2) << "the third block alone";
  EXPECT_EQ(parts.parts(), 4);
  // Used again, and it comes back.
  parts.Begin(3, Sequence(1, 3));
  parts.Came({1, 2}, 0);
  parts.End(2, At(1));
  EXPECT_THAT(parts.TakeDemotions(nullptr), IsEmpty());
  parts.End(3, At(2));
  parts.End(3, At(2));
  EXPECT_THAT(Names(parts.TakeDemotions(nullptr)), ElementsAre(Pair(1, 0), Pair(1, 1)));
  EXPECT_EQ(parts.parts(), 0);
}

TEST(TierOneParts, OutputFollowsThePromptAlsoOfRequestsThatAreNotKnown) {
  TierOneParts parts(Options(1, 0), Mass({0.5f}));
  parts.Begin(1, Sequence(1, 2));
  parts.Extend(1, Sequence(1, 4, 2), At(0));
  parts.Extend(1, Sequence(1, 3, 2), At(0));
  EXPECT_EQ(parts.known_blocks(), 4u);
  CameAll(parts, Sequence(1, 4), 1);
  EXPECT_THAT(parts.TakeDemotions(nullptr), IsEmpty());
  parts.End(1, At(1));
  EXPECT_EQ(parts.TakeDemotions(nullptr).at(0).chain.keys, Sequence(1, 4).keys);
  // Of a request that was not told of, or that has ended.
  parts.Extend(1, Sequence(1, 6, 4), At(2));
  parts.Extend(0, Sequence(2, 2), At(3));
  CameAll(parts, Sequence(1, 6, 4), 1);
  CameAll(parts, Sequence(2, 2), 1);
  const auto demotions = parts.TakeDemotions(nullptr);
  EXPECT_THAT(Names(demotions), ElementsAre(Pair(1, 0), Pair(2, 0)));
  EXPECT_EQ(demotions[0].first, 4);
  EXPECT_EQ(demotions[0].chain.keys, Sequence(1, 6).keys) << "from the first block on";
  // What hangs on a block that is not known has no beginning, and another's key means nothing.
  parts.Extend(0, Sequence(3, 6, 4), At(4));
  parts.Begin(4, Chain(kRoot, {{1, 1}}));
  parts.Begin(5, Chain({8, 8}, {{9, 0}}));
  EXPECT_EQ(parts.known_blocks(), 8u);
}

TEST(TierOneParts, PartsOnWhichOthersHangWaitForThem) {
  TierOneParts parts(Options(1, 0), Mass({0.5f}));
  Use(parts, 1, Sequence(1, 2), 0, 1);
  // A branch behind the first block, which idles for longer than the path that it leaves.
  const BlockChain branch = Chain(kRoot, {{1, 0}, {2, 0}});
  Use(parts, 2, branch, 1, 1);
  Use(parts, 3, Sequence(1, 2), 600, 1);
  const auto demotions = parts.TakeDemotions(nullptr);
  EXPECT_THAT(Names(demotions), ElementsAre(Pair(2, 0), Pair(1, 0)));
  EXPECT_EQ(demotions[0].first, 1);
  EXPECT_EQ(demotions[1].first, 0) << "both, as the branch has gone";
}

TEST(TierOneParts, BranchThatIsWorthMoreHoldsWhatItHangsOn) {
  TierOneParts parts(Options(1, 1), Mass({0.5f}));
  Use(parts, 1, Sequence(1, 4000), 0, 1);
  const BlockChain branch = Chain(kRoot, {{1, 0}, {2, 0}});
  Use(parts, 2, branch, 0, 1);
  parts.Begin(3, Sequence(1, 4000));
  parts.End(3, At(1));
  const auto demotions = parts.TakeDemotions(nullptr);
  // The long path is worth less, but its first block has the branch behind it.
  EXPECT_THAT(Names(demotions), ElementsAre(Pair(1, 0), Pair(2, 0)));
  EXPECT_EQ(demotions[0].first, 1);
  EXPECT_EQ(parts.parts(), 1);
}

TEST(TierOneParts, CallsNameABoundedNumber) {
  TierOneParts parts(Options(1, 0), Mass({0.5f}));
  for (uint64_t i = 1; i <= 100; ++i) Use(parts, i, Sequence(i, 1), static_cast<int64_t>(i), 1);
  EXPECT_THAT(parts.TakeDemotions(nullptr), SizeIs(TierOneParts::kMostDemotions));
  EXPECT_THAT(parts.TakeDemotions(nullptr), SizeIs(100 - TierOneParts::kMostDemotions));
  TierOneParts deep(Options(1, 0), Mass({0.5f}));
  Use(deep, 1, Sequence(1, TierOneParts::kMostPathBlocks + 5), 0, 1);
  EXPECT_EQ(deep.known_blocks(), TierOneParts::kMostPathBlocks);
}

TEST(TierOneParts, WhatIdlesLongestIsForgottenFirst) {
  TierOneParts::Options options = Options(2, 100);
  options.most_parts = 12;
  TierOneParts parts(options, Mass({0.1f, 0.9f}));
  Use(parts, 1, Sequence(1, 3), 0);
  Use(parts, 2, Sequence(2, 3), 1);
  EXPECT_EQ(parts.parts(), 12);
  parts.Begin(3, Sequence(3, 2));
  EXPECT_EQ(parts.known_blocks(), 6u);
  EXPECT_EQ(parts.parts(), 8) << "the last two of the first";
  // All that is left is used: there is no room for more.
  parts.Begin(1, Sequence(1, 1));
  parts.Begin(2, Sequence(2, 3));
  parts.Begin(4, Sequence(4, 2));
  EXPECT_EQ(parts.known_blocks(), 6u);
  parts.Came({4, 0}, 0);
  EXPECT_EQ(parts.parts(), 8);
  parts.End(4, At(2));
  parts.ForgetAll();
  EXPECT_EQ(parts.known_blocks(), 0u);
  EXPECT_EQ(parts.parts(), 0);
  parts.End(3, At(3));
  EXPECT_THAT(parts.TakeDemotions(nullptr), IsEmpty());
}

}  // namespace
}  // namespace palimpsest
