// What a GroupedBlockStore sends below tier 1.
#include <cstdint>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "worker/blocks/grouped_block_store_fixture.h"

namespace palimpsest {
namespace {

// The parts of a group.
std::vector<BlockKey> PartsOf(const BlockChain& chain, int32_t group) {
  std::vector<BlockKey> keys;
  for (const BlockKey& key : chain.keys) keys.push_back(HeadParts::KeyOf(key, group));
  return keys;
}

size_t Below(const AcquireAnswer& answer) {
  size_t below = 0;
  for (const LowerBlocks& run : answer.lower) below += static_cast<size_t>(run.blocks);
  return below;
}

TEST(GroupedBlockStore, EndsOfRequestsDemoteWhatIsWorthLeast) {
  Grouped grouped(Capacity(60), 7, 20);
  const BlockChain chain = Chain(2, 3);
  EXPECT_EQ(Check(grouped, chain, grouped.Get(chain, 7)), 0u);
  EXPECT_EQ(grouped.Put(chain, 7), 3u);
  EXPECT_TRUE(grouped.TakeDemoted().empty()) << "it runs";
  grouped.End(7);
  const std::vector<StoreRequestEnd>& ends = grouped.inner().ended_requests();
  ASSERT_EQ(ends.size(), 3u);
  for (size_t group = 0; group < ends.size(); ++group) {
    EXPECT_EQ(ends[group].request, 7 * 3 + group);
    EXPECT_FALSE(ends[group].then.has_value()) << "the client's alone";
  }
  auto demoted = grouped.TakeDemoted();
  ASSERT_EQ(demoted.size(), 1u);
  EXPECT_EQ(demoted[0].first.keys, PartsOf(chain, 0));
  EXPECT_EQ(demoted[0].first.parent, HeadParts::KeyOf(kRoot, 0));
  EXPECT_EQ(demoted[0].second, 1) << "two of nine parts";

  // What came up for the next one counts again.
  const AcquireAnswer answer = grouped.Get(chain, 8);
  EXPECT_EQ(Check(grouped, chain, answer), 1u);
  EXPECT_EQ(Below(answer), 2u);
  size_t found = 0;
  while (found < 3) found = Check(grouped, chain, grouped.Get(chain, 8, /*wait=*/true));
  grouped.End(8);
  demoted = grouped.TakeDemoted();
  ASSERT_EQ(demoted.size(), 1u);
  EXPECT_EQ(demoted[0].second, 1);

  // Of what is below by itself it hears from the answers.
  grouped.inner().Demote({HeadParts::KeyOf(kRoot, 1), PartsOf(chain, 1), chain.tokens}, 0);
  Check(grouped, chain, grouped.Get(chain, 9));
  grouped.Put(Chain(5, 1), 0);
  grouped.End(9);
  demoted = grouped.TakeDemoted();
  ASSERT_EQ(demoted.size(), 2u) << "of nine, as the first part of group 1 was not there";
  EXPECT_EQ(demoted[0].first.keys, PartsOf(Chain(2, 1), 0));
  EXPECT_EQ(demoted[1].first.keys, PartsOf(Chain(5, 1), 0));
}

TEST(GroupedBlockStore, SampledMassesAndIdleTimeDecide) {
  Grouped grouped(Capacity(60), 12, 20);
  const HeadMass live = SixHeads(/*reversed=*/true, TierOneParts::kEnoughSamples);
  grouped.SetLive(&live);
  const BlockChain chains[] = {Chain(2, 2), Chain(3, 2), Chain(4, 2)};
  for (uint64_t request = 1; request <= 3; ++request) {
    const BlockChain& chain = chains[request - 1];
    grouped.Get(chain, request);
    ASSERT_EQ(grouped.Put(chain, request), 2u);
    EXPECT_TRUE(grouped.TakeDemoted().empty());
    grouped.End(request);
    grouped.clock().Advance(absl::Minutes(10));
  }
  const auto demoted = grouped.TakeDemoted();
  ASSERT_EQ(demoted.size(), 3u);
  for (int32_t i = 0; i < 3; ++i) {
    EXPECT_EQ(demoted[static_cast<size_t>(i)].first.keys, PartsOf(chains[0], 2 - i))
        << "even the hottest heads of the oldest, the coldest by what was sampled first";
  }
}

TEST(GroupedBlockStore, WhatTheStoreLostIsNotDemoted) {
  Grouped grouped(Capacity(60), 0, 20);
  const BlockChain chain = Chain(2, 3);
  grouped.Get(chain, 7);
  grouped.Put(chain, 7);
  grouped.inner().Lose();
  grouped.End(7);
  EXPECT_TRUE(grouped.TakeDemoted().empty());
}

}  // namespace
}  // namespace palimpsest
