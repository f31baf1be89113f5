// Chunks that are mapped as answers name them, and go when the broker wants them back.
#include <fcntl.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/monotonic_time.h"
#include "common/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/blocks/block_store_client_fixture.h"

namespace palimpsest {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::SizeIs;

TEST_F(BlockStoreClientTest, ChunkGoesWhenTheBrokerHeardOfItsLastPlace) {
  const AcquireAnswer found = Acquire(3);
  ASSERT_THAT(found.blocks, SizeIs(3));
  client_->OnUnmapChunks(1, {7, 8});
  EXPECT_THAT(link_.AwaitUnmapped(), ElementsAre(8)) << "it was never mapped";
  Await<PlacesWanted>();
  service_.Set(&FakeService::holding_releases_, true);
  client_->Release(Places(found));
  EXPECT_THAT(link_.unmapped(), ElementsAre(8));
  service_.Set(&FakeService::holding_releases_, false);
  const absl::Time deadline = MonotonicNow() + kPatience;
  while (link_.unmapped().size() < 2 && MonotonicNow() < deadline) std::this_thread::yield();
  EXPECT_THAT(link_.unmapped(), ElementsAre(8, 7));
  EXPECT_THAT(Acquire(1).blocks, SizeIs(1)) << "what comes later is mapped anew";
  EXPECT_EQ(link_.fetched(), 2);
}

TEST_F(BlockStoreClientTest, ChunkIsPinnedUntilItIsUnmappedAndOnlyThenTheBrokerHears) {
  const AcquireAnswer found = Acquire(1);
  EXPECT_EQ(backend_.pinned(), 1);
  client_->OnUnmapChunks(1, {7});
  EXPECT_EQ(backend_.pinned(), 1) << "a place in it is held";
  client_->Release(Places(found));
  EXPECT_THAT(link_.AwaitUnmapped(), ElementsAre(7));
  EXPECT_EQ(link_.pinned_when_told(), 0);
}

TEST_F(BlockStoreClientTest, ChunkThatCannotBePinnedIsUsedAllTheSame) {
  backend_.SetRefusing();
  EXPECT_THAT(Acquire(2).blocks, SizeIs(2));
  EXPECT_EQ(backend_.asked(), 1);
}

TEST_F(BlockStoreClientTest, ChunkThatIsWantedBackWhileItIsMappedGoesAtOnce) {
  backend_.SetHolding(true);
  client_->Acquire(StoreCallId(70), {.chain = Chain(1), .request = 9});
  backend_.AwaitAsked();
  client_->OnUnmapChunks(1, {7});
  EXPECT_THAT(link_.unmapped(), IsEmpty()) << "it is being mapped";
  backend_.SetHoldingPinned(true);
  backend_.SetHolding(false);
  EXPECT_THAT(service_.AwaitTold(1), ElementsAre(std::pair("release", 1)));
  Notification heard;
  client_->Hint(5, {.kind = CacheAction::Kind::kRelease}, [&](auto) { heard.Notify(); });
  heard.WaitForNotification();  // the broker answered the release before that
  EXPECT_THAT(link_.unmapped(), IsEmpty()) << "it is still pinned";
  backend_.SetHoldingPinned(false);
  // Told again when the broker has heard that the answer's place was given up.
  EXPECT_THAT(link_.AwaitUnmapped(), AllOf(Not(IsEmpty()), Each(7)));
  EXPECT_EQ(link_.pinned_when_told(), 0);
  EXPECT_THAT(Await<AcquireAnswer>().blocks, IsEmpty());
}

TEST_F(BlockStoreClientTest, WhatLiesInALeavingChunkIsGivenUpUnread) {
  const AcquireAnswer found = Acquire(1);
  client_->OnUnmapChunks(1, {7});
  EXPECT_THAT(Acquire(2).blocks, IsEmpty());
  EXPECT_THAT(service_.AwaitTold(1), ElementsAre(std::pair("release", 2)));
  client_->Release(Places(found));
  EXPECT_THAT(link_.AwaitUnmapped(), ElementsAre(7));
}

TEST_F(BlockStoreClientTest, ChunkThatDoesNotComeIsAMiss) {
  service_.Set(&FakeService::refusing_, true);
  EXPECT_THAT(Acquire(2).blocks, IsEmpty());
  EXPECT_THAT(service_.AwaitTold(1), ElementsAre(std::pair("release", 2)));
  EXPECT_THAT(link_.AwaitUnmapped(), ElementsAre(7)) << "the broker may wait for it";
  client_->Reserve(StoreCallId(50), 0, Chain(1));
  EXPECT_THAT(Await<ReserveAnswer>().blocks, IsEmpty());
  EXPECT_THAT(service_.AwaitTold(2), ElementsAre(std::pair("release", 2), std::pair("abort", 1)));
}

TEST_F(BlockStoreClientTest, FileThatIsNoChunkIsNotMapped) {
  link_.set_chunk(NewChunk(kChunk - KiB(4)));
  EXPECT_THAT(Acquire(1).blocks, IsEmpty());
  link_.set_chunk(NewChunk(kChunk, F_SEAL_SEAL));
  EXPECT_THAT(Acquire(1).blocks, IsEmpty());
  link_.set_chunk(NewChunk());
  EXPECT_THAT(Acquire(1).blocks, SizeIs(1));
}

TEST_F(BlockStoreClientTest, PlacesThatCannotBeAreGivenUp) {
  const auto chunk = static_cast<uint64_t>(kChunk.count());
  for (const auto& [offset, length] :
       std::vector<std::pair<uint64_t, uint64_t>>{{0, kBlock + 1},
                                                  {1, kBlock},
                                                  {chunk, kBlock},
                                                  {chunk - 4096, kBlock},
                                                  {~uint64_t{4095}, kBlock}}) {
    service_.set_offset(offset);
    service_.set_length(length);
    EXPECT_THAT(Acquire(1).blocks, IsEmpty()) << offset;
  }
}

}  // namespace
}  // namespace palimpsest
