// Random requests, faults and orders of completion against a TierStore, then invariants; and the
// same from several threads over a medium with threads of its own.
#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "broker/tier/fake_tier_backend.h"
#include "broker/tier/threaded_backend.h"
#include "broker/tier/tier_store.h"
#include "common/block_checksum.h"
#include "common/monotonic_time.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using Kind = FakeTierBackend::Kind;

constexpr size_t kLength = 64;

std::vector<std::byte> Content(uint64_t key, uint64_t version) {
  std::vector<std::byte> bytes(kLength);
  for (size_t i = 0; i < kLength; ++i) bytes[i] = static_cast<std::byte>(key * 31 + version + i);
  return bytes;
}

// Even and odd versions of a key are different blocks with the same key.
BlockIdentity Identity(uint64_t key, uint64_t version) {
  return {.key = {key, key},
          .parent = {},
          .tokens = {static_cast<TokenId>(version % 2)},
          .tenant = key % 2 == 0 ? "even" : "odd"};
}

class Fuzzer {
 public:
  explicit Fuzzer(uint64_t seed) : random_(seed) {
    TierStore::Options options;
    options.capacity = Bytes(12 * 128);
    options.max_in_flight = 4;
    options.max_stores_in_flight = 3;
    options.max_queued_loads = 5;
    options.max_queued_stores = 5;
    options.probe_bytes = KiB(4);
    options.own_thread = false;
    options.remeasure_after = absl::Seconds(1);
    options.foreign_blocks = 4;
    medium_.shared = seed % 2 == 0;
    medium_.hold = true;
    store_ = *TierStore::Open(options, std::make_unique<FakeTierBackend>(&medium_), clock_);
    store_->SetTenantLimit("odd", Bytes(5 * 128));
  }

  void Run(int steps) {
    for (int i = 0; i < steps && !testing::Test::HasFailure(); ++i) {
      Step();
      Check();
    }
    CoolDown();
  }

  uint64_t hits() const { return hits_; }
  uint64_t times_opened() const { return times_opened_; }
  uint64_t foreign() const { return foreign_; }

 private:
  struct Request {
    std::shared_ptr<std::vector<std::byte>> memory;
    std::weak_ptr<void> pin;
    bool answered = false;
  };

  uint64_t Roll(uint64_t n) { return random_() % n; }

  TierStore::Done AnswerOf(Request* request, uint64_t key, uint64_t version, bool load) {
    return [=, this](const absl::Status& status) {
      EXPECT_FALSE(request->answered);
      request->answered = true;
      if (load && status.ok()) {
        ++hits_;
        EXPECT_EQ(*request->memory, Content(key, version % 2));
      }
    };
  }

  void Step() {
    const uint64_t key = 1 + Roll(16);
    const uint64_t version = Roll(8) == 0 ? 1 : 0;
    const absl::Time deadline = clock_.Now() + absl::Milliseconds(1 + Roll(4000));
    switch (Roll(12)) {
      case 0:
      case 1:
      case 2: {
        Request* const request = NewRequest(Content(key, version));
        const BlockIdentity id = Identity(key, version);
        (void)Accepted(
            request,
            store_->Store({.record = {.id = id,
                                      .length = Bytes(kLength),
                                      .checksum = BlockChecksum(id.key, *request->memory),
                                      .expiry = clock_.Now() + absl::Seconds(1 + Roll(60))},
                           .from = {*request->memory, Pin(request)},
                           .deadline = deadline},
                          AnswerOf(request, key, version, false)));
        break;
      }
      case 3:
      case 4:
      case 5: {
        Request* const request = NewRequest(std::vector<std::byte>(kLength));
        (void)Accepted(request,
                       store_->Load({.id = Identity(key, version),
                                     .to = {absl::MakeSpan(*request->memory), Pin(request)},
                                     .deadline = deadline},
                                    AnswerOf(request, key, version, true)));
        break;
      }
      case 6:
        store_->Remove({key, key});
        break;
      case 7:
        if (Roll(10) == 0) {
          Request* const request = NewRequest({});
          (void)Accepted(request, store_->Purge(Roll(2) == 0 ? "even" : "odd", deadline,
                                                AnswerOf(request, key, version, false)));
        }
        break;
      case 8:
        clock_.Advance(absl::Milliseconds(Roll(Roll(20) == 0 ? 4000 : 40)));
        break;
      case 9:
        if (medium_.shared && Roll(2) == 0) {
          ChangeForeign(key, version);
          break;
        }
        // A byte rots, in the medium or in the memory of a store that waits.
        if (Roll(6) == 0 && !medium_.blocks.empty()) {
          auto block = medium_.blocks.begin();
          std::advance(block, Roll(medium_.blocks.size()));
          block->second.second[Roll(kLength)] ^= std::byte{1};
        }
        break;
      default:
        FinishSome();
    }
    if (Roll(3) != 0) store_->RunOnce();
  }

  // Another node stores, loses or damages a block, and the next look tells or does not.
  void ChangeForeign(uint64_t key, uint64_t version) {
    const uint64_t place = FakeTierBackend::kForeign + key;
    const auto there = medium_.of_other_nodes.find(place);
    Discovery told{.complete = Roll(2) == 0};
    if (there == medium_.of_other_nodes.end()) {
      const BlockIdentity id = Identity(key, version);
      const std::vector<std::byte> bytes = Content(key, version % 2);
      const BlockRecord record = {.id = id,
                                  .length = Bytes(kLength),
                                  .checksum = BlockChecksum(id.key, bytes),
                                  .expiry = clock_.Now() + absl::Seconds(1 + Roll(120))};
      medium_.of_other_nodes[place] = {record, bytes};
      told.found.push_back({record, TierPlace(place)});
    } else if (Roll(3) == 0) {
      there->second.second[Roll(kLength)] ^= std::byte{1};
    } else {
      const BlockIdentity& id = there->second.first.id;
      told.gone.push_back({id.tenant, id.key});
      medium_.of_other_nodes.erase(there);
    }
    if (Roll(4) != 0 && medium_.looks.size() < 4) medium_.looks.push_back(std::move(told));
  }

  Request* NewRequest(std::vector<std::byte> bytes) {
    std::erase_if(requests_,
                  [](const auto& request) { return request->answered && request->pin.expired(); });
    requests_.push_back(std::make_unique<Request>());
    requests_.back()->memory = std::make_shared<std::vector<std::byte>>(std::move(bytes));
    return requests_.back().get();
  }
  std::shared_ptr<const void> Pin(Request* request) {
    auto pin = std::make_shared<int>();
    request->pin = pin;
    return pin;
  }
  bool Accepted(Request* request, const absl::Status& status) {
    if (status.ok()) return true;
    EXPECT_TRUE(request->pin.expired());
    EXPECT_FALSE(request->answered);
    request->answered = true;
    return false;
  }

  void FinishSome() {
    while (!medium_.pending.empty() && Roll(3) != 0) {
      const uint64_t roll = Roll(20);
      medium_.Finish(Roll(medium_.pending.size()), roll == 0 ? absl::InternalError("EIO")
                                                   : roll == 1
                                                       ? absl::ResourceExhaustedError("ENOSPC")
                                                       : absl::OkStatus());
    }
  }

  void Check() {
    ASSERT_EQ(store_->CheckConsistency(), absl::OkStatus());
    std::set<uint64_t> read;
    std::set<uint64_t> removed;
    for (const FakeTierBackend::Operation& operation : medium_.pending) {
      if (operation.kind == Kind::kRead) read.insert(operation.place.value());
      if (operation.kind == Kind::kRemove) {
        ASSERT_TRUE(removed.insert(operation.place.value()).second) << "removed twice";
      }
      // What the medium may touch is pinned.
      const std::byte* const bytes =
          operation.kind == Kind::kRead ? operation.to.data() : operation.from.data();
      for (const auto& request : requests_) {
        if (bytes != nullptr && bytes == request->memory->data()) {
          ASSERT_FALSE(request->pin.expired());
        }
      }
    }
    for (uint64_t place : removed) {
      ASSERT_FALSE(read.contains(place)) << "removed while read";
      ASSERT_LT(place, FakeTierBackend::kForeign) << "another node's block is removed";
    }
    const TierStatus status = store_->status();
    ASSERT_LE(status.used, status.capacity);
    ASSERT_LE(store_->tenant_status("odd").used, Bytes(5 * 128));
    ASSERT_LE(status.foreign, 4);
    foreign_ = std::max(foreign_, status.foreign);
    times_opened_ = status.times_opened;
  }

  void CoolDown() {
    medium_.hold = false;
    for (int i = 0; i < 200; ++i) {
      medium_.FinishAll();
      store_->RunOnce();
      clock_.Advance(absl::Seconds(1));
    }
    medium_.FinishAll();
    store_->RunOnce();
    store_->RunOnce();
    for (const auto& request : requests_) {
      EXPECT_TRUE(request->answered);
      EXPECT_TRUE(request->pin.expired());
    }
    // Everything has expired: what is left is what could not be removed.
    const TierStatus status = store_->status();
    EXPECT_EQ(status.used, status.quarantined);
    EXPECT_LE(Bytes(128) * static_cast<int64_t>(medium_.blocks.size()), status.quarantined);
    EXPECT_EQ(status.in_flight + status.queued_loads + status.queued_stores, 0);
    EXPECT_EQ(store_->CheckConsistency(), absl::OkStatus());
  }

  std::mt19937_64 random_;
  FakeClock clock_;
  FakeTierBackend::Medium medium_;
  std::vector<std::unique_ptr<Request>> requests_;
  std::unique_ptr<TierStore> store_;
  uint64_t hits_ = 0;
  uint64_t times_opened_ = 0;
  uint64_t foreign_ = 0;
};

TEST(TierStoreFuzz, RandomActionsKeepEveryInvariant) {
  uint64_t hits = 0;
  uint64_t times_opened = 0;
  uint64_t foreign = 0;
  for (uint64_t seed = 0; seed < 12 && !testing::Test::HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    Fuzzer fuzzer(seed);
    fuzzer.Run(600);
    hits += fuzzer.hits();
    times_opened += fuzzer.times_opened();
    foreign += fuzzer.foreign();
  }
  EXPECT_GT(hits, 60) << "hardly anything was served, so hardly anything was tested";
  EXPECT_GT(times_opened, 2);
  EXPECT_GT(foreign, 6) << "hardly anything of other nodes was known";
}

class MemoryMedium : public BlockingBackend {
 public:
  std::string name() const override { return "memory"; }
  Bytes Footprint(Bytes length) const override { return length; }
  absl::StatusOr<std::vector<StoredBlock>> Open() override { return std::vector<StoredBlock>(); }
  absl::StatusOr<TierPlace> Write(const BlockRecord&, absl::Span<const std::byte> from) override {
    MutexLock lock(&mu_);
    blocks_[++last_] = {from.begin(), from.end()};
    return TierPlace(last_);
  }
  absl::Status Read(const BlockRecord&, TierPlace place, absl::Span<std::byte> to) override {
    MutexLock lock(&mu_);
    const auto block = blocks_.find(place.value());
    if (block == blocks_.end()) return absl::InternalError("read of a place that was given up");
    std::memcpy(to.data(), block->second.data(), to.size());
    return absl::OkStatus();
  }
  absl::Status Remove(const BlockRecord&, TierPlace place, TierBackend::RemoveReason) override {
    MutexLock lock(&mu_);
    blocks_.erase(place.value());
    return absl::OkStatus();
  }
  absl::Status Purge(const std::string&) override { return absl::OkStatus(); }

 private:
  Mutex mu_;
  uint64_t last_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, std::vector<std::byte>> blocks_ ABSL_GUARDED_BY(mu_);
};

TEST(TierStoreThreads, ManyAskAtOnce) {
  TierStore::Options options;
  options.capacity = Bytes(20 * kLength);
  auto opened = TierStore::Open(
      options, std::make_unique<ThreadedBackend>(std::make_unique<MemoryMedium>(), 4),
      Clock::Real());
  ASSERT_EQ(opened.status(), absl::OkStatus());
  std::unique_ptr<TierStore> store = *std::move(opened);
  ASSERT_TRUE(store->WaitUntilServing(absl::Seconds(30)));

  constexpr int kThreads = 4;
  constexpr int kRounds = 200;
  std::atomic<int> hits = 0;
  std::atomic<int> failures = 0;
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::mt19937_64 random(t);
      for (int i = 0; i < kRounds; ++i) {
        const uint64_t key = 1 + random() % 16;
        const BlockIdentity id = Identity(key, 0);
        auto memory = std::make_shared<std::vector<std::byte>>(Content(key, 0));
        auto ended = std::make_shared<Notification>();
        auto result = std::make_shared<absl::Status>();
        const auto done = [=](absl::Status status) {
          *result = std::move(status);
          ended->Notify();
        };
        const absl::Time deadline = MonotonicNow() + absl::Seconds(60);
        const bool load = random() % 2 == 0;
        absl::Status accepted;
        if (load) {
          std::fill(memory->begin(), memory->end(), std::byte{0});
          accepted = store->Load(
              {.id = id, .to = {absl::MakeSpan(*memory), memory}, .deadline = deadline}, done);
        } else {
          accepted = store->Store({.record = {.id = id,
                                              .length = Bytes(kLength),
                                              .checksum = BlockChecksum(id.key, *memory)},
                                   .from = {*memory, memory},
                                   .deadline = deadline},
                                  done);
        }
        if (random() % 4 == 0) store->Remove({1 + random() % 16, 1 + random() % 16});
        if (!accepted.ok()) continue;
        if (!ended->WaitForNotificationWithTimeout(absl::Seconds(60))) {
          ++failures;
          return;
        }
        if (load && result->ok()) {
          ++hits;
          if (*memory != Content(key, 0)) ++failures;
        }
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(failures, 0);
  EXPECT_GT(hits, 0);
  EXPECT_EQ(store->CheckConsistency(), absl::OkStatus());
}

}  // namespace
}  // namespace palimpsest
