// Who leaves T1 and comes back, and what happens on the way.
#include <vector>

#include "broker/core/blocks/block_directory.h"
#include "broker/core/blocks/block_directory_fixture.h"
#include "gtest/gtest.h"

namespace palimpsest::blocks {
namespace {

TEST_F(BlockDirectoryTest, OldestBlocksAreDemotedAheadOfNeedAndStayUntilTheirRoomIsNeeded) {
  Start(1);
  ASSERT_EQ(Write(kOne, Path(1, 9)), 9);
  // A fifth is to be free: one block more, the last of the sequence.
  ASSERT_EQ(Pending<StoreBlock>(), 1);
  store_->PerformAll();
  EXPECT_EQ(store_->tiers[kNvme.value()].size(), 1);
  EXPECT_TRUE(store_->tiers[kNvme.value()].contains(Id(1, 9).key));
  EXPECT_EQ(Acquire(kOne, 1, Path(1, 9)).blocks.size(), 9) << "it is still there";
  End(kOne, 1);
  ASSERT_EQ(Write(kOne, Path(2, 2)), 2);
  EXPECT_EQ(Acquire(kOne, 2, Path(1, 9)).blocks.size(), 8) << "its room was needed";
  store_->PerformAll();
  const TierCounters counters = Counters(kNvme);
  EXPECT_EQ(counters.demotions_done, counters.blocks);
  EXPECT_EQ(counters.demotions_failed, 0);
}

TEST_F(BlockDirectoryTest, BlockWithACopyBelowIsNotStoredAgain) {
  Start(1);
  PutBelow(Path(1, 1));
  ASSERT_TRUE(Acquire(kOne, 1, Path(1, 1), absl::Seconds(1)).wait.has_value());
  store_->PerformAll();
  End(kOne, 1);
  ASSERT_EQ(Write(kOne, Path(2, 8)), 8);
  EXPECT_EQ(Pending<StoreBlock>(), 0) << "the oldest one is below already";
  EXPECT_EQ(Write(kOne, Path(3, 2)), 2);
  EXPECT_EQ(Acquire(kOne, 2, Path(1, 1)).blocks.size(), 0);
}

TEST_F(BlockDirectoryTest, AllWhoWaitForABlockAreAnsweredByOneLoad) {
  Start(1);
  PutBelow(Path(1, 3));
  const AcquireReply asked = Acquire(kOne, 1, Path(1, 4));
  ASSERT_EQ(asked.elsewhere.size(), 1);
  EXPECT_EQ(asked.elsewhere[0].tier, kNvme);
  EXPECT_EQ(asked.elsewhere[0].blocks, 3);
  EXPECT_GT(asked.elsewhere[0].expected, absl::Milliseconds(1));
  EXPECT_LT(asked.elsewhere[0].expected, absl::Milliseconds(2));
  const auto one = Acquire(kOne, 1, Path(1, 4), absl::Seconds(1)).wait;
  const auto two = Acquire(kTwo, 1, Path(1, 2), absl::Seconds(1)).wait;
  ASSERT_TRUE(one.has_value() && two.has_value());
  EXPECT_EQ(Pending<LoadBlock>(), 3);
  store_->PerformAll();
  ASSERT_EQ(store_->answers.size(), 2);
  EXPECT_EQ(store_->answers[*one].blocks.size(), 3);
  EXPECT_EQ(store_->answers[*two].blocks.size(), 2);
  EXPECT_EQ(store_->answers[*two].blocks[1].checksum, 102);
  const TierCounters counters = Counters(kNvme);
  EXPECT_EQ(counters.promotions_done, 3);
  EXPECT_EQ(counters.hits, 3) << "of whoever was first";
  EXPECT_EQ(counters.promotions_wasted, 0);
}

TEST_F(BlockDirectoryTest, PromotionIntoAnEmptyArenaWaitsForItsChunk) {
  Start(1);
  PutBelow(Path(1, 2));
  ASSERT_TRUE(directory().Trim(kAnna, kArenaTier, Bytes(0), now()).ok());
  store_->Collect();
  store_->PerformAll();
  const auto wait = Acquire(kOne, 1, Path(1, 2), absl::Seconds(1)).wait;
  ASSERT_TRUE(wait.has_value());
  EXPECT_EQ(Pending<MakeChunk>(), 1);
  EXPECT_EQ(Pending<LoadBlock>(), 0);
  store_->PerformAll();
  EXPECT_EQ(store_->answers[*wait].blocks.size(), 2);
  EXPECT_EQ(Refused(Counters(kNvme), Refusal::kNoRoom), 0);
}

TEST_F(BlockDirectoryTest, PromotionEndsWhenThereIsNoMemoryForItsChunk) {
  Start(1);
  PutBelow(Path(1, 2));
  ASSERT_TRUE(directory().Trim(kAnna, kArenaTier, Bytes(0), now()).ok());
  store_->Collect();
  store_->PerformAll();
  const auto wait = Acquire(kOne, 1, Path(1, 2), absl::Seconds(1)).wait;
  ASSERT_TRUE(wait.has_value());
  ASSERT_EQ(Pending<MakeChunk>(), 1);
  const ArenaChunkId chunk = std::get<MakeChunk>(store_->pending.front()).chunk;
  store_->pending.clear();
  directory().OnChunkMade(chunk, absl::ResourceExhaustedError("injected"), now());
  store_->Collect();
  ASSERT_TRUE(store_->answers.contains(*wait));
  EXPECT_TRUE(store_->answers[*wait].blocks.empty());
  EXPECT_EQ(Refused(Counters(kNvme), Refusal::kNoRoom), 2);
}

TEST_F(BlockDirectoryTest, DeadlineAnswersWithWhatIsThereAndWhatComesLaterStays) {
  Start(1);
  PutBelow(Path(1, 2));
  const auto wait = Acquire(kOne, 1, Path(1, 2), absl::Seconds(1)).wait;
  ASSERT_TRUE(wait.has_value());
  store_->Perform(0);
  EXPECT_TRUE(store_->answers.empty());
  store_->now += absl::Seconds(1);
  directory().Tick(now());
  store_->Collect();
  ASSERT_EQ(store_->answers.size(), 1);
  EXPECT_EQ(store_->answers[*wait].blocks.size(), 1);
  store_->PerformAll();
  EXPECT_EQ(Acquire(kOne, 2, Path(1, 2)).blocks.size(), 2);
}

TEST_F(BlockDirectoryTest, FailedOrWrongLoadIsAMiss) {
  for (const Fault fault : {Fault::kFailed, Fault::kLate, Fault::kMismatch}) {
    Start(1);
    PutBelow(Path(1, 2));
    const auto wait = Acquire(kOne, 1, Path(1, 2), absl::Seconds(1)).wait;
    ASSERT_TRUE(wait.has_value());
    store_->Perform(0, fault);
    ASSERT_EQ(store_->answers.size(), 1) << "nothing is waited for behind it";
    EXPECT_TRUE(store_->answers[*wait].blocks.empty());
    store_->PerformAll();
    EXPECT_EQ(Acquire(kOne, 2, Path(1, 2)).blocks.size(), 0);
    EXPECT_EQ(Counters(kNvme).promotions_failed, 1);
  }
}

TEST_F(BlockDirectoryTest, NothingIsPromotedThatWouldBeLate) {
  Start(1);
  TierState slow = Serving();
  slow.load.latency = absl::Seconds(2);
  directory().OnTierState(kNvme, slow, now());
  PutBelow(Path(1, 1));
  const AcquireReply reply = Acquire(kOne, 1, Path(1, 1), absl::Seconds(1));
  EXPECT_FALSE(reply.wait.has_value());
  EXPECT_EQ(Pending<LoadBlock>(), 0);
  EXPECT_EQ(Refused(Counters(kNvme), Refusal::kLate), 1);
}

TEST_F(BlockDirectoryTest, TierThatDoesNotServeIsLeftAlone) {
  Start(1);
  PutBelow(Path(1, 1));
  directory().OnTierState(kNvme, {}, now());
  const AcquireReply reply = Acquire(kOne, 1, Path(1, 1), absl::Seconds(1));
  EXPECT_FALSE(reply.wait.has_value());
  ASSERT_EQ(reply.elsewhere.size(), 1);
  EXPECT_EQ(reply.elsewhere[0].expected, absl::InfiniteDuration());
  EXPECT_EQ(Write(kOne, Path(2, 10)), 10);
  EXPECT_EQ(Write(kOne, Path(3, 5)), 5) << "the oldest ones are dropped";
  EXPECT_EQ(Pending<StoreBlock>() + Pending<LoadBlock>(), 0);
  EXPECT_GT(Refused(Counters(kNvme), Refusal::kBroken), 0);
}

TEST_F(BlockDirectoryTest, BlockThatIsComputedSoonerThanItIsLoadedGoesNowhere) {
  Start(1);
  ASSERT_TRUE(directory().SetRecompute(kAnna, {.first = absl::Microseconds(100)}).ok());
  ASSERT_EQ(Write(kOne, Path(1, 10)), 10);
  ASSERT_EQ(Write(kOne, Path(2, 5)), 5);
  EXPECT_EQ(Pending<StoreBlock>(), 0);
  EXPECT_GT(Refused(Counters(kNvme), Refusal::kWorthless), 0);
}

TEST_F(BlockDirectoryTest, RecomputingCostsMoreTheLaterABlockComes) {
  Start(1);
  ASSERT_TRUE(directory()
                  .SetRecompute(kAnna, {.first = absl::Microseconds(100),
                                        .per_position = absl::Milliseconds(1)})
                  .ok());
  ASSERT_EQ(Write(kOne, Path(1, 9)), 9);
  ASSERT_EQ(Pending<StoreBlock>(), 1);
  EXPECT_EQ(std::get<StoreBlock>(store_->pending[0]).record.id, Id(1, 9));
}

TEST_F(BlockDirectoryTest, SourceWithWrongBytesIsNotServedAgain) {
  Start(1);
  Write(kOne, Path(1, 9));
  ASSERT_EQ(Pending<StoreBlock>(), 1);
  store_->Perform(0, Fault::kMismatch);
  EXPECT_EQ(Acquire(kOne, 1, Path(1, 9)).blocks.size(), 8);
  EXPECT_EQ(Counters(kNvme).demotions_failed, 1);
}

TEST_F(BlockDirectoryTest, BlockThatAnotherNodeHasStoredIsThereAndNotThisNodesToAccountFor) {
  Start(1);
  Write(kOne, Path(1, 9));
  ASSERT_EQ(Pending<StoreBlock>(), 1);
  const TransferId transfer = std::get<StoreBlock>(store_->pending.front()).transfer;
  store_->pending.clear();
  directory().OnStoreDone(transfer, absl::AlreadyExistsError("node b has it"), now());
  store_->Collect();
  const TierCounters counters = Counters(kNvme);
  EXPECT_EQ(counters.demotions_done, 1);
  EXPECT_EQ(counters.demotions_failed, 0);
  EXPECT_EQ(counters.demoted_bytes, Bytes(0));
  EXPECT_EQ(counters.used, Bytes(0));
}

TEST_F(BlockDirectoryTest, PromotedBlockThatGoesUnusedIsWaste) {
  Start(1);
  PutBelow(Path(1, 1));
  AcquireRequest request = {.request = 1, .promote = true};
  const auto path = Path(1, 1);
  request.ids = path;
  ASSERT_TRUE(directory().Acquire(kOne, request, now()).ok());
  store_->PerformAll();
  EXPECT_EQ(Counters(kNvme).promotions_done, 1);
  for (uint64_t name = 2; name < 6; ++name) {
    Write(kOne, Path(name, 5));
    store_->PerformAll();
  }
  EXPECT_EQ(Counters(kNvme).promotions_wasted, 1);
  EXPECT_EQ(Counters(kNvme).wasted_bytes, kBlock);
}

TEST_F(BlockDirectoryTest, TierBelowKeepsToItsBudgetByWorth) {
  Start(1);
  ASSERT_TRUE(directory().SetBudget(kAnna, kNvme, kBlock * 10, now()).ok());
  for (uint64_t name = 1; name < 20; ++name) {
    Write(kOne, Path(name, 5));
    store_->PerformAll();
    ASSERT_LE(Counters(kNvme).used, kBlock * 10);
  }
  EXPECT_GT(Counters(kNvme).removed, 5);
  EXPECT_LE(store_->tiers[kNvme.value()].size(), 10);
  const auto trimmed = directory().Trim(kAnna, kNvme, kBlock * 2, now());
  ASSERT_TRUE(trimmed.ok());
  EXPECT_GT(trimmed->blocks, 0);
  store_->PerformAll();
  EXPECT_LE(Counters(kNvme).used, kBlock * 2);
}

TEST_F(BlockDirectoryTest, WithPredictionsATierThatEvictsHasAPrice) {
  policy_ = nullptr;
  Start(1);
  ASSERT_TRUE(directory().SetBudget(kAnna, kNvme, kBlock * 10, now()).ok());
  for (uint64_t name = 1; name < 30; ++name) {
    store_->now += absl::Seconds(30);
    Acquire(kOne, name, Path(name, 5));
    Write(kOne, Path(name, 5), name);
    End(kOne, name);
    store_->PerformAll();
  }
  EXPECT_GT(Counters(kNvme).removed, 0);
  EXPECT_GT(Counters(kNvme).price, 0);
  EXPECT_LT(Counters(kArenaTier).price, Counters(kNvme).price)
      << "what leaves T1 is kept below, and loses little";
}

TEST_F(BlockDirectoryTest, TenantsUseTheirOwnBudgets) {
  Start(1);
  ASSERT_TRUE(directory().OpenSession(SessionId(3), kBerta, now()).ok());
  store_->PerformAll();
  ASSERT_EQ(Write(SessionId(3), Path(1, 5, "berta")), 5);
  for (uint64_t name = 1; name < 10; ++name) {
    Write(kOne, Path(name, 10));
    store_->PerformAll();
  }
  EXPECT_EQ(Counters(kArenaTier, kBerta).blocks, 5);
  EXPECT_EQ(Acquire(kOne, 1, Path(1, 5)).blocks.size(), 0) << "Berta's are hers";
  EXPECT_EQ(directory().Reserve(kOne, 0, {{Id(1, 1, "berta"), kBlock}}, now()).status().code(),
            absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace palimpsest::blocks
