#include "worker/blocks/block_store_client.h"

#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "common/memory_file.h"
#include "common/monotonic_time.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::Pair;
using ::testing::SizeIs;

constexpr Bytes kChunk = MiB(2);
constexpr uint64_t kBlock = 5000;
constexpr absl::Duration kPatience = absl::Seconds(20);

UniqueFd NewChunk(Bytes size = kChunk, int seals = kSlabSeals) {
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
