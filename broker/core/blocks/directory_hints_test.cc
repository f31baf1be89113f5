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
  const BlockHint hint = {.action = {.kind = CacheAction::Kind::kRetain,
                                     .until = now() + absl::Seconds(10),
                                     .half_life = absl::Seconds(4),
                                     .budget = kBlock * 4},
                          .ids = path};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 4);
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 1) << "half of T1 is five blocks";
  EXPECT_EQ(Counters(kArenaTier).retained, kBlock * 5);
  EXPECT_EQ(Counters(kArenaTier, kBerta).retained, Bytes(0));
  EXPECT_EQ(Counters(kNvme).retained, Bytes(0));
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
  EXPECT_EQ(Counters(kArenaTier).retained, kBlock * 2);
  others(2);
  EXPECT_EQ(Acquire(kOne, 2, path).blocks.size(), 2) << "the first half of four; of one, nothing";
  End(kOne, 2);
  store_->now += absl::Seconds(6);
  EXPECT_EQ(directory().Tick(now()), absl::InfiniteFuture());
  EXPECT_EQ(Counters(kArenaTier).retained, Bytes(0));
  others(3);
  EXPECT_EQ(Acquire(kOne, 3, path).blocks.size(), 0);
}

TEST_F(BlockDirectoryTest, APurgeLeavesNothingRetained) {
  Start(1);
  const auto path = Path(1, 3);
  Write(kOne, path);
  const BlockHint hint = {.action = {.kind = CacheAction::Kind::kRetain}, .ids = path};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 3);
  EXPECT_EQ(Counters(kArenaTier).retained, kBlock * 3);
  ASSERT_TRUE(directory().Purge(kAnna, now()).ok());
  EXPECT_EQ(Counters(kArenaTier).retained, Bytes(0));
  store_->PerformAll();
}

TEST_F(BlockDirectoryTest, DemotedBlocksGoBelowAndReleasedOnesGoEverywhere) {
  Start(1);
  Write(kOne, Path(1, 4));
  const auto path = Path(1, 4);
  BlockHint hint = {.action = {.kind = CacheAction::Kind::kDemote}, .ids = path, .first = 2};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 2);
  store_->PerformAll();
  EXPECT_EQ(store_->tiers[kNvme.value()].size(), 2);
  Acquire(kTwo, 1, Path(1, 1));
  hint = {.action = {.kind = CacheAction::Kind::kRelease}, .ids = path};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 3) << "but not what is in use";
  store_->PerformAll();
  EXPECT_TRUE(store_->tiers[kNvme.value()].empty());
  End(kTwo, 1);
  EXPECT_EQ(Acquire(kOne, 1, path).blocks.size(), 1);
}

TEST_F(BlockDirectoryTest, DemotedBlocksWaitForCopiesUnderWay) {
  DirectoryOptions options = Options();
  options.max_stores = 2;
  Start(1, options);
  const auto path = Path(1, 6);
  Write(kOne, path);
  const BlockHint hint = {.action = {.kind = CacheAction::Kind::kDemote}, .ids = path};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 6);
  Acquire(kTwo, 1, Path(1, 2));
  store_->PerformAll();
  EXPECT_EQ(store_->tiers[kNvme.value()].size(), 4) << "but not what is in use by then";
}

TEST_F(BlockDirectoryTest, PrefetchedBlocksAreThereWhenTheyAreAskedFor) {
  Start(1);
  PutBelow(Path(1, 3));
  const auto path = Path(1, 3);
  const BlockHint hint = {
      .action = {.kind = CacheAction::Kind::kPrefetch, .until = now() + absl::Seconds(1)},
      .ids = path};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 3);
  store_->PerformAll();
  EXPECT_EQ(Acquire(kOne, 1, path).blocks.size(), 3);
  EXPECT_EQ(directory().PrefetchesOf(kAnna).used, 3);
}

TEST_F(BlockDirectoryTest, AHigherPriorityTakesTheRetainedRoomOfALowerOne) {
  Start(1);
  const auto low = Path(1, 4), high = Path(2, 4);
  Write(kOne, low);
  Write(kTwo, high);
  BlockHint hint = {.action = {.kind = CacheAction::Kind::kRetain, .priority = 3}, .ids = low};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 4);
  hint.ids = high;
  EXPECT_EQ(*directory().Hint(kTwo, hint, now()), 1) << "equals take nothing from each other";
  hint.action.priority = 4;
  EXPECT_EQ(*directory().Hint(kTwo, hint, now()), 3);
  for (uint64_t i = 10; i < 14; ++i) {
    Write(kTwo, Path(i, 5));
    store_->PerformAll();
  }
  EXPECT_EQ(Acquire(kTwo, 1, high).blocks.size(), 4);
  EXPECT_EQ(Acquire(kOne, 1, low).blocks.size(), 1) << "the first one is the last to go";
  EXPECT_EQ(directory().CheckConsistency(), absl::OkStatus());
}

TEST_F(BlockDirectoryTest, AHintByConversationIsAboutWhereItsLastRequestEnded) {
  Start(1);
  const auto path = Path(1, 4);
  AcquireRequest request = {.request = 1, .conversation = cache::ConversationId(5)};
  request.ids = absl::MakeConstSpan(path).first(2);
  ASSERT_TRUE(directory().Acquire(kOne, request, now()).ok());
  Write(kOne, path, /*request=*/1);
  BlockHint hint = {.action = {.kind = CacheAction::Kind::kDemote},
                    .conversation = request.conversation};
  EXPECT_EQ(*directory().Hint(kTwo, hint, now()), 0) << "it runs";
  End(kOne, 1);
  hint.conversation = cache::ConversationId(6);
  EXPECT_EQ(*directory().Hint(kTwo, hint, now()), 0) << "nobody knows it";
  hint.conversation = request.conversation;
  EXPECT_EQ(*directory().Hint(kTwo, hint, now()), 4);
  store_->PerformAll();
  EXPECT_EQ(store_->tiers[kNvme.value()].size(), 4);
  // The next turn runs: the hint is about the one before.
  request.request = 2;
  request.ids = absl::MakeConstSpan(path).first(1);
  ASSERT_TRUE(directory().Acquire(kOne, request, now()).ok());
  hint.action.kind = CacheAction::Kind::kRelease;
  EXPECT_EQ(*directory().Hint(kTwo, hint, now()), 4) << "of the first one that is below";
  store_->PerformAll();
  EXPECT_TRUE(store_->tiers[kNvme.value()].empty());
}

TEST_F(BlockDirectoryTest, WhatIsToBecomeOfARequestsBlocksIsDoneWhenItEnds) {
  Start(1);
  const auto path = Path(1, 4);
  AcquireRequest request = {.request = 1, .ids = absl::MakeConstSpan(path).first(2)};
  ASSERT_TRUE(directory().Acquire(kOne, request, now()).ok());
  Write(kOne, path, /*request=*/1);
  RequestEnding ending = {.request = 1};
  ending.then = CacheAction{.kind = CacheAction::Kind::kRelease, .half_life = absl::ZeroDuration()};
  EXPECT_TRUE(absl::IsInvalidArgument(directory().EndRequest(kOne, ending, now())));
  ending.then = CacheAction{.kind = CacheAction::Kind::kRelease};
  EXPECT_TRUE(directory().EndRequest(kOne, ending, now()).ok());
  EXPECT_EQ(Acquire(kOne, 2, path).blocks.size(), 0);
}

TEST_F(BlockDirectoryTest, HintsOfOneTenantTakeNothingFromAnother) {
  DirectoryOptions options = Options();
  options.arena.max_chunks = 2;
  Start(1, options);
  constexpr SessionId kBertas(3);
  ASSERT_TRUE(directory().OpenSession(kBertas, kBerta, now()).ok());
  store_->PerformAll();
  const auto hers = Path(7, 4, "berta");
  ASSERT_EQ(Write(kBertas, hers), 4);
  // Anna retains all that she may, has more brought up than her T1 holds, and names Berta's blocks.
  Write(kOne, Path(1, 8));
  const auto mine = Path(1, 8);
  BlockHint hint = {.action = {.kind = CacheAction::Kind::kRetain}, .ids = mine};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 5);
  PutBelow(Path(2, 12));
  const auto below = Path(2, 12);
  hint = {.action = {.kind = CacheAction::Kind::kPrefetch, .until = now() + absl::Seconds(60)},
          .ids = below};
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 12);
  store_->PerformAll();
  EXPECT_LE(Counters(kArenaTier).used, kBlock * 10);
  hint = {.action = {.kind = CacheAction::Kind::kRelease}, .ids = hers};
  EXPECT_TRUE(absl::IsInvalidArgument(directory().Hint(kOne, hint, now()).status()));
  EXPECT_EQ(Acquire(kBertas, 1, hers).blocks.size(), 4);
  EXPECT_EQ(Counters(kArenaTier, kBerta).removed, 0);
}

}  // namespace
}  // namespace palimpsest::blocks
