// A client of the block store between a broker's service, a link and a back-end that do what the
// test says, for tests.
#ifndef PALIMPSEST_WORKER_BLOCKS_BLOCK_STORE_CLIENT_FIXTURE_H_
#define PALIMPSEST_WORKER_BLOCKS_BLOCK_STORE_CLIENT_FIXTURE_H_

#include <grpcpp/grpcpp.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/memory_file.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"
#include "gtest/gtest.h"
#include "worker/blocks/block_store_client.h"

namespace palimpsest {

inline constexpr Bytes kChunk = MiB(2);
inline constexpr uint64_t kBlock = 5000;
inline constexpr absl::Duration kPatience = absl::Seconds(20);

inline UniqueFd NewChunk(Bytes size = kChunk, int seals = kSlabSeals) {
  UniqueFd fd(memfd_create("chunk", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  EXPECT_EQ(ftruncate(fd.get(), size.count()), 0);
  EXPECT_TRUE(SealMemory(fd.get(), seals).ok());
  return fd;
}

// A broker's block store that answers what the test says and remembers what it was told.
class FakeService final : public v1::BlockStore::Service {
 public:
  grpc::Status Reserve(grpc::ServerContext*, const v1::ReserveRequest* request,
                       v1::ReserveResponse* response) override {
    MutexLock lock(&mu_);
    reserve_ = *request;
    for (int i = 0; i < request->chain().keys_size() / 2; ++i) {
      v1::ReservedBlock& block = *response->add_blocks();
      block.set_result(v1::ReservedBlock::RESULT_RESERVED);
      *block.mutable_extent() = Extent(i);
    }
    return grpc::Status::OK;
  }
  grpc::Status Acquire(grpc::ServerContext* context, const v1::AcquireRequest* request,
                       v1::AcquireResponse* response) override {
    MutexLock lock(&mu_);
    acquire_ = *request;
    while (hanging_ && !context->IsCancelled()) {
      changed_.WaitWithTimeout(&mu_, absl::Milliseconds(10));
    }
    const auto held = static_cast<int>(request->held_blocks());
    for (int i = held; i < request->chain().keys_size() / 2; ++i) {
      v1::PinnedBlock& block = *response->add_blocks();
      *block.mutable_extent() = Extent(i);
      block.set_checksum(100 + static_cast<uint64_t>(i));
    }
    v1::LowerBlocks& lower = *response->add_lower();
    lower.set_blocks(3);
    lower.set_expected_seconds(0.5);
    return grpc::Status::OK;
  }
  grpc::Status MapChunks(grpc::ServerContext*, const v1::MapChunksRequest*,
                         v1::MapChunksResponse* response) override {
    MutexLock lock(&mu_);
    if (refusing_) return {grpc::StatusCode::FAILED_PRECONDITION, "it is being revoked"};
    response->set_chunk_bytes(static_cast<uint64_t>(kChunk.count()));
    response->set_token(std::string(32, 't'));
    return grpc::Status::OK;
  }
  grpc::Status Commit(grpc::ServerContext*, const v1::CommitRequest* request,
                      v1::CommitResponse*) override {
    MutexLock lock(&mu_);
    while (holding_commits_) changed_.Wait(&mu_);
    told_.push_back({"commit", request->blocks_size()});
    changed_.SignalAll();
    return grpc::Status::OK;
  }
  grpc::Status Hint(grpc::ServerContext*, const v1::HintRequest* request,
                    v1::HintResponse* response) override {
    MutexLock lock(&mu_);
    hint_ = *request;
    told_.push_back({"hint", static_cast<int>(request->first_block())});
    changed_.SignalAll();
    response->set_blocks(12);
    return grpc::Status::OK;
  }
  grpc::Status Abort(grpc::ServerContext*, const v1::AbortRequest* request,
                     v1::AbortResponse*) override {
    return Note("abort", request->keys_size());
  }
  grpc::Status Release(grpc::ServerContext*, const v1::ReleaseRequest* request,
                       v1::ReleaseResponse*) override {
    MutexLock lock(&mu_);
    while (holding_releases_) changed_.Wait(&mu_);
    told_.push_back({"release", request->extents_size()});
    changed_.SignalAll();
    return grpc::Status::OK;
  }
  grpc::Status EndRequest(grpc::ServerContext*, const v1::EndRequestRequest* request,
                          v1::EndRequestResponse*) override {
    MutexLock lock(&mu_);
    end_ = *request;
    told_.push_back({"end", static_cast<int>(request->request_id())});
    changed_.SignalAll();
    return grpc::Status::OK;
  }

  using Told = std::pair<std::string, int>;
  std::vector<Told> AwaitTold(size_t count) {
    const absl::Time deadline = MonotonicNow() + kPatience;
    MutexLock lock(&mu_);
    while (told_.size() < count && !changed_.WaitWithDeadline(&mu_, deadline)) {
    }
    return told_;
  }
  void Set(bool FakeService::*flag, bool value) {
    MutexLock lock(&mu_);
    this->*flag = value;
    changed_.SignalAll();
  }
  v1::AcquireRequest acquire() {
    MutexLock lock(&mu_);
    return acquire_;
  }
  v1::EndRequestRequest end() {
    MutexLock lock(&mu_);
    return end_;
  }
  v1::HintRequest hint() {
    MutexLock lock(&mu_);
    return hint_;
  }
  v1::ReserveRequest reserve() {
    MutexLock lock(&mu_);
    return reserve_;
  }
  void set_length(uint64_t length) { length_ = length; }
  void set_offset(uint64_t offset) { offset_ = offset; }

  bool hanging_ = false;
  bool refusing_ = false;
  bool holding_releases_ = false;
  bool holding_commits_ = false;

 private:
  v1::BlockExtent Extent(int index) {
    v1::BlockExtent extent;
    extent.set_chunk_id(7);
    extent.set_offset_bytes(offset_ + 8192 * static_cast<uint64_t>(index));
    extent.set_length_bytes(length_);
    return extent;
  }
  grpc::Status Note(const std::string& what, int count) {
    MutexLock lock(&mu_);
    told_.push_back({what, count});
    changed_.SignalAll();
    return grpc::Status::OK;
  }

  Mutex mu_;
  CondVar changed_;
  std::vector<Told> told_;
  v1::AcquireRequest acquire_;
  v1::ReserveRequest reserve_;
  v1::EndRequestRequest end_;
  v1::HintRequest hint_;
  std::atomic<uint64_t> length_ = kBlock;
  std::atomic<uint64_t> offset_ = 0;
};

// Pins nothing, and sees that what is pinned ends in order.
class FakeBackend final : public MemoryBackend {
 public:
  std::string name() const override { return "fake"; }
  absl::StatusOr<std::shared_ptr<RegionMemory>> Reserve(uint32_t, Bytes) override {
    return absl::UnimplementedError("no regions");
  }
  absl::StatusOr<std::unique_ptr<ImageRestorer>> OpenImage(UniqueFd, const ImageShape&) override {
    return absl::UnimplementedError("no images");
  }
  absl::StatusOr<std::unique_ptr<HostPin>> Pin(absl::Span<std::byte> memory) override {
    MutexLock lock(&mu_);
    ++asked_;
    changed_.SignalAll();
    while (holding_) changed_.Wait(&mu_);
    if (refusing_) return absl::ResourceExhaustedError("no more memory may be pinned");
    ++pinned_;
    return std::make_unique<Pinned>(this, memory);
  }

  void SetRefusing() {
    MutexLock lock(&mu_);
    refusing_ = true;
  }
  void SetHolding(bool holding) {
    MutexLock lock(&mu_);
    holding_ = holding;
    changed_.SignalAll();
  }
  // What is pinned stays so until it is over.
  void SetHoldingPinned(bool holding) {
    MutexLock lock(&mu_);
    holding_pinned_ = holding;
    changed_.SignalAll();
  }
  void AwaitAsked() {
    const absl::Time deadline = MonotonicNow() + kPatience;
    MutexLock lock(&mu_);
    while (asked_ == 0 && !changed_.WaitWithDeadline(&mu_, deadline)) {
    }
  }
  int asked() {
    MutexLock lock(&mu_);
    return asked_;
  }
  int pinned() {
    MutexLock lock(&mu_);
    return pinned_;
  }

 private:
  class Pinned final : public HostPin {
   public:
    Pinned(FakeBackend* backend, absl::Span<std::byte> memory)
        : backend_(backend), memory_(memory) {}
    ~Pinned() override {
      std::vector<unsigned char> pages(memory_.size() / 4096 + 1);
      EXPECT_EQ(mincore(memory_.data(), memory_.size(), pages.data()), 0) << "not mapped any more";
      MutexLock lock(&backend_->mu_);
      while (backend_->holding_pinned_) backend_->changed_.Wait(&backend_->mu_);
      --backend_->pinned_;
    }

   private:
    FakeBackend* const backend_;
    const absl::Span<std::byte> memory_;
  };

  Mutex mu_;
  CondVar changed_;
  int asked_ = 0;
  int pinned_ = 0;
  bool refusing_ = false;
  bool holding_ = false;
  bool holding_pinned_ = false;
};

// Gives chunks at once, on the thread that asks.
class FakeLink final : public ArenaLink {
 public:
  explicit FakeLink(FakeBackend* backend) : backend_(backend), chunk_(NewChunk()) {}
  void SetArenaListener(ArenaListener* listener) override { listener_ = listener; }
  void FetchChunk(uint64_t epoch, uint32_t chunk, std::string token) override {
    EXPECT_EQ(token, std::string(32, 't'));
    ++fetched_;
    listener_->OnChunk(epoch, chunk, UniqueFd(dup(chunk_.get())));
  }
  void ChunksUnmapped(uint64_t, std::vector<uint32_t> chunks) override {
    const int pinned = backend_->pinned();
    MutexLock lock(&mu_);
    pinned_when_told_ = pinned;
    unmapped_.insert(unmapped_.end(), chunks.begin(), chunks.end());
    changed_.SignalAll();
  }
  std::vector<uint32_t> unmapped() {
    MutexLock lock(&mu_);
    return unmapped_;
  }
  std::vector<uint32_t> AwaitUnmapped() {
    const absl::Time deadline = MonotonicNow() + kPatience;
    MutexLock lock(&mu_);
    while (unmapped_.empty() && !changed_.WaitWithDeadline(&mu_, deadline)) {
    }
    return unmapped_;
  }
  // Chunks that were pinned when the last were said to be unmapped.
  int pinned_when_told() {
    MutexLock lock(&mu_);
    return pinned_when_told_;
  }
  int fetched() const { return fetched_; }
  void set_chunk(UniqueFd chunk) { chunk_ = std::move(chunk); }

 private:
  FakeBackend* const backend_;
  ArenaListener* listener_ = nullptr;
  UniqueFd chunk_;
  std::atomic<int> fetched_ = 0;
  Mutex mu_;
  CondVar changed_;
  std::vector<uint32_t> unmapped_;
  int pinned_when_told_ = -1;
};

class BlockStoreClientTest : public ::testing::Test {
 protected:
  BlockStoreClientTest() {
    char folder[] = "/tmp/palimpsest-store-XXXXXX";
    folder_ = mkdtemp(folder);
    address_ = "unix:" + folder_ + "/s";
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address_, grpc::InsecureServerCredentials());
    builder.RegisterService(&service_);
    server_ = builder.BuildAndStart();
    BlockStoreClient::Options options;
    options.address = address_;
    options.block_bytes = Bytes(kBlock);
    options.block_tokens = 2;
    options.backend = &backend_;
    options.call_timeout = call_timeout_;
    client_ = std::make_unique<BlockStoreClient>(options, &link_);
    link_.SetArenaListener(client_.get());
    client_->SetWakeup([this] {
      MutexLock lock(&mu_);
      changed_.SignalAll();
    });
    client_->OnSession({1, SessionId(5), std::string(16, 'b')});
  }
  ~BlockStoreClientTest() override {
    client_->SetWakeup(nullptr);
    client_->Shutdown();
    client_.reset();
    service_.Set(&FakeService::hanging_, false);
    server_->Shutdown();
    unlink((folder_ + "/s").c_str());
    rmdir(folder_.c_str());
  }

  BlockChain Chain(size_t blocks) {
    BlockChain chain{.parent = {1, 2}, .keys = {}, .tokens = {}};
    for (size_t i = 0; i < blocks; ++i) {
      chain.keys.push_back({3, i});
      chain.tokens.insert(chain.tokens.end(), {1, 2});
    }
    return chain;
  }

  template <typename Event>
  Event Await() {
    const absl::Time deadline = MonotonicNow() + kPatience;
    for (;;) {
      for (StoreEvent& event : client_->TakeEvents()) events_.push_back(std::move(event));
      for (auto event = events_.begin(); event != events_.end(); ++event) {
        if (auto* found = std::get_if<Event>(&*event)) {
          Event result = std::move(*found);
          events_.erase(event);
          return result;
        }
      }
      MutexLock lock(&mu_);
      if (changed_.WaitWithDeadline(&mu_, std::min(deadline, MonotonicNow() + absl::Seconds(1))) &&
          MonotonicNow() > deadline) {
        ADD_FAILURE() << "nothing came";
        return {};
      }
    }
  }

  AcquireAnswer Acquire(size_t blocks, int32_t held = 0) {
    client_->Acquire(StoreCallId(++calls_), {.chain = Chain(blocks), .held = held, .request = 9});
    return Await<AcquireAnswer>();
  }
  std::vector<StorePlace> Places(const AcquireAnswer& answer) {
    std::vector<StorePlace> places;
    for (const PinnedBlock& block : answer.blocks) places.push_back(block.place);
    return places;
  }

  absl::Duration call_timeout_ = absl::Seconds(10);
  std::string folder_, address_;
  FakeService service_;
  std::unique_ptr<grpc::Server> server_;
  FakeBackend backend_;
  FakeLink link_{&backend_};
  Mutex mu_;
  CondVar changed_;
  std::unique_ptr<BlockStoreClient> client_;
  std::vector<StoreEvent> events_;
  uint64_t calls_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_BLOCKS_BLOCK_STORE_CLIENT_FIXTURE_H_
