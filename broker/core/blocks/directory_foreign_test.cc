// Blocks that other nodes keep in a tier that they share with this one.
#include <algorithm>
#include <utility>
#include <vector>

#include "broker/core/blocks/block_directory_fixture.h"
#include "broker/core/blocks/event_follower.h"
#include "gtest/gtest.h"

namespace palimpsest::blocks {
namespace {

class DirectoryForeignTest : public BlockDirectoryTest {
 protected:
  // Another node has stored the blocks, and this one has found them, in no particular order.
  void FindForeign(std::vector<BlockIdentity> path) {
    std::swap(path.front(), path.back());
    for (const BlockIdentity& id : path) {
      store_->LeaveForeign(kNvme, id, kBlock, id.key.high * 100 + id.key.low);
      store_->TellForeign(kNvme, id.key);
    }
  }
  // Where each block of an Acquire that waited comes from.
  size_t Gets(uint64_t request, const std::vector<BlockIdentity>& path) {
    const AcquireReply first = Acquire(kOne, request, path, absl::Seconds(10));
    if (!first.wait.has_value()) return first.blocks.size();
    store_->PerformAll();
    const AcquireReply reply = store_->answers.at(*first.wait);
    for (size_t i = 0; i < reply.blocks.size(); ++i) {
      EXPECT_EQ(store_->BytesAt(reply.blocks[i].extent), path[i].key.high * 100 + path[i].key.low);
    }
    return reply.blocks.size();
  }
};

TEST_F(DirectoryForeignTest, AreServedAndCountAgainstNobody) {
  Start(1);
  FindForeign(Path(1, 4));
  EXPECT_EQ(Counters(kNvme).blocks, 4);
  EXPECT_EQ(Counters(kNvme).foreign, 4);
  EXPECT_EQ(Counters(kNvme).used, Bytes(0));
  EXPECT_EQ(Gets(1, Path(1, 4)), 4);
  EXPECT_EQ(Counters(kNvme).hits, 4);
  EXPECT_EQ(Counters(kNvme).foreign_hits, 4);
  EXPECT_EQ(Counters(kNvme).foreign, 4) << "it stays where it was";
  EXPECT_EQ(Counters(kNvme).used, Bytes(0));
}

TEST_F(DirectoryForeignTest, AreSaidToRouters) {
  Start(1);
  EventFollower router;
  router.Follow(directory());
  FindForeign(Path(1, 3));
  router.Follow(directory());
  EXPECT_EQ(directory().Snapshot().size(), 3);
  store_->LoseForeign(kNvme, Id(1, 3).key);
  router.Follow(directory());
  EXPECT_EQ(directory().Snapshot().size(), 2);
}

TEST_F(DirectoryForeignTest, AreNeitherEvictedNorTrimmedNorRemoved) {
  Start(1);
  FindForeign(Path(1, 20));
  ASSERT_TRUE(directory().SetBudget(kAnna, kNvme, Bytes(0), now()).ok());
  ASSERT_TRUE(directory().SetCapacity(kNvme, Bytes(0), now()).ok());
  EXPECT_EQ(directory().Trim(kAnna, kNvme, Bytes(0), now())->blocks, 0);
  const auto path = Path(1, 20);
  BlockHint hint = {.action = {.kind = CacheAction::Kind::kRelease}};
  hint.ids = path;
  EXPECT_EQ(*directory().Hint(kOne, hint, now()), 0);
  store_->Collect();
  EXPECT_EQ(Pending<RemoveBlock>(), 0);
  EXPECT_EQ(Counters(kNvme).foreign, 20);
}

TEST_F(DirectoryForeignTest, AreNoReasonToRefuseOwnBlocks) {
  Start(1);
  ASSERT_TRUE(directory().SetBudget(kAnna, kNvme, kBlock * 10, now()).ok());
  FindForeign(Path(1, 50));
  Write(kOne, Path(2, 10));
  store_->PerformAll();
  EXPECT_EQ(Counters(kNvme).foreign, 50);
  EXPECT_GT(Counters(kNvme).demotions_done, 0);
  EXPECT_EQ(Refused(Counters(kNvme), Refusal::kNoRoom), 0);
  EXPECT_EQ(Counters(kNvme).used,
            kBlock * static_cast<int64_t>(Counters(kNvme).blocks - Counters(kNvme).foreign));
}

// Without predictions own blocks are worth what those before them were, not what others store.
TEST_F(DirectoryForeignTest, SayNothingOfHowOftenOwnOnesComeBack) {
  Start(1);
  TierState busy = Serving();
  busy.store.latency = absl::Seconds(1000);
  directory().OnTierState(kNvme, busy, now());
  FindForeign(Path(1, 1000));
  EXPECT_EQ(Gets(1, Path(1, 4)), 4);
  End(kOne, 1);
  Write(kOne, Path(2, 10));
  EXPECT_GT(Pending<StoreBlock>(), 0);
  EXPECT_EQ(Refused(Counters(kNvme), Refusal::kWorthless), 0);
}

TEST_F(DirectoryForeignTest, AreNotStoredThereOnceMoreUntilTheyAreGone) {
  Start(1);
  // T1 is full: two blocks of ten are to go.
  FindForeign(Path(1, 10));
  Write(kOne, Path(1, 10));
  EXPECT_EQ(Pending<StoreBlock>(), 0);
  for (uint64_t i = 1; i <= 10; ++i) store_->LoseForeign(kNvme, Id(1, i).key);
  Write(kOne, Path(2, 9));
  EXPECT_GT(Pending<StoreBlock>(), 0);
}

TEST_F(DirectoryForeignTest, ThatAreGoneAreMisses) {
  Start(1);
  FindForeign(Path(1, 4));
  // Nobody has noticed yet.
  store_->foreign[kNvme.value()].erase(Id(1, 3).key);
  EXPECT_EQ(Gets(1, Path(1, 4)), 2);
  EXPECT_EQ(Counters(kNvme).foreign, 3);
  EXPECT_EQ(Counters(kNvme).promotions_failed, 1);
  End(kOne, 1);
  store_->LoseForeign(kNvme, Id(1, 4).key);
  EXPECT_EQ(Counters(kNvme).foreign, 2);
  EXPECT_EQ(Gets(2, Path(1, 4)), 2);
}

TEST_F(DirectoryForeignTest, ThatAreDamagedAreMisses) {
  Start(1);
  FindForeign(Path(1, 2));
  store_->foreign[kNvme.value()].at(Id(1, 1).key).bytes = 77;
  EXPECT_EQ(Gets(1, Path(1, 2)), 0);
  EXPECT_EQ(Counters(kNvme).foreign, 1);
  EXPECT_EQ(store_->foreign[kNvme.value()].size(), 2) << "another node's file";
}

TEST_F(DirectoryForeignTest, OwnOnesArePreferred) {
  Start(1);
  FindForeign(Path(1, 1));
  // This node has stored it after the other one had removed it.
  const BlockRecord record = {.id = Id(1, 1), .length = kBlock, .checksum = 101};
  store_->foreign[kNvme.value()].clear();
  store_->tiers[kNvme.value()][record.id.key] = {record, 101};
  directory().OnStored(kNvme, record, now());
  EXPECT_EQ(Counters(kNvme).foreign, 0);
  EXPECT_EQ(Counters(kNvme).used, kBlock);
  directory().OnForeign(kNvme, record, now());
  EXPECT_EQ(Counters(kNvme).foreign, 0);
  EXPECT_EQ(Counters(kNvme).blocks, 1);
  EXPECT_EQ(Gets(1, Path(1, 1)), 1);
}

TEST_F(DirectoryForeignTest, OfOtherTenantsAreTheirsAndOfUnknownOnesNobodys) {
  Start(1);
  FindForeign(Path(1, 2, "berta"));
  FindForeign(Path(2, 2, "carl"));
  store_->Collect();
  EXPECT_EQ(Pending<RemoveBlock>(), 0);
  EXPECT_EQ(Counters(kNvme).foreign, 0);
  EXPECT_EQ(Counters(kNvme, kBerta).foreign, 2);
  EXPECT_EQ(Gets(1, Path(1, 2)), 0);
}

TEST_F(DirectoryForeignTest, CollisionsAreMissesAndStay) {
  Start(1);
  Write(kOne, Path(1, 1));
  BlockIdentity other = Id(1, 1);
  other.tokens = {99};
  FindForeign({other});
  store_->Collect();
  EXPECT_EQ(Pending<RemoveBlock>(), 0);
  EXPECT_EQ(Counters(kNvme).foreign, 0);
  EXPECT_EQ(Refused(Counters(kNvme), Refusal::kCollision), 1);
  FindForeign(Path(2, 1));
  other = Id(2, 1);
  other.tokens = {99};
  EXPECT_EQ(Gets(1, {other}), 0);
}

TEST_F(DirectoryForeignTest, APurgeForgetsThemAndNoneIsTakenBeforeItIsDone) {
  Start(1);
  FindForeign(Path(1, 2));
  EXPECT_EQ(*directory().Purge(kAnna, now()), 2);
  store_->Collect();
  EXPECT_EQ(Counters(kNvme).foreign, 0);
  EXPECT_EQ(Pending<RemoveBlock>(), 0);
  // They still lie there, and are found.
  store_->TellForeign(kNvme, Id(1, 1).key);
  EXPECT_EQ(Counters(kNvme).foreign, 0);
  EXPECT_EQ(Gets(1, Path(1, 2)), 0);
  store_->PerformAll();
  ASSERT_FALSE(directory().Purging(kAnna));
  FindForeign(Path(1, 2));
  EXPECT_EQ(Gets(2, Path(1, 2)), 2);
}

TEST_F(DirectoryForeignTest, APromotionThatAPurgeOvertakesIsNotPublished) {
  Start(1);
  FindForeign(Path(1, 1));
  const AcquireReply reply = Acquire(kOne, 1, Path(1, 1), absl::Seconds(10));
  ASSERT_TRUE(reply.wait.has_value());
  ASSERT_TRUE(directory().Purge(kAnna, now()).ok());
  store_->PerformAll();
  EXPECT_TRUE(store_->answers.at(*reply.wait).blocks.empty());
  EXPECT_EQ(Gets(2, Path(1, 1)), 0);
}

TEST_F(DirectoryForeignTest, ManyDoNotCrowdRequestsOut) {
  DirectoryOptions options = Options();
  options.history = 8;
  Start(1, options);
  FindForeign(Path(1, 100));
  Acquire(kOne, 1, Path(2, 10));
  EXPECT_EQ(directory().known(kAnna), 110);
  End(kOne, 1);
  for (uint64_t i = 1; i <= 100; ++i) store_->LoseForeign(kNvme, Id(1, i).key);
  EXPECT_LE(directory().known(kAnna), 16) << "they are still known";
}

}  // namespace
}  // namespace palimpsest::blocks
