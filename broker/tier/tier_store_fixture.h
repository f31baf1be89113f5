// A tier's store without threads over a medium in memory, as a test wants it to end operations.
#ifndef PALIMPSEST_BROKER_TIER_TIER_STORE_FIXTURE_H_
#define PALIMPSEST_BROKER_TIER_TIER_STORE_FIXTURE_H_

#include <cstddef>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "broker/tier/fake_tier_backend.h"
#include "broker/tier/tier_store.h"
#include "common/block_checksum.h"
#include "common/clock.h"
#include "gtest/gtest.h"

namespace palimpsest {

inline std::vector<std::byte> Content(uint64_t seed, size_t size = 256) {
  std::vector<std::byte> bytes(size);
  for (size_t i = 0; i < size; ++i) bytes[i] = static_cast<std::byte>(seed * 131 + i * 7);
  return bytes;
}

inline BlockIdentity Identity(uint64_t number, const std::string& tenant = "anna") {
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
  void OnForeign(const BlockRecord& record) override { foreign.push_back(record.id.key); }
  void OnRemoved(const BlockRecord& record) override { removed.push_back(record.id.key); }
  void OnFreed(Bytes footprint) override { freed += footprint; }

  std::vector<BlockKey> stored;
  std::vector<BlockKey> foreign;
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

  // Ends what a probe has begun, each of its steps in `step`, until it is over.
  void EndProbe(absl::Duration step) {
    for (store_->RunOnce(); !medium_.pending.empty(); store_->RunOnce()) {
      ASSERT_EQ(medium_.pending.size(), 1);
      clock_.Advance(step);
      medium_.Finish(0, medium_.fault);
    }
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

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_TIER_STORE_FIXTURE_H_
