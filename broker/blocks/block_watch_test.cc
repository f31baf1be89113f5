// What readers of block events get, over gRPC from a store in this process.
#include "broker/blocks/block_watch.h"

#include <grpc/grpc.h>
#include <stdlib.h>
#include <unistd.h>

#include <filesystem>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "absl/strings/str_cat.h"
#include "broker/blocks/block_service.h"
#include "broker/blocks/testing/block_worker.h"
#include "common/grpc_time.h"
#include "common/process.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/palimpsest/v1/block_store.grpc.pb.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr Bytes kBlock = KiB(64);
constexpr absl::Duration kPatience = absl::Seconds(30);

// Tenant, tier, key.
using Place = std::tuple<std::string, v1::Tier, uint64_t, uint64_t>;

// Reads a stream message by message, and checks that they fit together.
class Reader {
 public:
  Reader(v1::BlockAdmin::Stub& stub, const v1::WatchBlocksRequest& request) {
    context_.set_deadline(GrpcTimeout(kPatience));
    stream_ = stub.WatchBlocks(&context_, request);
  }
  ~Reader() {
    context_.TryCancel();
    if (!finished_) stream_->Finish();
  }

  bool Read() {
    v1::WatchBlocksResponse message;
    if (!stream_->Read(&message)) return false;
    const bool snapshot = message.has_snapshot();
    EXPECT_TRUE(snapshot || !in_snapshot_) << "a snapshot is not over";
    if (message.snapshot().begins()) {
      EXPECT_FALSE(in_snapshot_);
      places_.clear();
      ++snapshots_;
      missed_ += message.snapshot().missed_events();
      in_snapshot_ = true;
    }
    for (const v1::BlockEvent& event : message.events()) {
      if (!snapshot) EXPECT_GT(event.sequence(), sequence_);
      if (!snapshot && consecutive_) EXPECT_EQ(event.sequence(), sequence_ + 1);
      sequence_ = event.sequence();
      const Place place(event.tenant(), event.tier(), event.key().high(), event.key().low());
      if (event.kind() == v1::BlockEvent::KIND_STORED) {
        EXPECT_TRUE(places_.insert(place).second) << message.DebugString();
      } else {
        EXPECT_EQ(places_.erase(place), 1u) << message.DebugString();
      }
    }
    if (message.snapshot().ends()) in_snapshot_ = false;
    sequence_ = message.sequence();
    generation_ = message.generation();
    return true;
  }
  // Until the reader knows of so many places, and no snapshot is open.
  void ReadUntil(size_t places) {
    while (in_snapshot_ || places_.size() != places || snapshots_ + first_ == 0) {
      ASSERT_TRUE(Read()) << "the stream ended with " << places_.size() << " places";
    }
  }
  grpc::Status Finish() {
    while (Read()) {
    }
    finished_ = true;
    return stream_->Finish();
  }
  void Cancel() { context_.TryCancel(); }
  // Of one tenant alone there are gaps.
  void ExpectGaps() { consecutive_ = false; }
  // It goes on from what another one knew.
  void GoesOn(const Reader& other) {
    places_ = other.places_;
    sequence_ = other.sequence_;
    first_ = 1;
  }

  const std::set<Place>& places() const { return places_; }
  int snapshots() const { return snapshots_; }
  uint64_t missed() const { return missed_; }
  uint64_t sequence() const { return sequence_; }
  uint64_t generation() const { return generation_; }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReader<v1::WatchBlocksResponse>> stream_;
  bool finished_ = false;
  bool consecutive_ = true;
  bool in_snapshot_ = false;
  int snapshots_ = 0;
  int first_ = 0;
  uint64_t missed_ = 0;
  uint64_t sequence_ = 0;
  uint64_t generation_ = 0;
  std::set<Place> places_;
};

class BlockWatchTest : public ::testing::Test {
 protected:
  // gRPC stays until the process ends: taking it down waits up to 10 s for a thread that polls.
  static void SetUpTestSuite() { grpc_init(); }

  BlockWatchTest() {
    std::string pattern = "/tmp/palimpsest_watch_XXXXXX";
    folder_ = mkdtemp(pattern.data());
    auto self = ProcessHandle::Open(getpid());
    if (!self.ok()) abort();
    self_ = std::make_shared<const ProcessHandle>(*std::move(self));
  }
  ~BlockWatchTest() override {
    worker_.reset();
    if (store_ != nullptr) store_->Stop();
    if (server_ != nullptr) server_->Shutdown(GrpcTimeout(absl::Seconds(1)));
    server_.reset();
    service_.reset();
    store_.reset();
    std::filesystem::remove_all(folder_);
  }

  // T1 alone, which remembers so many events.
  void Start(size_t events = 1 << 16) {
    auto yaml = YamlConfig::Parse("dram: {bytes: 32 MiB, chunk_bytes: 16 MiB}\npolicy: lru\n",
                                  "tiers.yaml");
    ASSERT_TRUE(yaml.ok()) << yaml.status();
    BlockStore::Options options;
    options.tiers = ReadTiers(yaml->root(), "node");
    ASSERT_TRUE(yaml->Finish().ok());
    options.tenants = {{"alpha", {MiB(16)}, kBlock}, {"beta", {MiB(16)}, kBlock}};
    options.events = events;
    auto store = BlockStore::Open(std::move(options), Clock::Real(), hand_overs_);
    ASSERT_TRUE(store.ok()) << store.status();
    store_ = *std::move(store);
    worker_ = std::make_unique<BlockWorker>(*store_, hand_overs_, SessionId(1), TenantId(0),
                                            "alpha", self_, kBlock);
    Serve(store_.get());
  }
  void Serve(BlockStore* store) {
    service_ = std::make_unique<BlockAdminService>(store);
    const std::string address = "unix:" + folder_ + "/socket";
    grpc::ServerBuilder builder;
    builder.AddListeningPort(address, grpc::InsecureServerCredentials());
    builder.RegisterService(service_.get());
    server_ = builder.BuildAndStart();
    ASSERT_NE(server_, nullptr);
    // What a reader does not take stops the writer soon.
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 4096);
    arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
    stub_ = v1::BlockAdmin::NewStub(
        grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
  }

  // Blocks without bytes.
  void Put(uint64_t sequence, uint64_t count) {
    const auto chain = ChainOf("alpha", sequence, 0, count);
    const absl::Time deadline = MonotonicNow() + kPatience;
    size_t there = 0;
    while (there < count) {
      ASSERT_LT(MonotonicNow(), deadline);
      const auto reserved = worker_->Reserve(chain);
      ASSERT_TRUE(reserved.ok()) << reserved.status();
      std::vector<ArenaLedger::Committed> committed;
      there = 0;
      for (size_t i = 0; i < reserved->size(); ++i) {
        const auto result = (*reserved)[i].result;
        there +=
            result == blocks::Reservation::kReserved || result == blocks::Reservation::kPresent;
        if (result == blocks::Reservation::kReserved) committed.push_back({chain[i].key, 7});
      }
      if (committed.empty()) continue;
      ASSERT_TRUE(store_->Commit(worker_->caller(), committed).ok());
    }
  }
  void Purge() {
    const auto purged = store_->Purge("alpha", kPatience);
    ASSERT_TRUE(purged.ok()) << purged.status();
  }

  std::string folder_;
  std::shared_ptr<const ProcessHandle> self_;
  HandOverTable hand_overs_{Clock::Real(), 64};
  std::unique_ptr<BlockStore> store_;
  std::unique_ptr<BlockWorker> worker_;
  std::unique_ptr<BlockAdminService> service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<v1::BlockAdmin::Stub> stub_;
};

TEST_F(BlockWatchTest, ASnapshotComesFirstAndThenWhatHappens) {
  Start();
  Put(1, 3);
  Reader reader(*stub_, {});
  reader.ReadUntil(3);
  EXPECT_EQ(reader.snapshots(), 1);
  EXPECT_EQ(reader.missed(), 0u);
  EXPECT_TRUE(reader.places().contains({"alpha", v1::TIER_DRAM, 1, 2}));
  Put(2, 4);
  reader.ReadUntil(7);
  Purge();
  reader.ReadUntil(0);
  EXPECT_EQ(reader.snapshots(), 1);
  EXPECT_EQ(reader.sequence(), 14u);
}

TEST_F(BlockWatchTest, AReaderGoesOnFromWhereItWas) {
  Start();
  Put(1, 3);
  Reader first(*stub_, {});
  first.ReadUntil(3);
  first.Cancel();
  Put(2, 2);
  v1::WatchBlocksRequest request;
  request.set_generation(first.generation());
  request.set_after_sequence(first.sequence());
  Reader second(*stub_, request);
  second.GoesOn(first);
  second.ReadUntil(5);
  EXPECT_EQ(second.snapshots(), 0);
  // Numbers of another broker, and one that has not been yet.
  request.set_generation(first.generation() + 1);
  Reader third(*stub_, request);
  third.ReadUntil(5);
  EXPECT_EQ(third.snapshots(), 1);
  request.set_generation(first.generation());
  request.set_after_sequence(1000);
  Reader fourth(*stub_, request);
  fourth.ReadUntil(5);
  EXPECT_EQ(fourth.snapshots(), 1);
  EXPECT_EQ(fourth.missed(), 0u);
}

TEST_F(BlockWatchTest, ASlowReaderIsToldWhatItMissedAndStartsAnew) {
  Start(/*events=*/256);
  Reader reader(*stub_, {});
  ASSERT_TRUE(reader.Read());
  EXPECT_EQ(reader.snapshots(), 1);
  // Far more than the transport takes in advance.
  for (uint64_t round = 1; round <= 200; ++round) {
    Put(round, 100);
    Purge();
  }
  Put(1000, 5);
  const uint64_t last = store_->EventsAfter(0, 1)->last;
  EXPECT_EQ(last, 200u * 200 + 5);
  while (reader.sequence() < last) ASSERT_TRUE(reader.Read());
  reader.ReadUntil(5);
  EXPECT_GE(reader.snapshots(), 2);
  EXPECT_GT(reader.missed(), 20'000u);
  EXPECT_TRUE(reader.places().contains({"alpha", v1::TIER_DRAM, 1000, 5}));
  // It is up to date now, and gets events again.
  const int snapshots = reader.snapshots();
  Put(1001, 2);
  reader.ReadUntil(7);
  EXPECT_EQ(reader.snapshots(), snapshots);
}

TEST_F(BlockWatchTest, ATenantsBlocksAreToldApart) {
  Start();
  Put(1, 100);
  v1::WatchBlocksRequest request;
  request.set_tenant("beta");
  Reader others(*stub_, request);
  ASSERT_TRUE(others.Read());
  EXPECT_TRUE(others.places().empty()) << "of another tenant";
  request.set_tenant("alpha");
  Reader reader(*stub_, request);
  reader.ReadUntil(100);
  request.set_tenant("gamma");
  Reader nobody(*stub_, request);
  EXPECT_EQ(nobody.Finish().error_code(), grpc::StatusCode::NOT_FOUND);
}

TEST_F(BlockWatchTest, ReadersAreBoundedAndEndWithTheStore) {
  Start();
  std::vector<std::unique_ptr<Reader>> readers;
  for (size_t i = 0; i < BlockStore::kMostListeners; ++i) {
    readers.push_back(std::make_unique<Reader>(*stub_, v1::WatchBlocksRequest()));
    ASSERT_TRUE(readers.back()->Read());
  }
  Reader more(*stub_, {});
  EXPECT_EQ(more.Finish().error_code(), grpc::StatusCode::RESOURCE_EXHAUSTED);
  store_->Stop();
  for (const auto& reader : readers) {
    EXPECT_EQ(reader->Finish().error_code(), grpc::StatusCode::UNAVAILABLE);
  }
}

TEST_F(BlockWatchTest, WithoutTiersThereIsNothingToWatch) {
  Serve(nullptr);
  Reader reader(*stub_, {});
  const grpc::Status status = reader.Finish();
  EXPECT_EQ(status.error_code(), grpc::StatusCode::FAILED_PRECONDITION);
  EXPECT_THAT(status.error_message(), HasSubstr("tiers"));
}

}  // namespace
}  // namespace palimpsest
