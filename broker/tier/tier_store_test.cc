#include "broker/tier/tier_store.h"

#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "broker/tier/fake_tier_backend.h"
#include "common/block_checksum.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using Kind = FakeTierBackend::Kind;

std::vector<std::byte> Content(uint64_t seed, size_t size = 256) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed * 131 + i * 7);
  return bytes;
}

BlockIdentity Identity(uint64_t number, const std::string& tenant = "anna") {
  return {.key = {number, ~number},
          .parent = {number - 1, 5},
          .tokens = {static_cast<TokenId>(number), 2, 3},
          .tenant = tenant};
}

// What became of a request, and the memory that it pinned.
struct Request {
  std::shared_ptr<std::vector<std::byte>> memory;
  std::optional<absl::Status> answer;
  int answers = 0;

  bool pinned() const { return memory.use_count() > 1; }
  TierStore::Done done() {
    return [this](absl::Status status) {
      ++answers;
      answer = std::move(status);
    };
  }
  absl::StatusCode code() const {
    EXPECT_TRUE(answer.has_value()) << "no answer yet";
    return answer.has_value() ? answer->code() : absl::StatusCode::kUnknown;
  }
};

class Watcher : public TierStore::Observer {
 public:
  void OnStored(const BlockRecord& record) override { stored.push_back(record.id.key); }
  void OnRemoved(const BlockRecord& record) override { removed.push_back(record.id.key); }
  void OnFreed(Bytes footprint) override { freed += footprint; }

  std::vector<BlockKey> stored;
  std::vector<BlockKey> removed;
  Bytes freed;
};

class TierStoreTest : public testing::Test {
 protected:
  TierStoreTest() {
    options_.capacity = MiB(1);
    options_.max_in_flight = 4;
    options_.max_stores_in_flight = 2;
    options_.own_thread = false;
    options_.drain = absl::ZeroDuration();
  }
  ~TierStoreTest() override {
    medium_.hold = false;
    medium_.FinishAll();
    if (store_ != nullptr) {
      EXPECT_EQ(store_->CheckConsistency(), absl::OkStatus());
    }
  }

  void OpenStore(bool probe = true) {
    auto store =
        TierStore::Open(options_, std::make_unique<FakeTierBackend>(&medium_), clock_, &watcher_);
    ASSERT_EQ(store.status(), absl::OkStatus());
    store_ = *std::move(store);
    if (!probe) return;
    Settle();
    ASSERT_TRUE(store_->WaitUntilServing(absl::ZeroDuration()));
  }

  // Operations that end at once are followed up until nothing is left to do.
  void Settle() {
    for (int i = 0; i < 30; ++i) store_->RunOnce();
  }

  absl::Status TryStore(Request* request, const BlockIdentity& id,
                        absl::Duration patience = absl::Hours(1),
                        absl::Duration life = absl::InfiniteDuration()) {
    request->memory = std::make_shared<std::vector<std::byte>>(Content(id.key.high));
    return store_->Store({.record = {.id = id,
                                     .length = Bytes(256),
                                     .checksum = BlockChecksum(id.key, *request->memory),
                                     .expiry = clock_.Now() + life},
                          .from = {*request->memory, request->memory},
                          .deadline = clock_.Now() + patience},
                         request->done());
  }
  absl::Status TryLoad(Request* request, const BlockIdentity& id,
                       absl::Duration patience = absl::Hours(1), size_t size = 256) {
    request->memory = std::make_shared<std::vector<std::byte>>(size);
    return store_->Load({.id = id,
                         .to = {absl::MakeSpan(*request->memory), request->memory},
                         .deadline = clock_.Now() + patience},
                        request->done());
  }

  void StoreBlock(const BlockIdentity& id) {
    Request request;
    ASSERT_EQ(TryStore(&request, id), absl::OkStatus());
    Settle();
    ASSERT_EQ(request.code(), absl::StatusCode::kOk);
  }
  // As many as open the breaker.
  void StoreBlockFails(int times) {
    for (int i = 0; i < times; ++i) {
      Request request;
      ASSERT_EQ(TryStore(&request, Identity(1000 + i, "other")), absl::OkStatus());
      Settle();
      ASSERT_EQ(request.code(), medium_.fault.code());
    }
  }
  absl::StatusCode LoadBlock(const BlockIdentity& id) {
    Request request;
    if (absl::Status status = TryLoad(&request, id); !status.ok()) return status.code();
    Settle();
    if (request.code() == absl::StatusCode::kOk) {
      EXPECT_EQ(*request.memory, Content(id.key.high));
    }
    return request.code();
  }

  TierStore::Options options_;
  FakeClock clock_;
  FakeTierBackend::Medium medium_;
  Watcher watcher_;
  std::unique_ptr<TierStore> store_;
};

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
