// Calls to the broker, and sessions that come and go.
#include "worker/blocks/block_store_client.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "common/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/blocks/block_store_client_fixture.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;
using ::testing::SizeIs;

TEST_F(BlockStoreClientTest, StoresAndFindsBlocksInMappedMemory) {
  client_->Reserve(StoreCallId(1), 9, Chain(2));
  const auto reserved = Await<ReserveAnswer>();
  ASSERT_TRUE(reserved.status.ok()) << reserved.status;
  ASSERT_THAT(reserved.blocks, SizeIs(2));
  EXPECT_EQ(service_.reserve().chain().tokens_size(), 4);
  EXPECT_EQ(service_.reserve().session().session_id(), 5u);
  EXPECT_EQ(service_.reserve().session().block_token(), std::string(16, 'b'));
  EXPECT_EQ(service_.reserve().block_bytes(), kBlock);
  std::memset(reserved.blocks[1].place.memory, 77, kBlock);
  client_->Commit(
      {{{3, 0}, reserved.blocks[0].place, 100}, {{3, 1}, reserved.blocks[1].place, 101}});
  const AcquireAnswer found = Acquire(2, 1);
  ASSERT_THAT(found.blocks, SizeIs(1));
  EXPECT_EQ(found.blocks[0].place.memory[kBlock - 1], std::byte(77));
  EXPECT_EQ(found.blocks[0].checksum, 101u);
  ASSERT_THAT(found.lower, SizeIs(1));
  EXPECT_EQ(found.lower[0].blocks, 3);
  EXPECT_EQ(service_.acquire().held_blocks(), 1u);
  EXPECT_EQ(service_.acquire().request_id(), 9u);
  EXPECT_EQ(link_.fetched(), 1) << "mapped once";
  client_->Release(Places(found));
  client_->EndRequest({.request = 9});
  const auto told = service_.AwaitTold(3);
  EXPECT_THAT(told, ::testing::UnorderedElementsAre(std::pair("commit", 2), std::pair("release", 1),
                                                    std::pair("end", 9)));
  EXPECT_GT(client_->answer_seconds(), 0);
}

TEST_F(BlockStoreClientTest, WhatClientsTellReachesTheBroker) {
  client_->Acquire(StoreCallId(1), {.chain = Chain(2),
                                    .request = 9,
                                    .conversation = 5,
                                    .types = {BlockType::kSystemPrompt, BlockType::kToolContext}});
  Await<AcquireAnswer>();
  EXPECT_EQ(service_.acquire().conversation_id(), 5u);
  EXPECT_THAT(service_.acquire().types(),
              ::testing::ElementsAre(v1::BLOCK_TYPE_SYSTEM_PROMPT, v1::BLOCK_TYPE_TOOL_CONTEXT));
  StoreRequestEnd end{.request = 9, .how = StoreRequestEnd::How::kToolCall};
  end.expected_idle = absl::Seconds(8);
  end.then = CacheAction{.kind = CacheAction::Kind::kRetain,
                         .time = absl::Seconds(60),
                         .half_life = absl::Seconds(20),
                         .budget_bytes = 4096,
                         .priority = 7};
  client_->EndRequest(end);
  ASSERT_THAT(service_.AwaitTold(1), SizeIs(1));
  EXPECT_EQ(service_.end().ending(), v1::REQUEST_ENDING_TOOL_CALL);
  EXPECT_EQ(service_.end().expected_idle_seconds(), 8);
  EXPECT_EQ(service_.end().then().retain().seconds(), 60);
  EXPECT_EQ(service_.end().then().retain().half_life_seconds(), 20);
  EXPECT_EQ(service_.end().then().retain().budget_bytes(), 4096u);
  EXPECT_EQ(service_.end().then().retain().priority(), 7u);

  absl::StatusOr<uint64_t> hinted;
  const auto hint = [&] {
    Notification answered;
    client_->Hint(5, {.kind = CacheAction::Kind::kPrefetch, .time = absl::Seconds(2)},
                  [&](absl::StatusOr<uint64_t> blocks) {
                    hinted = std::move(blocks);
                    answered.Notify();
                  });
    answered.WaitForNotification();
  };
  hint();
  EXPECT_EQ(*hinted, 12u);
  EXPECT_EQ(service_.hint().conversation_id(), 5u);
  EXPECT_EQ(service_.hint().action().prefetch().seconds(), 2);
  EXPECT_EQ(service_.hint().session().session_id(), 5u);
  client_->OnSessionLost(1);
  hint();
  EXPECT_TRUE(absl::IsUnavailable(hinted.status())) << hinted.status();
}

TEST_F(BlockStoreClientTest, EndOfARequestIsNotHeardBeforeItsCommits) {
  service_.Set(&FakeService::holding_commits_, true);
  client_->Reserve(StoreCallId(1), 9, Chain(3));
  const auto reserved = Await<ReserveAnswer>();
  client_->Commit({{{3, 0}, reserved.blocks[0].place, 100}});
  client_->EndRequest({.request = 9});
  client_->Commit(
      {{{3, 1}, reserved.blocks[1].place, 101}, {{3, 2}, reserved.blocks[2].place, 102}});
  client_->EndRequest({.request = 10});
  // Calls of another kind pass meanwhile, so this one would have.
  EXPECT_THAT(Acquire(1).blocks, SizeIs(1));
  EXPECT_THAT(service_.AwaitTold(0), SizeIs(0));
  service_.Set(&FakeService::holding_commits_, false);
  const auto told = service_.AwaitTold(4);
  ASSERT_THAT(told, SizeIs(4));
  const auto at = [&](const std::string& what, int count) {
    return std::find(told.begin(), told.end(), std::pair(what, count)) - told.begin();
  };
  EXPECT_LT(at("commit", 1), at("end", 9));
  EXPECT_LT(at("commit", 1), at("end", 10));
  EXPECT_LT(at("commit", 2), at("end", 10));
}

TEST_F(BlockStoreClientTest, DemotionIsNotHeardBeforeCommits) {
  service_.Set(&FakeService::holding_commits_, true);
  client_->Reserve(StoreCallId(1), 9, Chain(3));
  const auto reserved = Await<ReserveAnswer>();
  client_->Commit({{{3, 0}, reserved.blocks[0].place, 100}});
  client_->Demote(Chain(3), 2);
  EXPECT_THAT(Acquire(1).blocks, SizeIs(1));
  EXPECT_THAT(service_.AwaitTold(0), SizeIs(0));
  service_.Set(&FakeService::holding_commits_, false);
  EXPECT_THAT(service_.AwaitTold(2), ElementsAre(Pair("commit", 1), Pair("hint", 2)));
  const v1::HintRequest hint = service_.hint();
  EXPECT_TRUE(hint.action().has_demote());
  EXPECT_EQ(hint.chain().keys_size(), 6);
  EXPECT_EQ(hint.session().session_id(), 5u);
}

TEST_F(BlockStoreClientTest, BrokerWithoutTiersIsNotAvailable) {
  client_->OnSessionLost(1);
  client_->OnSession({2, SessionId(6), ""});
  EXPECT_FALSE(client_->available());
  EXPECT_TRUE(absl::IsUnavailable(Acquire(2).status));
  client_->Reserve(StoreCallId(50), 0, Chain(1));
  EXPECT_TRUE(absl::IsUnavailable(Await<ReserveAnswer>().status));
}

TEST_F(BlockStoreClientTest, LostSessionFailsCallsAndKeepsWhatIsHeld) {
  const AcquireAnswer found = Acquire(1);
  std::memset(found.blocks[0].place.memory, 3, kBlock);
  service_.Set(&FakeService::hanging_, true);
  client_->Acquire(StoreCallId(50), {.chain = Chain(1), .request = 10});
  client_->OnSessionLost(1);
  EXPECT_FALSE(client_->available());
  EXPECT_FALSE(Await<AcquireAnswer>().status.ok());
  Await<StoreLost>();
  EXPECT_EQ(found.blocks[0].place.memory[0], std::byte(3));
  service_.Set(&FakeService::hanging_, false);
  client_->OnSession({2, SessionId(6), std::string(16, 'c')});
  EXPECT_THAT(Acquire(1).blocks, SizeIs(1));
  EXPECT_EQ(link_.fetched(), 2) << "the chunks of another session are others";
  client_->Release(Places(found));
  client_->EndRequest({.request = 1});
  EXPECT_THAT(service_.AwaitTold(1), ElementsAre(std::pair("end", 1)))
      << "the broker does not know of that place";
}

TEST_F(BlockStoreClientTest, EndOfASessionMayComeBeforeIt) {
  client_->OnSessionLost(3);
  client_->OnSession({3, SessionId(8), std::string(16, 'd')});
  EXPECT_FALSE(client_->available());
}

class SlowBlockStoreClientTest : public BlockStoreClientTest {
 protected:
  SlowBlockStoreClientTest() {
    client_->SetWakeup(nullptr);
    client_->Shutdown();
    BlockStoreClient::Options options;
    options.address = address_;
    options.block_bytes = Bytes(kBlock);
    options.block_tokens = 2;
    options.backend = &backend_;
    options.call_timeout = absl::Milliseconds(200);
    client_ = std::make_unique<BlockStoreClient>(options, &link_);
    client_->SetWakeup([this] {
      MutexLock lock(&mu_);
      changed_.SignalAll();
    });
    client_->OnSession({1, SessionId(5), std::string(16, 'b')});
  }
};

TEST_F(SlowBlockStoreClientTest, AnswerThatDoesNotComeInTimeIsAFailure) {
  service_.Set(&FakeService::hanging_, true);
  EXPECT_TRUE(absl::IsDeadlineExceeded(Acquire(1).status));
}

}  // namespace
}  // namespace palimpsest
