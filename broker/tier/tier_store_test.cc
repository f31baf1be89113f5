#include "broker/tier/tier_store.h"

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "broker/tier/tier_store_fixture.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using Kind = FakeTierBackend::Kind;

TEST_F(TierStoreTest, StoredBlockComesBackAndPinsAreLetGo) {
  OpenStore();
  Request stored;
  ASSERT_EQ(TryStore(&stored, Identity(1)), absl::OkStatus());
  EXPECT_TRUE(stored.pinned());
  EXPECT_FALSE(store_->Contains(Identity(1)));
  Settle();
  EXPECT_EQ(stored.code(), absl::StatusCode::kOk);
  EXPECT_FALSE(stored.pinned());
  EXPECT_TRUE(store_->Contains(Identity(1)));
  EXPECT_EQ(watcher_.stored, std::vector<BlockKey>{Identity(1).key});

  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
  const TierStatus status = store_->status();
  EXPECT_EQ(status.counters.hits, 1);
  EXPECT_EQ(status.counters.bytes_loaded, 256);
  EXPECT_EQ(status.blocks, 1);
  EXPECT_EQ(status.used, Bytes(256) + FakeTierBackend::kHeader);
}

TEST_F(TierStoreTest, NothingIsServedBeforeTheFirstProbe) {
  medium_.hold = true;
  OpenStore(/*probe=*/false);
  Request request;
  EXPECT_TRUE(absl::IsUnavailable(TryStore(&request, Identity(1))));
  EXPECT_EQ(store_->ExpectedLoad(Bytes(1)), absl::InfiniteDuration());
  while (!store_->WaitUntilServing(absl::ZeroDuration())) {
    store_->RunOnce();
    ASSERT_EQ(medium_.pending.size(), 1);
    clock_.Advance(absl::Milliseconds(medium_.pending[0].record->length > KiB(4) ? 9 : 1));
    medium_.Finish(0);
    store_->RunOnce();
  }
  EXPECT_TRUE(medium_.blocks.empty()) << "scratch blocks are left";
  const TierStatus status = store_->status();
  EXPECT_NEAR(absl::ToDoubleMilliseconds(status.load_latency), 1, 0.1);
  EXPECT_NEAR(status.load_bandwidth, double(1 << 20) / 0.008, 1e6);
  EXPECT_NEAR(absl::ToDoubleMilliseconds(store_->ExpectedLoad(MiB(1))), 9, 0.1);
}

TEST_F(TierStoreTest, WhatNobodyUsesIsMeasuredAgain) {
  options_.remeasure_after = absl::Seconds(1);
  medium_.hold = true;
  OpenStore(/*probe=*/false);
  EndProbe(absl::Milliseconds(100));
  EXPECT_EQ(store_->ExpectedLoad(KiB(4)), absl::Milliseconds(100));

  clock_.Advance(absl::Milliseconds(999));
  store_->RunOnce();
  EXPECT_TRUE(medium_.pending.empty());
  clock_.Advance(absl::Milliseconds(1));
  EndProbe(absl::Milliseconds(1));
  EXPECT_EQ(store_->ExpectedLoad(KiB(4)), absl::Milliseconds(1)) << "what was believed is gone";
  EXPECT_EQ(store_->status().store_latency, absl::Milliseconds(1));
  EXPECT_TRUE(medium_.blocks.empty()) << "scratch blocks are left";

  // That was a surprise. From here on it is as expected, and looked at less and less.
  clock_.Advance(absl::Seconds(1));
  EndProbe(absl::Milliseconds(1));
  for (const int seconds : {2, 4, 8, 16, 32, 60, 60}) {
    clock_.Advance(absl::Seconds(seconds) - absl::Milliseconds(1));
    store_->RunOnce();
    ASSERT_TRUE(medium_.pending.empty()) << seconds;
    clock_.Advance(absl::Milliseconds(1));
    store_->RunOnce();
    ASSERT_FALSE(medium_.pending.empty()) << seconds;
    EndProbe(absl::Milliseconds(1));
  }
}

TEST_F(TierStoreTest, TransfersAreMeasurementsEnough) {
  options_.remeasure_after = absl::Seconds(1);
  OpenStore();
  medium_.hold = true;
  for (int i = 1; i < 10; ++i) {
    clock_.Advance(absl::Milliseconds(900));
    Request request;
    ASSERT_EQ(TryStore(&request, Identity(static_cast<uint64_t>(i))), absl::OkStatus());
    store_->RunOnce();
    ASSERT_EQ(medium_.pending.size(), 1);
    clock_.Advance(absl::Milliseconds(900));
    store_->RunOnce();
    ASSERT_EQ(medium_.pending.size(), 1) << "measured beside a transfer";
    medium_.Finish(0);
    store_->RunOnce();
    ASSERT_TRUE(medium_.pending.empty());
  }
}

TEST_F(TierStoreTest, TierThatFailsWhileNobodyUsesItIsLeftAlone) {
  options_.remeasure_after = absl::Seconds(1);
  OpenStore();
  medium_.fault = absl::InternalError("EIO");
  for (const int seconds : {1, 2, 4}) {
    EXPECT_EQ(store_->status().breaker, CircuitBreaker::State::kClosed);
    clock_.Advance(absl::Seconds(seconds));
    Settle();
  }
  EXPECT_EQ(store_->status().breaker, CircuitBreaker::State::kOpen);
  EXPECT_NE(store_->status().last_failure.find("EIO"), std::string::npos);
  medium_.fault = absl::OkStatus();
  clock_.Advance(absl::Seconds(1));
  Settle();
  EXPECT_EQ(store_->status().breaker, CircuitBreaker::State::kClosed);
}

TEST_F(TierStoreTest, CollisionsAreMisses) {
  OpenStore();
  StoreBlock(Identity(1));
  BlockIdentity tokens = Identity(1);
  tokens.tokens.back() = 4;
  BlockIdentity parent = Identity(1);
  parent.parent.low = 6;
  const BlockIdentity tenant = Identity(1, "berta");
  for (const BlockIdentity& other : {tokens, parent, tenant}) {
    EXPECT_EQ(LoadBlock(other), absl::StatusCode::kNotFound);
    EXPECT_FALSE(store_->Contains(other));
    Request request;
    EXPECT_TRUE(absl::IsAlreadyExists(TryStore(&request, other)));
  }
  EXPECT_EQ(store_->status().counters.misses.collided, 3);
  EXPECT_EQ(LoadBlock(Identity(2)), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->status().counters.misses.absent, 1);
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
}

TEST_F(TierStoreTest, LoadsRunBeforeStoresAndHavePlacesOfTheirOwn) {
  OpenStore();
  StoreBlock(Identity(1));
  medium_.hold = true;
  std::vector<Request> requests(8);
  for (int i = 0; i < 4; ++i) {
    ASSERT_EQ(TryStore(&requests[i], Identity(10 + i)), absl::OkStatus());
  }
  Settle();
  EXPECT_EQ(medium_.pending.size(), 2) << "stores take at most their share";
  for (int i = 4; i < 8; ++i) ASSERT_EQ(TryLoad(&requests[i], Identity(1)), absl::OkStatus());
  Settle();
  ASSERT_EQ(medium_.pending.size(), 4);
  EXPECT_EQ(medium_.pending[2].kind, Kind::kRead);
  medium_.Finish(0);
  Settle();
  ASSERT_EQ(medium_.pending.size(), 4);
  EXPECT_EQ(medium_.pending[3].kind, Kind::kRead) << "a load came first, though it came later";
  medium_.hold = false;
  medium_.FinishAll();
  Settle();
  for (const Request& request : requests) EXPECT_EQ(request.code(), absl::StatusCode::kOk);
}

TEST_F(TierStoreTest, FullQueuesRefuse) {
  options_.max_queued_loads = 2;
  options_.max_queued_stores = 2;
  OpenStore();
  StoreBlock(Identity(1));
  std::vector<Request> requests(6);
  for (int i = 0; i < 2; ++i) {
    EXPECT_EQ(TryLoad(&requests[i], Identity(1)), absl::OkStatus());
    EXPECT_EQ(TryStore(&requests[2 + i], Identity(10 + i)), absl::OkStatus());
  }
  EXPECT_TRUE(absl::IsResourceExhausted(TryLoad(&requests[4], Identity(1))));
  EXPECT_TRUE(absl::IsResourceExhausted(TryStore(&requests[5], Identity(12))));
  EXPECT_EQ(store_->status().used.count(), 3 * (256 + 64)) << "a refused block took room";
  Settle();
  EXPECT_EQ(requests[3].code(), absl::StatusCode::kOk);
}

TEST_F(TierStoreTest, BudgetsOfTierAndTenantRefuse) {
  options_.capacity = Bytes(3 * 320);
  OpenStore();
  store_->SetTenantLimit("berta", Bytes(320));
  StoreBlock(Identity(1, "berta"));
  Request request;
  absl::Status status = TryStore(&request, Identity(2, "berta"));
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_NE(status.message().find("berta"), std::string::npos);
  StoreBlock(Identity(3));
  StoreBlock(Identity(4));
  EXPECT_TRUE(absl::IsResourceExhausted(TryStore(&request, Identity(5))));
  EXPECT_EQ(store_->tenant_status("berta").used, Bytes(320));
  EXPECT_EQ(store_->tenant_status("anna").blocks, 2);

  EXPECT_TRUE(store_->Remove(Identity(3).key));
  EXPECT_FALSE(store_->Remove(Identity(3).key));
  Settle();
  EXPECT_EQ(watcher_.freed, Bytes(320));
  StoreBlock(Identity(5));
  store_->SetCapacity(Bytes(320));
  EXPECT_EQ(LoadBlock(Identity(5)), absl::StatusCode::kOk);
  EXPECT_TRUE(store_->Remove(Identity(5).key));
  Settle();
  EXPECT_TRUE(absl::IsResourceExhausted(TryStore(&request, Identity(6))));
}

TEST_F(TierStoreTest, RemovalWaitsForLoadsThatHaveBegun) {
  OpenStore();
  StoreBlock(Identity(1));
  medium_.hold = true;
  Request load;
  ASSERT_EQ(TryLoad(&load, Identity(1)), absl::OkStatus());
  Settle();
  EXPECT_TRUE(store_->Remove(Identity(1).key));
  Settle();
  ASSERT_EQ(medium_.pending.size(), 1) << "the place was given up while it was read";
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kNotFound);
  medium_.hold = false;
  medium_.FinishAll();
  Settle();
  EXPECT_EQ(load.code(), absl::StatusCode::kOk);
  EXPECT_TRUE(medium_.blocks.empty());
  EXPECT_EQ(store_->status().used, Bytes(0));
}

TEST_F(TierStoreTest, RemovedWhileStoredIsCancelled) {
  OpenStore();
  medium_.hold = true;
  std::vector<Request> requests(3);
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(TryStore(&requests[i], Identity(i + 1)), absl::OkStatus());
  }
  Settle();
  EXPECT_TRUE(store_->Remove(Identity(1).key));
  EXPECT_TRUE(store_->Remove(Identity(3).key));  // still queued
  Settle();
  EXPECT_EQ(requests[2].code(), absl::StatusCode::kCancelled);
  medium_.hold = false;
  medium_.FinishAll();
  Settle();
  EXPECT_EQ(requests[0].code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(requests[1].code(), absl::StatusCode::kOk);
  EXPECT_EQ(medium_.blocks.size(), 1);
}

TEST_F(TierStoreTest, BlocksExpire) {
  options_.longest_life = absl::Hours(2);
  OpenStore();
  Request request;
  ASSERT_EQ(TryStore(&request, Identity(1), absl::Hours(9), absl::Hours(1)), absl::OkStatus());
  Settle();
  StoreBlock(Identity(2));  // lives forever, if it were not for longest_life
  clock_.Advance(absl::Hours(1));
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kNotFound);
  EXPECT_EQ(store_->status().counters.misses.expired, 1);
  EXPECT_EQ(LoadBlock(Identity(2)), absl::StatusCode::kOk);
  clock_.Advance(absl::Hours(1));
  Settle();
  EXPECT_TRUE(medium_.blocks.empty());
  EXPECT_EQ(watcher_.removed, (std::vector<BlockKey>{Identity(1).key, Identity(2).key}));
}

TEST_F(TierStoreTest, PurgeForgetsATenantAlsoInTheQueueAndUnderWay) {
  OpenStore();
  StoreBlock(Identity(1));
  StoreBlock(Identity(2, "berta"));
  medium_.hold = true;
  std::vector<Request> requests(3);
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(TryStore(&requests[i], Identity(10 + i)), absl::OkStatus());
  }
  Settle();
  Request purge;
  ASSERT_EQ(store_->Purge("anna", clock_.Now() + absl::Hours(1), purge.done()), absl::OkStatus());
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kNotFound);
  Settle();
  EXPECT_FALSE(purge.answer.has_value());
  medium_.hold = false;
  medium_.FinishAll();
  Settle();
  EXPECT_EQ(purge.code(), absl::StatusCode::kOk);
  EXPECT_EQ(medium_.purged, std::vector<std::string>{"anna"});
  for (const Request& request : requests) EXPECT_EQ(request.code(), absl::StatusCode::kCancelled);
  EXPECT_EQ(store_->tenant_status("anna").used, Bytes(0));
  EXPECT_EQ(medium_.blocks.size(), 1);
  EXPECT_EQ(LoadBlock(Identity(2, "berta")), absl::StatusCode::kOk);
  StoreBlock(Identity(1));
}

TEST_F(TierStoreTest, WriteBackIsPaced) {
  options_.store_bytes_per_second = Bytes(256);
  OpenStore();
  std::vector<Request> requests(2);
  ASSERT_EQ(TryStore(&requests[0], Identity(1)), absl::OkStatus());
  ASSERT_EQ(TryStore(&requests[1], Identity(2)), absl::OkStatus());
  Settle();
  EXPECT_TRUE(requests[0].answer.has_value());
  EXPECT_FALSE(requests[1].answer.has_value());
  EXPECT_EQ(store_->RunOnce(), clock_.Now() + absl::Seconds(1));
  clock_.Advance(absl::Seconds(1));
  Settle();
  EXPECT_EQ(requests[1].code(), absl::StatusCode::kOk);
}

TEST_F(TierStoreTest, BlocksOfAnEarlierProcessAreServedUnlessTheyAreScratch) {
  const auto leave = [&](const BlockIdentity& id) {
    const std::vector<std::byte> bytes = Content(id.key.high);
    const BlockRecord record = {
        .id = id, .length = Bytes(256), .checksum = BlockChecksum(id.key, bytes)};
    medium_.blocks[++medium_.last_place] = {record, bytes};
  };
  leave(Identity(1));
  leave(Identity(2, ".probe"));
  options_.longest_life = absl::Hours(1);
  OpenStore();
  EXPECT_EQ(store_->Records().size(), 1);
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
  EXPECT_EQ(medium_.blocks.size(), 1);
  clock_.Advance(absl::Hours(1));
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kNotFound) << "its life was not bounded";
}

TEST_F(TierStoreTest, BlocksOfOtherNodesAreFoundComparedAndVerified) {
  medium_.shared = true;
  OpenStore();
  const auto leave = [&](const BlockIdentity& id) {
    const std::vector<std::byte> bytes = Content(id.key.high);
    medium_.of_other_nodes[FakeTierBackend::kForeign + id.key.high] = {
        {.id = id, .length = Bytes(256), .checksum = BlockChecksum(id.key, bytes)}, bytes};
  };
  leave(Identity(1));
  leave(Identity(2));
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
  EXPECT_EQ(store_->status().used, Bytes(0)) << "only the writer accounts";
  BlockIdentity collision = Identity(2);
  collision.tokens.push_back(1);
  EXPECT_EQ(LoadBlock(collision), absl::StatusCode::kNotFound);
  EXPECT_EQ(LoadBlock(Identity(3)), absl::StatusCode::kNotFound);
  medium_.of_other_nodes[FakeTierBackend::kForeign + 2].second[0] ^= std::byte{1};
  EXPECT_EQ(LoadBlock(Identity(2)), absl::StatusCode::kDataLoss);
  EXPECT_EQ(medium_.of_other_nodes.size(), 2);
}

TEST_F(TierStoreTest, WrongRequestsAreRefused) {
  OpenStore();
  StoreBlock(Identity(1));
  Request request;
  EXPECT_TRUE(absl::IsInvalidArgument(TryLoad(&request, Identity(1), absl::Hours(1), 255)));
  EXPECT_TRUE(absl::IsDeadlineExceeded(TryLoad(&request, Identity(1), absl::ZeroDuration())));
  EXPECT_TRUE(absl::IsInvalidArgument(TryStore(&request, Identity(2, ""))));
  EXPECT_TRUE(absl::IsInvalidArgument(TryStore(&request, Identity(2, ".probe"))));
  BlockIdentity long_one = Identity(2);
  long_one.tokens.resize(kMaxBlockTokens + 1);
  EXPECT_TRUE(absl::IsInvalidArgument(TryStore(&request, long_one)));
  EXPECT_EQ(store_->status().used, Bytes(320));

  options_.max_stores_in_flight = 5;
  EXPECT_TRUE(absl::IsInvalidArgument(
      TierStore::Open(options_, std::make_unique<FakeTierBackend>(&medium_), clock_).status()));
}

}  // namespace
}  // namespace palimpsest
