#include "broker/core/blocks/block_directory.h"

#include <vector>

#include "broker/core/blocks/block_directory_fixture.h"
#include "gtest/gtest.h"

namespace palimpsest::blocks {
namespace {

TEST_F(BlockDirectoryTest, CommittedBlocksAreServedAsThePrefixThatIsReady) {
  Start(1);
  ASSERT_EQ(Write(kOne, Path(1, 3)), 3);
  const AcquireReply reply = Acquire(kTwo, 1, Path(1, 5));
  ASSERT_EQ(reply.blocks.size(), 3);
  for (size_t i = 0; i < 3; ++i) {
    EXPECT_EQ(reply.blocks[i].checksum, 101 + i);
    EXPECT_EQ(store_->BytesAt(reply.blocks[i].extent), 101 + i);
  }
  EXPECT_TRUE(reply.elsewhere.empty());
  EXPECT_EQ(Counters(kArenaTier).hits, 3);
}

TEST_F(BlockDirectoryTest, KeyOfAnotherBlockIsAMiss) {
  Start(1);
  Write(kOne, Path(1, 2));
  std::vector<BlockIdentity> other = Path(1, 2);
  other[1].tokens = {99};
  EXPECT_EQ(Acquire(kTwo, 1, other).blocks.size(), 1);
  const auto reserved = directory().Reserve(kTwo, 1, {{other[1], kBlock}}, now());
  ASSERT_TRUE(reserved.ok());
  EXPECT_EQ(reserved->front().result, Reservation::kCollision);
  EXPECT_EQ(Refused(Counters(kArenaTier), Refusal::kCollision), 1);
}

TEST_F(BlockDirectoryTest, HeldBlocksAreUsedButNotPinned) {
  Start(1);
  Write(kOne, Path(1, 3));
  AcquireRequest request = {.request = 1};
  const auto path = Path(1, 3);
  request.ids = path;
  request.held = 2;
  const auto reply = directory().Acquire(kOne, request, now());
  ASSERT_TRUE(reply.ok());
  ASSERT_EQ(reply->blocks.size(), 1);
  EXPECT_EQ(reply->blocks[0].checksum, 103);
}

TEST_F(BlockDirectoryTest, SessionThatEndsDropsWhatItWroteAndItsPins) {
  Start(1);
  Write(kOne, Path(1, 2));
  Acquire(kTwo, 1, Path(1, 2));
  ASSERT_TRUE(directory().Reserve(kTwo, 0, {{Id(2, 1), kBlock}}, now()).ok());
  EXPECT_EQ(Counters(kArenaTier).used, kBlock * 3);
  ASSERT_TRUE(directory().CloseSession(kTwo, now()).ok());
  EXPECT_EQ(Counters(kArenaTier).used, kBlock * 2);
  EXPECT_EQ(directory().CloseSession(kTwo, now()).code(), absl::StatusCode::kNotFound);
  // Nothing is pinned any more: all of it may go for others.
  EXPECT_EQ(Write(kOne, Path(3, 10)), 8) << "before anything was demoted";
}

TEST_F(BlockDirectoryTest, EndOfARequestTakesItsPinsBack) {
  Start(1);
  Write(kOne, Path(1, 1));
  const AcquireReply reply = Acquire(kOne, 1, Path(1, 1));
  EXPECT_EQ(directory().Release(kOne, 2, {reply.blocks[0].extent}, now()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(
      directory().Release(kOne, 1, {reply.blocks[0].extent, reply.blocks[0].extent}, now()).code(),
      absl::StatusCode::kFailedPrecondition);
  End(kOne, 1);
  EXPECT_EQ(directory().Release(kOne, 1, {reply.blocks[0].extent}, now()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(directory().EndRequest(kOne, {.request = 1}, now()).ok()) << "not known: no effect";
  EXPECT_EQ(directory().CheckConsistency(), absl::OkStatus());
}

TEST_F(BlockDirectoryTest, ChunkIsGivenBackWhenItsBlocksLeftAndSessionsUnmappedIt) {
  Start(2);
  ASSERT_EQ(Write(kOne, Path(1, 6)), 6);
  store_->PerformAll();
  ASSERT_EQ(Write(kOne, Path(2, 6)), 6);
  const AcquireReply reply = Acquire(kOne, 1, Path(1, 6));
  std::vector<ArenaChunkId> chunks;
  for (uint32_t i = 0; i < 8; ++i) {
    if (directory().arena().state(ArenaChunkId(i)) == ArenaChunkState::kGranted) {
      chunks.emplace_back(i);
    }
  }
  ASSERT_EQ(chunks.size(), 2);
  ASSERT_TRUE(directory().Map(kOne, chunks).ok());
  ASSERT_TRUE(directory().SetBudget(kAnna, kArenaTier, Bytes(0), now()).ok());
  store_->PerformAll();
  EXPECT_EQ(directory().Map(kTwo, chunks).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Counters(kArenaTier).blocks, 6) << "pinned ones wait";
  EXPECT_EQ(directory().arena().Count(ArenaChunkState::kFree), 7);
  End(kOne, 1);
  store_->PerformAll();
  EXPECT_EQ(directory().arena().Count(ArenaChunkState::kFree), 8);
  EXPECT_EQ(store_->tiers[kNvme.value()].size(), 12) << "what has left went below";
  EXPECT_TRUE(store_->overdue_sessions.empty());
}

TEST_F(BlockDirectoryTest, SessionThatKeepsARevokedChunkIsOverdue) {
  Start(1);
  Write(kOne, Path(1, 1));
  ASSERT_TRUE(directory().Map(kOne, {ArenaChunkId(0)}).ok());
  store_->stubborn = {kOne};
  ASSERT_TRUE(directory().SetBudget(kAnna, kArenaTier, Bytes(0), now()).ok());
  store_->PerformAll();
  EXPECT_EQ(directory().UnmapsOf(kOne), std::vector<ArenaChunkId>{ArenaChunkId(0)});
  EXPECT_TRUE(directory().UnmapsOf(kTwo).empty());
  while (store_->now < absl::UnixEpoch() + absl::Hours(1) + Options().unmap_deadline) {
    const absl::Time next = directory().Tick(now());
    ASSERT_LT(next, absl::InfiniteFuture());
    store_->now = next;
  }
  directory().Tick(now());
  directory().Tick(now());
  store_->Collect();
  EXPECT_EQ(store_->overdue_sessions, std::vector<SessionId>{kOne});
  ASSERT_TRUE(directory().CloseSession(kOne, now()).ok());
  store_->PerformAll();
  EXPECT_EQ(directory().arena().Count(ArenaChunkState::kFree), 8);
}

TEST_F(BlockDirectoryTest, NoMemoryForAChunkIsTriedAgainLater) {
  Start(2);
  ASSERT_EQ(Write(kOne, Path(1, 6)), 6);
  ASSERT_EQ(Pending<MakeChunk>(), 1);
  store_->Perform(0, Fault::kFailed);
  EXPECT_EQ(Refused(Counters(kArenaTier), Refusal::kNoMemory), 1);
  EXPECT_EQ(Write(kOne, Path(2, 4)), 4);
  EXPECT_EQ(Pending<MakeChunk>(), 0);
  store_->now += Options().memory_back_off;
  EXPECT_EQ(Write(kOne, Path(3, 1)), 0);
  ASSERT_EQ(Pending<MakeChunk>(), 1);
  store_->PerformAll();
  EXPECT_EQ(Write(kOne, Path(3, 1)), 1);
}

TEST_F(BlockDirectoryTest, NothingIsServedAfterAPurgeWhateverWasOnItsWay) {
  Start(1);
  PutBelow(Path(1, 2));
  Write(kOne, Path(2, 8));
  const auto written = directory().Reserve(kTwo, 0, {{Id(3, 1), kBlock}}, now());
  ASSERT_TRUE(written.ok());
  store_->Collect();
  ASSERT_EQ(Pending<StoreBlock>(), 1);
  const auto wait = Acquire(kOne, 1, Path(1, 2), absl::Seconds(1)).wait;
  ASSERT_TRUE(wait.has_value());
  ASSERT_EQ(Pending<LoadBlock>(), 1);
  const auto forgotten = directory().Purge(kAnna, now());
  ASSERT_TRUE(forgotten.ok());
  EXPECT_EQ(*forgotten, 10);
  store_->Collect();
  EXPECT_TRUE(store_->answers.at(*wait).blocks.empty());
  ASSERT_TRUE(directory().Commit(kTwo, {{Id(3, 1).key, 301}}, now()).ok());
  EXPECT_TRUE(directory().Purging(kAnna));
  store_->PerformAll();
  EXPECT_FALSE(directory().Purging(kAnna));
  EXPECT_TRUE(store_->tiers[kNvme.value()].empty());
  for (uint64_t name = 1; name <= 3; ++name) {
    const AcquireReply reply = Acquire(kOne, 10 + name, Path(name, 2), absl::Seconds(1));
    EXPECT_TRUE(reply.blocks.empty() && reply.elsewhere.empty() && !reply.wait.has_value());
  }
  EXPECT_EQ(Write(kOne, Path(2, 1)), 1) << "what is stored anew is served again";
  EXPECT_EQ(Acquire(kOne, 20, Path(2, 1)).blocks.size(), 1);
}

TEST_F(BlockDirectoryTest, PurgeThatFailsIsTriedAgain) {
  Start(1);
  PutBelow(Path(1, 2));
  ASSERT_TRUE(directory().Purge(kAnna, now()).ok());
  store_->Collect();
  ASSERT_EQ(Pending<PurgeTier>(), 1);
  store_->Perform(0, Fault::kFailed);
  EXPECT_TRUE(directory().Purging(kAnna));
  EXPECT_EQ(Pending<PurgeTier>(), 0);
  const absl::Time next = directory().Tick(now());
  ASSERT_LT(next, absl::InfiniteFuture());
  store_->now = next;
  directory().Tick(now());
  store_->PerformAll();
  EXPECT_FALSE(directory().Purging(kAnna));
  EXPECT_TRUE(store_->tiers[kNvme.value()].empty());
}

TEST_F(BlockDirectoryTest, EventsFollowEachOtherAndGapsAreSeen) {
  DirectoryOptions options = Options();
  options.events = 4;
  Start(1, options);
  Write(kOne, Path(1, 2));
  const auto events = directory().events().After(0, 10);
  ASSERT_TRUE(events.has_value());
  ASSERT_EQ(events->size(), 2);
  EXPECT_EQ((*events)[1], (BlockEvent{2, BlockEvent::Kind::kStored, kAnna, kArenaTier, {1, 2}}));
  EXPECT_EQ(directory().events().After(0, 1)->size(), 1);
  EXPECT_FALSE(directory().events().After(3, 10).has_value()) << "not yet";
  Write(kOne, Path(2, 3));
  EXPECT_FALSE(directory().events().After(0, 10).has_value()) << "gone";
  EXPECT_EQ(directory().events().After(1, 10)->size(), 4);
  EXPECT_EQ(directory().Snapshot().size(), 5);
  EXPECT_EQ(directory().Snapshot()[0].sequence, 5);
}

TEST_F(BlockDirectoryTest, HostileCallsAreRefusedAndChangeNothing) {
  Start(1);
  const auto acquire = [&](AcquireRequest request, const std::vector<BlockIdentity>& ids) {
    request.ids = ids;
    return directory().Acquire(kOne, request, now()).status().code();
  };
  constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
  std::vector<BlockIdentity> twice = {Id(1, 1), Id(1, 2), Id(1, 1)};
  twice[2].parent = twice[1].key;
  EXPECT_EQ(acquire({.request = 1}, twice), kInvalid);
  EXPECT_EQ(acquire({.request = 1}, {Id(1, 1), Id(1, 3)}), kInvalid) << "no chain";
  EXPECT_EQ(acquire({.request = 0}, Path(1, 1)), kInvalid);
  EXPECT_EQ(acquire({.request = 1, .held = 2}, Path(1, 1)), kInvalid);
  EXPECT_EQ(acquire({.request = 1, .deadline = now() + absl::Hours(1)}, Path(1, 1)), kInvalid);
  EXPECT_EQ(acquire({.request = 1}, Path(1, BlockDirectory::kMaxBlocks + 1)), kInvalid);
  const auto reserve = [&](const BlockIdentity& id, Bytes length) {
    return directory().Reserve(kOne, 0, {{id, length}}, now()).status().code();
  };
  EXPECT_EQ(reserve(Id(1, 1), Bytes(0)), kInvalid);
  EXPECT_EQ(reserve(Id(1, 1), kBlock * 10 + Bytes(1)), kInvalid);
  BlockIdentity empty = Id(1, 1);
  empty.tokens.clear();
  EXPECT_EQ(reserve(empty, kBlock), kInvalid);
  EXPECT_EQ(directory().Commit(kOne, {{Id(1, 1).key, 0}}, now()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(directory().OnUnmapped(kOne, {ArenaChunkId(7)}, now()).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(directory().OpenSession(SessionId(UINT64_MAX), kAnna, now()).code(), kInvalid);
  EXPECT_EQ(directory().CheckConsistency(), absl::OkStatus());
  EXPECT_EQ(Counters(kArenaTier).used, Bytes(0));
}

TEST_F(BlockDirectoryTest, KnownBlocksAreBoundedWhateverRuns) {
  DirectoryOptions options = Options();
  options.history = 50;
  Start(1, options);
  Write(kOne, Path(1, 3));
  for (uint64_t name = 2; name < 100; ++name) {
    Acquire(kOne, name, Path(name, 9));
    Write(kOne, {Id(name, 10)}, name);
    ASSERT_LE(directory().known(kAnna), 2 * 50 + 110);
  }
  EXPECT_EQ(directory().CheckConsistency(), absl::OkStatus());
  for (uint64_t name = 2; name < 100; ++name) End(kOne, name);
  EXPECT_LE(directory().known(kAnna), 50 + 110);
}

TEST_F(BlockDirectoryTest, RunningRequestsAndWaitsAreBounded) {
  DirectoryOptions options = Options();
  options.max_requests = 2;
  options.max_waits = 1;
  Start(1, options);
  PutBelow(Path(1, 1));
  ASSERT_TRUE(Acquire(kOne, 1, Path(1, 1), absl::Seconds(1)).wait.has_value());
  const auto path = Path(1, 1);
  AcquireRequest second = {.request = 2, .deadline = now() + absl::Seconds(1)};
  second.ids = path;
  EXPECT_EQ(directory().Acquire(kOne, second, now()).status().code(),
            absl::StatusCode::kResourceExhausted);
  Acquire(kOne, 2, path);
  AcquireRequest third = {.request = 3};
  third.ids = path;
  EXPECT_EQ(directory().Acquire(kOne, third, now()).status().code(),
            absl::StatusCode::kResourceExhausted);
}

}  // namespace
}  // namespace palimpsest::blocks
