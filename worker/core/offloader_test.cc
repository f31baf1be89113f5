#include "worker/core/offloader.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "worker/core/block_keys.h"
#include "worker/core/fake_kv_store.h"

namespace palimpsest {
namespace {

constexpr int32_t kTokens = 2;
constexpr BlockKey kRoot{7, 7};

class OffloaderTest : public ::testing::Test {
 protected:
  OffloaderTest() { blocks_.OnSlabsMapped(std::vector<RegionIndex>{RegionIndex(0)}); }

  // Computes blocks behind `node` (one for each of `first` tokens), releases them and gives the
  // last one's node, pinned.
  PrefixCache::Node* Compute(const std::vector<TokenId>& first, PrefixCache::Node* node = nullptr) {
    std::vector<BlockId> held;
    for (const TokenId token : first) {
      const std::vector<TokenId> tokens = {token, token};
      const BlockKey parent = node == nullptr ? kRoot : node->key();
      if (node != nullptr) blocks_.Pin(node);
      const auto published =
          blocks_.Publish(node, ChainKey(parent, tokens), tokens, *blocks_.Allocate());
      if (last_ != nullptr) blocks_.Unpin(last_);
      last_ = node = published.node;
      held.push_back(published.block);
    }
    for (auto block = held.rbegin(); block != held.rend(); ++block) blocks_.Release(*block);
    return node;
  }

  // Reserves a batch, and answers; what is to be copied.
  std::vector<SwapMove> Reserve() {
    const StoreCallId call(++calls_);
    if (!offloader_.Pump(call)) return {};
    store_.AnswerAll();
    std::vector<SwapMove> moves;
    for (const StoreEvent& event : store_.TakeEvents()) {
      moves = offloader_.OnReserved(std::get<ReserveAnswer>(event), SwapId(calls_));
    }
    return moves;
  }

  void Copied(const std::vector<SwapMove>& moves, absl::Status status = absl::OkStatus()) {
    SwapEnded ended{.id = SwapId(calls_), .status = std::move(status)};
    ended.checksums.resize(moves.size(), 5);
    offloader_.OnCopied(ended);
    blocks_.CheckInvariants();
  }

  // Of three chains of three blocks eight have room.
  void Fill() {
    for (TokenId chain = 0; chain < 3; ++chain) {
      offloader_.Offer(Compute({10 * chain, 10 * chain + 1, 10 * chain + 2}), 1);
      Copied(Reserve());
    }
    EXPECT_EQ(offloader_.counters().stored, 8);
  }

  BlockManager blocks_{
      {.slab_bytes = Bytes(30), .block_bytes = Bytes(2), .region_slabs = 1, .block_tokens = 2}};
  FakeKvStore store_{
      {.block_bytes = Bytes(2), .block_tokens = kTokens, .capacity_blocks = 8, .seed = 1}};
  Offloader offloader_{&blocks_, &store_, kRoot, {.queued_blocks = 6, .copying_blocks = 4}};
  PrefixCache::Node* last_ = nullptr;
  uint64_t calls_ = 0;
};

TEST_F(OffloaderTest, CopiesEachBlockOnceFromTheFirst) {
  offloader_.Offer(Compute({1, 2, 3}), 1);
  const std::vector<SwapMove> moves = Reserve();
  ASSERT_EQ(moves.size(), 3u);
  EXPECT_EQ(offloader_.held_blocks(), 3);
  EXPECT_EQ(blocks_.live_blocks(), 3) << "nobody may take them while they are copied";
  Copied(moves);
  EXPECT_EQ(blocks_.live_blocks(), 0);
  EXPECT_EQ(offloader_.counters().stored, 3);
  EXPECT_EQ(store_.held(), 0u);
  offloader_.Offer(last_, 2);
  EXPECT_TRUE(Reserve().empty()) << "all of it is stored";
  offloader_.Offer(Compute({4}, last_), 2);
  EXPECT_EQ(Reserve().size(), 1u) << "only what is new";
}

TEST_F(OffloaderTest, WhatTheStoreHasIsNotCopied) {
  offloader_.Offer(Compute({1, 2}), 1);
  Copied(Reserve());
  offloader_.ForgetStored();
  offloader_.Offer(last_, 1);
  EXPECT_TRUE(Reserve().empty());
  EXPECT_EQ(offloader_.counters().present, 2);
}

TEST_F(OffloaderTest, WaitingBlocksHoldNoMemory) {
  offloader_.Offer(Compute({1, 2, 3}), 1);
  EXPECT_EQ(blocks_.live_blocks(), 0);
  // Others take everything.
  std::vector<BlockId> taken;
  while (const auto block = blocks_.Allocate()) taken.push_back(*block);
  EXPECT_TRUE(Reserve().empty());
  EXPECT_EQ(offloader_.counters().dropped, 3);
  for (const BlockId block : taken) blocks_.Release(block);
  blocks_.CheckInvariants();
}

TEST_F(OffloaderTest, BlockThatWasEvictedWhileItsPlaceWasReservedIsGivenUp) {
  offloader_.Offer(Compute({1, 2}), 1);
  ASSERT_TRUE(offloader_.Pump(StoreCallId(++calls_)));
  std::vector<BlockId> taken;
  while (const auto block = blocks_.Allocate()) taken.push_back(*block);
  store_.AnswerAll();
  const auto events = store_.TakeEvents();
  EXPECT_TRUE(offloader_.OnReserved(std::get<ReserveAnswer>(events.at(0)), SwapId(calls_)).empty());
  EXPECT_EQ(store_.held(), 0u);
  EXPECT_EQ(store_.blocks(), 0u);
}

TEST_F(OffloaderTest, QueueAndCopiesAreBounded) {
  offloader_.Offer(Compute({1, 2, 3, 4, 5, 6, 7, 8}), 1);
  EXPECT_EQ(offloader_.counters().dropped, 2) << "the oldest, and so the rest is of no use";
  EXPECT_TRUE(Reserve().empty());
  EXPECT_EQ(offloader_.counters().dropped, 8);
  offloader_.Offer(Compute({11, 12, 13, 14, 15}), 1);
  const std::vector<SwapMove> moves = Reserve();
  EXPECT_EQ(moves.size(), 4u);
  EXPECT_TRUE(Reserve().empty()) << "four are being copied";
  --calls_;
  Copied(moves);
  EXPECT_EQ(Reserve().size(), 1u);
}

TEST_F(OffloaderTest, FailuresGiveThePlaceBackAndMayBeTriedAgain) {
  offloader_.Offer(Compute({1, 2}), 1);
  Copied(Reserve(), absl::DataLossError("the copy"));
  EXPECT_EQ(store_.held(), 0u);
  EXPECT_EQ(store_.blocks(), 0u);
  EXPECT_EQ(offloader_.counters().failed, 1);
  offloader_.Offer(last_, 1);
  EXPECT_EQ(Reserve().size(), 2u);
}

TEST_F(OffloaderTest, WhatHadNoRoomIsOfferedAgainWhenThereIsSome) {
  Fill();
  EXPECT_EQ(offloader_.counters().refused, 0);
  EXPECT_TRUE(Reserve().empty()) << "one waits";
  store_.DropOne();
  store_.DropOne();
  EXPECT_TRUE(Reserve().empty()) << "and does not ask by itself";
  offloader_.Offer(Compute({40}), 2);
  Copied(Reserve());
  EXPECT_EQ(offloader_.counters().retried, 1);
  Copied(Reserve());
  EXPECT_EQ(offloader_.counters().stored, 10);
}

TEST_F(OffloaderTest, GivesUpWhatHadNoRoomAFewTimes) {
  Fill();
  for (TokenId other = 50; other < 52; ++other) {
    EXPECT_EQ(offloader_.counters().refused, 0);
    store_.DropOne();
    offloader_.Offer(Compute({other}), 2);
    Copied(Reserve());
    EXPECT_TRUE(Reserve().empty()) << "the room was the other's";
  }
  EXPECT_EQ(offloader_.counters().retried, 2);
  EXPECT_EQ(offloader_.counters().refused, 1);
  store_.DropOne();
  store_.DropOne();
  offloader_.Offer(Compute({60}), 2);
  Copied(Reserve());
  EXPECT_TRUE(Reserve().empty());
}

TEST_F(OffloaderTest, UseOffersAnewWhatHadNoRoom) {
  Fill();
  store_.DropOne();
  offloader_.Offer(last_, 2);
  EXPECT_EQ(Reserve().size(), 1u);
}

TEST_F(OffloaderTest, WhatTheStoreHasLostIsOfferedAgain) {
  offloader_.Offer(Compute({1, 2, 3}), 1);
  Copied(Reserve());
  for (int i = 0; i < 3; ++i) store_.DropOne();
  ASSERT_EQ(store_.blocks(), 0u);
  offloader_.Offer(last_, 2);
  EXPECT_TRUE(Reserve().empty()) << "that is not known here";
  offloader_.OfferLost(last_, 2, 2);
  offloader_.OfferLost(last_, 2, 2);
  EXPECT_EQ(offloader_.counters().lost, 2);
  EXPECT_EQ(Reserve().size(), 2u);
}

TEST_F(OffloaderTest, WithAWindowBlocksAreOfUseWithoutThoseBefore) {
  Offloader windowed(&blocks_, &store_, kRoot,
                     {.queued_blocks = 6, .copying_blocks = 4, .windowed = true});
  windowed.Offer(Compute({1, 2, 3, 4, 5, 6, 7, 8}), 1);
  EXPECT_EQ(windowed.counters().dropped, 2);
  ASSERT_TRUE(windowed.Pump(StoreCallId(1)));
  store_.AnswerAll();
  const auto events = store_.TakeEvents();
  EXPECT_EQ(windowed.OnReserved(std::get<ReserveAnswer>(events.at(0)), SwapId(1)).size(), 4u);
}

TEST_F(OffloaderTest, CollisionIsRefused) {
  offloader_.Offer(Compute({1}), 1);
  Copied(Reserve());
  // Another block under the key of the first, which the cache has lost.
  const BlockKey key = last_->key();
  blocks_.Unpin(std::exchange(last_, nullptr));
  std::vector<BlockId> taken;
  while (const auto block = blocks_.Allocate()) taken.push_back(*block);
  const std::vector<TokenId> other = {9, 9};
  const auto published = blocks_.Publish(nullptr, key, other, taken.back());
  ASSERT_NE(published.node, nullptr);
  offloader_.Offer(published.node, 2);
  EXPECT_TRUE(Reserve().empty());
  EXPECT_EQ(offloader_.counters().refused, 1);
}

TEST_F(OffloaderTest, WithoutAStoreNothingIsQueued) {
  store_.SetAvailable(false);
  offloader_.Offer(Compute({1, 2}), 1);
  EXPECT_FALSE(offloader_.Pump(StoreCallId(1)));
  store_.SetAvailable(true);
  EXPECT_FALSE(offloader_.Pump(StoreCallId(1)));
  offloader_.Offer(last_, 1);
  EXPECT_EQ(Reserve().size(), 2u);
}

}  // namespace
}  // namespace palimpsest
