// What a tier's store does about a medium that is wrong, late, full, failing or gone.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "broker/tier/tier_store.h"
#include "broker/tier/tier_store_fixture.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST_F(TierStoreTest, CorruptedByteIsAMissAndItsPlaceIsNotUsedAgain) {
  OpenStore();
  StoreBlock(Identity(1));
  const uint64_t place = medium_.blocks.begin()->first;
  medium_.blocks[place].second[100] ^= std::byte{1};
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kDataLoss);
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kNotFound);
  EXPECT_EQ(medium_.corrupt_places, std::set<uint64_t>{place});
  const TierStatus status = store_->status();
  EXPECT_EQ(status.counters.misses.corrupt, 1);
  EXPECT_EQ(status.quarantined, status.used);
  EXPECT_GT(status.quarantined, Bytes(256));
  EXPECT_EQ(watcher_.freed, Bytes(0));
  StoreBlock(Identity(1));
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
}

TEST_F(TierStoreTest, BlockOfAnotherKeyInItsPlaceIsAMiss) {
  OpenStore();
  StoreBlock(Identity(1));
  StoreBlock(Identity(2));
  auto first = medium_.blocks.begin();
  auto second = std::next(first);
  std::swap(first->second.second, second->second.second);
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kDataLoss);
}

TEST_F(TierStoreTest, SourceThatChangedIsNotStored) {
  OpenStore();
  Request request;
  ASSERT_EQ(TryStore(&request, Identity(1)), absl::OkStatus());
  (*request.memory)[3] ^= std::byte{8};
  Settle();
  EXPECT_EQ(request.code(), absl::StatusCode::kDataLoss);
  EXPECT_TRUE(medium_.blocks.empty());
  EXPECT_EQ(store_->status().counters.unstored.corrupt, 1);
  EXPECT_EQ(store_->status().breaker, CircuitBreaker::State::kClosed);
  EXPECT_EQ(store_->status().used, Bytes(0));
}

TEST_F(TierStoreTest, DeadlineReleasesTheWaiterAndNotTheMemory) {
  OpenStore();
  StoreBlock(Identity(1));
  medium_.hold = true;
  Request load;
  Request store;
  ASSERT_EQ(TryLoad(&load, Identity(1), absl::Seconds(1)), absl::OkStatus());
  ASSERT_EQ(TryStore(&store, Identity(2), absl::Seconds(1)), absl::OkStatus());
  Settle();
  clock_.Advance(absl::Seconds(1));
  Settle();
  EXPECT_EQ(load.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(store.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(load.pinned());
  EXPECT_TRUE(store.pinned());

  medium_.hold = false;
  medium_.FinishAll();
  Settle();
  EXPECT_FALSE(load.pinned());
  EXPECT_FALSE(store.pinned());
  EXPECT_EQ(load.answers + store.answers, 2);
  EXPECT_EQ(store_->status().counters.hits, 0);
  // What came late was not published, and is gone.
  EXPECT_EQ(LoadBlock(Identity(2)), absl::StatusCode::kNotFound);
  EXPECT_EQ(medium_.blocks.size(), 1);
  EXPECT_EQ(store_->status().counters.unstored.late, 1);
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
}

TEST_F(TierStoreTest, DeadlineOfWhatHasNotBegunFreesAtOnce) {
  OpenStore();
  medium_.hold = true;
  std::vector<Request> requests(3);
  for (int i = 0; i < 3; ++i) {
    ASSERT_EQ(TryStore(&requests[i], Identity(i + 1), absl::Seconds(1)), absl::OkStatus());
  }
  Settle();
  clock_.Advance(absl::Seconds(1));
  Settle();
  EXPECT_EQ(requests[2].code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_FALSE(requests[2].pinned());
  EXPECT_TRUE(requests[0].pinned());
  medium_.FinishAll();
  Settle();
}

TEST_F(TierStoreTest, FailuresOpenTheBreakerAndAProbeClosesIt) {
  OpenStore();
  StoreBlock(Identity(1));
  medium_.fault = absl::InternalError("EIO");
  for (int i = 0; i < 3; ++i) EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kInternal);
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kUnavailable);
  EXPECT_FALSE(store_->Contains(Identity(1)));
  EXPECT_EQ(store_->status().breaker, CircuitBreaker::State::kOpen);

  // The medium still fails: each probe doubles the back-off.
  clock_.Advance(absl::Seconds(1));
  Settle();
  EXPECT_EQ(store_->status().breaker, CircuitBreaker::State::kOpen);
  EXPECT_NE(store_->status().last_failure.find("EIO"), std::string::npos);
  medium_.fault = absl::OkStatus();
  clock_.Advance(absl::Milliseconds(999));
  Settle();
  EXPECT_EQ(store_->status().breaker, CircuitBreaker::State::kOpen);
  clock_.Advance(absl::Milliseconds(1));
  Settle();
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
  EXPECT_EQ(store_->status().times_opened, 1);
}

TEST_F(TierStoreTest, NobodyWaitsForATierThatHangs) {
  OpenStore();
  StoreBlock(Identity(1));
  medium_.hold = true;
  std::vector<Request> requests(6);
  for (int i = 0; i < 5; ++i) ASSERT_EQ(TryLoad(&requests[i], Identity(1)), absl::OkStatus());
  ASSERT_EQ(TryStore(&requests[5], Identity(2)), absl::OkStatus());
  Settle();
  clock_.Advance(options_.breaker.slow + absl::Milliseconds(1));
  Settle();
  for (const Request& request : requests) {
    EXPECT_EQ(request.code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_TRUE(requests[0].pinned());
  EXPECT_FALSE(requests[4].pinned());
  EXPECT_FALSE(requests[5].pinned());
  EXPECT_EQ(store_->status().counters.misses.broken, 5);
  EXPECT_EQ(store_->status().counters.unstored.broken, 1);

  // What ends later is nobody's hit, and does not close the breaker.
  medium_.FinishAll();
  Settle();
  EXPECT_FALSE(requests[0].pinned());
  EXPECT_EQ(store_->status().counters.hits, 0);
  EXPECT_EQ(store_->status().breaker, CircuitBreaker::State::kOpen);
  medium_.hold = false;
  clock_.Advance(absl::Seconds(1));
  Settle();
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
}

TEST_F(TierStoreTest, SlowOperationsOpenTheBreaker) {
  options_.breaker.slow = absl::Milliseconds(100);
  OpenStore();
  StoreBlock(Identity(1));
  medium_.hold = true;
  std::vector<Request> requests(3);
  for (Request& request : requests) {
    ASSERT_EQ(TryLoad(&request, Identity(1)), absl::OkStatus());
    store_->RunOnce();
    // Found out only after they ended.
    clock_.Advance(absl::Milliseconds(101));
    medium_.FinishAll();
    store_->RunOnce();
  }
  EXPECT_EQ(requests[1].code(), absl::StatusCode::kOk);
  EXPECT_EQ(store_->status().breaker, CircuitBreaker::State::kOpen);
}

TEST_F(TierStoreTest, FullMediumRefusesStoresAndServesLoads) {
  OpenStore();
  StoreBlock(Identity(1));
  medium_.hold = true;
  for (int i = 0; i < 5; ++i) {
    Request request;
    ASSERT_EQ(TryStore(&request, Identity(10 + i)), absl::OkStatus());
    store_->RunOnce();
    medium_.Finish(0, absl::ResourceExhaustedError("ENOSPC"));
    Settle();
    EXPECT_EQ(request.code(), absl::StatusCode::kResourceExhausted);
  }
  medium_.hold = false;
  EXPECT_EQ(store_->status().counters.unstored.full, 5);
  EXPECT_EQ(LoadBlock(Identity(1)), absl::StatusCode::kOk);
}

TEST_F(TierStoreTest, ProbeOfAFullMediumSucceeds) {
  medium_.fault = absl::ResourceExhaustedError("ENOSPC");
  OpenStore(/*probe=*/false);
  Settle();
  EXPECT_EQ(store_->status().breaker, CircuitBreaker::State::kClosed);
}

TEST_F(TierStoreTest, PurgeThatIsLateGoesOn) {
  OpenStore();
  medium_.fault = absl::InternalError("EIO");
  StoreBlockFails(3);
  Request purge;
  ASSERT_EQ(store_->Purge("anna", clock_.Now() + absl::Milliseconds(1), purge.done()),
            absl::OkStatus());
  clock_.Advance(absl::Milliseconds(1));
  Settle();
  EXPECT_EQ(purge.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_TRUE(medium_.purged.empty());
  medium_.fault = absl::OkStatus();
  clock_.Advance(absl::Seconds(1));
  Settle();
  EXPECT_EQ(medium_.purged, std::vector<std::string>{"anna"});
}

TEST_F(TierStoreTest, RemovalThatKeepsFailingIsGivenUpAndStaysAccounted) {
  OpenStore();
  StoreBlock(Identity(1));
  medium_.hold = true;
  EXPECT_TRUE(store_->Remove(Identity(1).key));
  for (int i = 0; i < 3; ++i) {
    Settle();
    if (medium_.pending.empty()) {  // the breaker opened meanwhile
      clock_.Advance(absl::Seconds(1));
      Settle();
    }
    ASSERT_EQ(medium_.pending.size(), 1);
    medium_.Finish(0, absl::InternalError("EIO"));
  }
  medium_.hold = false;
  Settle();
  EXPECT_EQ(store_->status().quarantined, Bytes(320));
  EXPECT_EQ(store_->status().used, Bytes(320));
}

TEST_F(TierStoreTest, ClosingCancelsWhatHasNotBegunAndClosesTheMedium) {
  OpenStore();
  std::vector<Request> requests(2);
  ASSERT_EQ(TryStore(&requests[0], Identity(1)), absl::OkStatus());
  ASSERT_EQ(TryStore(&requests[1], Identity(2)), absl::OkStatus());
  store_.reset();
  EXPECT_EQ(requests[0].code(), absl::StatusCode::kCancelled);
  EXPECT_FALSE(requests[1].pinned());
  EXPECT_EQ(medium_.closed, 1);
}

TEST_F(TierStoreTest, ClosingGivesUpOnAMediumThatHangs) {
  OpenStore();
  StoreBlock(Identity(1));
  medium_.hold = true;
  static auto* const load = new Request;  // its memory is pinned for good
  ASSERT_EQ(TryLoad(load, Identity(1)), absl::OkStatus());
  Settle();
  store_.reset();
  EXPECT_EQ(load->code(), absl::StatusCode::kCancelled);
  EXPECT_TRUE(load->pinned());
  EXPECT_EQ(medium_.closed, 0);
  medium_.FinishAll();  // may still write
  EXPECT_EQ(load->answers, 1);
}

}  // namespace
}  // namespace palimpsest
