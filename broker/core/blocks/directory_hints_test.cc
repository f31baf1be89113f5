// What is fetched ahead, and what clients say.
#include <vector>

#include "broker/core/blocks/block_directory.h"
#include "broker/core/blocks/block_directory_fixture.h"
#include "gtest/gtest.h"

namespace palimpsest::blocks {
namespace {

TEST_F(BlockDirectoryTest, BlocksOfAConversationComeBackBeforeItIsExpectedToGoOn) {
  Start(1);
  PutBelow(Path(1, 3));
  const auto path = Path(1, 3);
  AcquireRequest request = {.request = 1, .conversation = cache::ConversationId(5)};
  request.ids = path;
  ASSERT_TRUE(directory().Acquire(kOne, request, now()).ok());
  ASSERT_TRUE(
      directory().EndRequest(kOne, {.request = 1, .expected_idle = absl::Seconds(16)}, now()).ok());
  store_->now += absl::Seconds(13);
  const absl::Time next = directory().Tick(now());
  store_->Collect();
  EXPECT_EQ(Pending<LoadBlock>(), 0) << "too early";
  EXPECT_EQ(next, now() + absl::Seconds(1));
  store_->now = next;
  directory().Tick(now());
  store_->PerformAll();
  EXPECT_EQ(directory().PrefetchesOf(kAnna).fetched, 3);
  request.request = 2;
  const auto reply = directory().Acquire(kOne, request, now());
  ASSERT_TRUE(reply.ok());
  EXPECT_EQ(reply->blocks.size(), 3);
  EXPECT_EQ(directory().PrefetchesOf(kAnna).used, 3);
  EXPECT_EQ(directory().PrefetchesOf(kAnna).wasted, 0);
}

TEST_F(BlockDirectoryTest, ReturnsOfToolCallsAreLearnedAndPreparedForWithinTheBudget) {
  DirectoryOptions options = Options();
  options.prefetch_share = 0.5;
  Start(1, options);
  uint64_t number = 0;
  const auto turn = [&](uint64_t conversation, const std::vector<BlockIdentity>& path) {
    AcquireRequest request = {.request = ++number,
                              .conversation = cache::ConversationId(conversation)};
    request.ids = path;
    ASSERT_TRUE(directory().Acquire(kOne, request, now()).ok());
    ASSERT_TRUE(directory()
                    .EndRequest(kOne, {.request = number, .how = cache::Ending::kToolCall}, now())
                    .ok());
    store_->PerformAll();
  };
  for (int i = 0; i < 20; ++i) {
    turn(7, {});
    store_->now += absl::Seconds(8);
  }
  PutBelow(Path(1, 2));
  // A quarter of it is Anna's: one block takes 1.016 s, and what is expected in about 6.4 s may
  // begin a second before.
  TierState slow = Serving();
  slow.load = {.latency = absl::Seconds(0.5), .bytes_per_second = 4096 * 4};
  directory().OnTierState(kNvme, slow, now());
  turn(100, Path(1, 2));
  const absl::Time end = now();
  store_->now = directory().Tick(now());
  EXPECT_GT(now(), end + absl::Seconds(3));
  EXPECT_LT(now(), end + absl::Seconds(8));
  directory().Tick(now());
  store_->Collect();
  EXPECT_EQ(Pending<LoadBlock>(), 0) << "it would be late";
  EXPECT_GT(directory().PrefetchesOf(kAnna).unaffordable, 0);
  directory().OnTierState(kNvme, Serving(), now());
  turn(101, Path(1, 2));
  store_->now = directory().Tick(now());
  directory().Tick(now());
  store_->Collect();
  EXPECT_EQ(Pending<LoadBlock>(), 2);
}

TEST_F(BlockDirectoryTest, RetainedBlocksStayUntilTheirTimeAndWithinTheirBudgets) {
  Start(1);
  Write(kOne, Path(1, 6));
  const auto path = Path(1, 6);
  BlockHint hint = {.kind = BlockHint::Kind::kRetain,
                    .ids = path,
                    .until = now() + absl::Seconds(10),
                    .half_life = absl::Seconds(4),
                    .budget = kBlock * 4};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 4);
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 1) << "half of T1 is five blocks";
  const auto others = [&](uint64_t name) {
    for (uint64_t i = 0; i < 4; ++i) {
      Write(kTwo, Path(name * 10 + i, 5));
      store_->PerformAll();
    }
  };
  others(1);
  EXPECT_EQ(Acquire(kOne, 1, path).blocks.size(), 5);
  End(kOne, 1);
  store_->now += absl::Seconds(4);
  directory().Tick(now());
  others(2);
  EXPECT_EQ(Acquire(kOne, 2, path).blocks.size(), 2) << "the first half of four; of one, nothing";
  End(kOne, 2);
  store_->now += absl::Seconds(6);
  EXPECT_EQ(directory().Tick(now()), absl::InfiniteFuture());
  others(3);
  EXPECT_EQ(Acquire(kOne, 3, path).blocks.size(), 0);
}

TEST_F(BlockDirectoryTest, DemotedBlocksGoBelowAndReleasedOnesGoEverywhere) {
  Start(1);
  Write(kOne, Path(1, 4));
  const auto path = Path(1, 4);
  BlockHint hint = {.kind = BlockHint::Kind::kDemote, .ids = path, .first = 2};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 2);
  store_->PerformAll();
  EXPECT_EQ(store_->tiers[kNvme.value()].size(), 2);
  Acquire(kTwo, 1, Path(1, 1));
  hint = {.kind = BlockHint::Kind::kRelease, .ids = path};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 3) << "but not what is in use";
  store_->PerformAll();
  EXPECT_TRUE(store_->tiers[kNvme.value()].empty());
  End(kTwo, 1);
  EXPECT_EQ(Acquire(kOne, 1, path).blocks.size(), 1);
}

TEST_F(BlockDirectoryTest, PrefetchedBlocksAreThereWhenTheyAreAskedFor) {
  Start(1);
  PutBelow(Path(1, 3));
  const auto path = Path(1, 3);
  const BlockHint hint = {
      .kind = BlockHint::Kind::kPrefetch, .ids = path, .until = now() + absl::Seconds(1)};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 3);
  store_->PerformAll();
  EXPECT_EQ(Acquire(kOne, 1, path).blocks.size(), 3);
  EXPECT_EQ(directory().PrefetchesOf(kAnna).used, 3);
}

}  // namespace
}  // namespace palimpsest::blocks
