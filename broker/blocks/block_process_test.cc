// The block store of the broker's executable under workers in processes of their own: over the real
// sockets, killed at bad moments.
#include <optional>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "broker/blocks/testing/socket_block_worker.h"
#include "broker/server/testing/broker_process_fixture.h"
#include "common/grpc_status.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kBlockBytes = 64 << 10;

class BlockProcessTest : public BrokerProcessFixture {
 protected:
  std::string Yaml(bool tiers = true) const {
    std::string yaml = node_.Config(16, "  reattach_grace: 500ms\n");
    if (!tiers) return yaml;
    return absl::StrCat(yaml,
                        "tiers:\n"
                        "  dram: {bytes: 64 MiB, chunk_bytes: 2 MiB, unmap_deadline: 5s}\n"
                        "  nvme: {bytes: 128 MiB, path: ",
                        node_.folder(),
                        "/disk}\n"
                        "  staging: 8 MiB\n"
                        "  policy: lru\n");
  }

  // With a folder that brokers share, as `name`.
  std::string SharedYaml(const std::string& folder, const std::string& name) const {
    return absl::StrCat(node_.Config(16, "  reattach_grace: 500ms\n"),
                        "tiers:\n"
                        "  dram: {bytes: 64 MiB, chunk_bytes: 2 MiB, unmap_deadline: 5s}\n"
                        "  directory: {bytes: 128 MiB, path: ",
                        folder, ", node: ", name,
                        ", foreign_period: 50ms}\n"
                        "  staging: 8 MiB\n"
                        "  policy: lru\n");
  }

  std::unique_ptr<WorkerProcess> Worker() {
    auto worker = WorkerProcess::Start({"broker/blocks/block_worker_process"});
    EXPECT_TRUE(worker.ok()) << worker.status();
    auto started = std::make_unique<WorkerProcess>(*std::move(worker));
    Must(*started, node_.Hello("alpha"));
    // An earlier one may not be known to be gone yet.
    EXPECT_TRUE(Eventually([&] {
      if (started->Do(absl::StrCat("attach ", node_.control())).ok()) return true;
      Must(*started, node_.Hello("alpha"));
      return false;
    }));
    return started;
  }

  static uint64_t Number(WorkerProcess& worker, const std::string& command) {
    const auto answer = worker.Do(command);
    EXPECT_TRUE(answer.ok()) << command << ": " << answer.status();
    uint64_t number = 0;
    EXPECT_TRUE(absl::SimpleAtoi(answer.value_or("0"), &number)) << *answer;
    return number;
  }
  // Sequences 1 .. n of 4 blocks are in T1.
  static void PutAll(WorkerProcess& worker, uint64_t sequences) {
    for (uint64_t s = 1; s <= sequences; ++s) {
      ASSERT_TRUE(Eventually([&] { return Number(worker, absl::StrCat("put ", s, " 4")) == 4; }));
    }
  }
  void TrimDram() {
    ASSERT_TRUE(Eventually([&] {
      grpc::ClientContext context;
      context.set_deadline(GrpcTimeout(kPatience));
      v1::TrimRequest request;
      request.set_tier(v1::TIER_DRAM);
      request.set_tenant("alpha");
      v1::TrimResponse response;
      const grpc::Status status = Operator()->Trim(&context, request, &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
      return Dram().blocks() == 0;
    })) << Said();
  }

  void TearDown() override {
    if (faulty_.has_value() && !faulty_->Exited()) MustObey("check");
  }

  // One whose tiers do as MustObey tells it; in the end its sums are checked.
  void StartFaultyBroker(const std::string& yaml) {
    const std::string path = node_.folder() + "/broker.yaml";
    ASSERT_TRUE(WriteFileAtomically(path, yaml).ok());
    const UniqueFd output(
        open(SaidPath().c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    auto broker = WorkerProcess::Start({"broker/blocks/faulty_broker", path}, output.get());
    ASSERT_TRUE(broker.ok()) << broker.status();
    faulty_.reset();
    faulty_.emplace(*std::move(broker));
    AwaitBroker();
  }
  std::string MustObey(const std::string& command) {
    const auto answer = faulty_->Do(command);
    EXPECT_TRUE(answer.ok()) << command << ": " << answer.status();
    return answer.value_or("");
  }

  v1::BlockAdmin::Stub* Operator() {
    operator_ = v1::BlockAdmin::NewStub(
        grpc::CreateChannel(absl::StrCat("unix:", node_.folder(), "/state/operator.sock"),
                            grpc::InsecureChannelCredentials()));
    return operator_.get();
  }
  v1::TenantTier Row(int tier) {
    const auto status = Status();
    if (!status.has_value() || status->tiers_size() <= tier) return {};
    return status->tiers(tier).tenants(0);
  }
  v1::TenantTier Dram() { return Row(0); }
  bool NvmeServes() {
    const auto status = Status();
    return status.has_value() && status->tiers_size() == 2 && status->tiers(1).serving();
  }

  std::unique_ptr<v1::BlockAdmin::Stub> operator_;
  std::optional<WorkerProcess> faulty_;
};

TEST_F(BlockProcessTest, BlocksGoDownAndComeBackOverTheSockets) {
  StartBroker(Yaml());
  auto worker = Worker();
  ASSERT_TRUE(Eventually([&] { return NvmeServes(); }));
  PutAll(*worker, 8);
  EXPECT_EQ(Number(*worker, "get 1 4 1 0"), 4u);
  TrimDram();
  EXPECT_EQ(Row(1).blocks(), 32u);
  uint64_t request = 10;
  for (uint64_t s = 1; s <= 8; ++s) {
    EXPECT_TRUE(Eventually(
        [&] { return Number(*worker, absl::StrCat("get ", s, " 4 ", ++request, " 20000")) == 4; }));
  }
  EXPECT_GE(Row(1).hit_blocks(), 32u);
}

// Another node, with everything that the test's own has.
class SecondNode : public BlockProcessTest {
 public:
  using BlockProcessTest::NvmeServes;
  using BlockProcessTest::PutAll;
  using BlockProcessTest::Row;
  using BlockProcessTest::SharedYaml;
  using BlockProcessTest::StartBroker;
  using BlockProcessTest::TrimDram;
  using BlockProcessTest::Worker;
  void TestBody() override {}
};

TEST_F(BlockProcessTest, ABrokerServesWhatAnotherHasStoredInAFolderThatTheyShare) {
  const std::string folder = node_.folder() + "/shared";
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  StartBroker(SharedYaml(folder, "one"));
  auto writer = Worker();
  ASSERT_TRUE(Eventually([&] { return NvmeServes(); }));
  PutAll(*writer, 4);
  TrimDram();
  ASSERT_EQ(Row(1).blocks(), 16u);

  SecondNode second;
  second.StartBroker(second.SharedYaml(folder, "two"));
  auto reader = second.Worker();
  ASSERT_TRUE(Eventually([&] { return second.NvmeServes() && second.Row(1).blocks() == 16; }));
  EXPECT_EQ(second.Row(1).used_bytes(), 0u);
  uint64_t request = 0;
  for (uint64_t s = 1; s <= 4; ++s) {
    // The command compares each block with what the other worker wrote.
    EXPECT_TRUE(Eventually([&] {
      return Number(*reader, absl::StrCat("get ", s, " 4 ", ++request, " 20000")) == 4;
    })) << s;
  }
  EXPECT_GE(second.Row(1).hit_blocks(), 16u);
  // And the other way round, while both run.
  ASSERT_TRUE(Eventually([&] { return Number(*reader, "put 9 4") == 4; }));
  second.TrimDram();
  EXPECT_EQ(second.Row(1).used_bytes(), 4 * kBlockBytes) << "its own four";
  EXPECT_TRUE(Eventually([&] { return Row(1).blocks() == 20; }));
  EXPECT_TRUE(Eventually(
      [&] { return Number(*writer, absl::StrCat("get 9 4 ", ++request, " 20000")) == 4; }));
  // A purge by one takes what it wrote from both.
  grpc::ClientContext context;
  v1::PurgeRequest purge;
  purge.set_tenant("alpha");
  v1::PurgeResponse purged;
  ASSERT_TRUE(Operator()->Purge(&context, purge, &purged).ok());
  EXPECT_TRUE(Eventually([&] { return second.Row(1).blocks() == 4; }));
  EXPECT_EQ(Number(*reader, absl::StrCat("get 1 4 ", ++request, " 1000")), 0u);
}

TEST_F(BlockProcessTest, AWorkerKilledBeforeItCommittedLeavesNothing) {
  StartFaultyBroker(Yaml());
  auto worker = Worker();
  ASSERT_TRUE(Eventually([&] { return Number(*worker, "reserve 1 4") == 4; }));
  EXPECT_EQ(Dram().used_bytes(), 4 * kBlockBytes);
  ASSERT_TRUE(worker->Kill().ok());
  EXPECT_TRUE(Eventually([&] { return Dram().used_bytes() == 0; }));
  worker = Worker();
  EXPECT_EQ(Number(*worker, "get 1 4 1 0"), 0u);
  ASSERT_TRUE(Eventually([&] { return Number(*worker, "put 1 4") == 4; }));
  EXPECT_EQ(Number(*worker, "get 1 4 2 0"), 4u);
}

TEST_F(BlockProcessTest, AWorkerKilledWhileItPinsLetsGo) {
  StartFaultyBroker(Yaml());
  auto worker = Worker();
  PutAll(*worker, 2);
  ASSERT_EQ(Number(*worker, "acquire 1 4 1 0"), 4u);
  ASSERT_TRUE(worker->Kill().ok());
  // Its pins would keep the chunk.
  grpc::ClientContext context;
  v1::SetLimitRequest request;
  request.set_tier(v1::TIER_DRAM);
  request.set_tenant("alpha");
  v1::SetLimitResponse response;
  ASSERT_TRUE(Operator()->SetLimit(&context, request, &response).ok());
  EXPECT_TRUE(Eventually([&] { return Status()->tiers(0).used_bytes() == 0; }))
      << Status()->DebugString();
}

// Promotions stand still at their worst: the disk has read the blocks into the broker's memory,
// places in T1 are reserved, workers wait, and nothing is published.
TEST_F(BlockProcessTest, ABrokerKilledWhileItPromotesServesNothingWrongAfterwards) {
  constexpr uint64_t kSequences = 8;
  StartFaultyBroker(Yaml());
  auto worker = Worker();
  ASSERT_TRUE(Eventually([&] { return NvmeServes(); }));
  PutAll(*worker, kSequences);
  TrimDram();
  ASSERT_EQ(Row(1).blocks(), 4 * kSequences);
  ASSERT_TRUE(Eventually([&] { return Number(*worker, "put 1000 1") == 1; }));
  // One that is promoted whole before, and one that nobody asks for.
  ASSERT_EQ(Number(*worker, "get 1 4 1 20000"), 4u);
  MustObey("hold nvme read");
  ASSERT_TRUE(worker->Tell("get 2 4 2 20000").ok());
  ASSERT_TRUE(Eventually([&] { return MustObey("held nvme") == "4"; }));
  EXPECT_GE(Dram().used_bytes(), (1 + 4 + 4) * kBlockBytes);
  ASSERT_TRUE(faulty_->Kill().ok());
  ASSERT_TRUE(faulty_->AwaitExit(kPatience).ok());
  EXPECT_FALSE(worker->Hear().ok());
  ASSERT_TRUE(worker->Kill().ok());

  StartFaultyBroker(Yaml());
  worker = Worker();
  ASSERT_TRUE(Eventually([&] { return NvmeServes(); }));
  EXPECT_EQ(Dram().used_bytes(), 0u);
  ASSERT_TRUE(Eventually([&] { return Number(*worker, "put 1001 1") == 1; }));
  for (uint64_t s = 1; s <= kSequences; ++s) {
    // The command fails the test where a block has other bytes.
    EXPECT_EQ(Number(*worker, absl::StrCat("get ", s, " 4 ", s, " 20000")), 4u) << s;
  }
}

TEST_F(BlockProcessTest, ABrokerKilledWhileItDemotesServesNothingWrongAfterwards) {
  StartFaultyBroker(Yaml());
  auto worker = Worker();
  ASSERT_TRUE(Eventually([&] { return NvmeServes(); }));
  PutAll(*worker, 4);
  MustObey("hold nvme written");
  const auto trim = [&] {
    grpc::ClientContext context;
    v1::TrimRequest request;
    request.set_tier(v1::TIER_DRAM);
    request.set_tenant("alpha");
    v1::TrimResponse response;
    return FromGrpcStatus(Operator()->Trim(&context, request, &response));
  };
  ASSERT_TRUE(trim().ok());
  ASSERT_TRUE(Eventually([&] { return MustObey("held nvme") != "0"; }));
  ASSERT_TRUE(faulty_->Kill().ok());
  ASSERT_TRUE(faulty_->AwaitExit(kPatience).ok());
  ASSERT_TRUE(worker->Kill().ok());

  StartFaultyBroker(Yaml());
  worker = Worker();
  ASSERT_TRUE(Eventually([&] { return NvmeServes(); }));
  const uint64_t found = Row(1).blocks();
  ASSERT_TRUE(Eventually([&] { return Number(*worker, "put 1001 1") == 1; }));
  uint64_t back = 0;
  for (uint64_t s = 1; s <= 4; ++s) {
    back += Number(*worker, absl::StrCat("get ", s, " 4 ", s, " 20000"));
  }
  EXPECT_LE(back, found) << "what nobody answered for may be there or not";
}

TEST_F(BlockProcessTest, HostileCallsAreRefusedAndSayWhy) {
  StartBroker(Yaml());
  SocketBlockWorker worker(kBlockBytes);
  ASSERT_TRUE(worker.Hello(node_.descriptors(), "alpha", TestNode::Secret("alpha")).ok());
  ASSERT_TRUE(worker.Attach(node_.control()).ok());
  const auto reserve = [&](const v1::ReserveRequest& request) {
    grpc::ClientContext context;
    context.set_deadline(GrpcTimeout(kPatience));
    v1::ReserveResponse response;
    return FromGrpcStatus(worker.stub().Reserve(&context, request, &response));
  };
  v1::ReserveRequest good;
  *good.mutable_session() = worker.session();
  *good.mutable_chain() = worker.Chain(1, 2);
  good.set_block_bytes(kBlockBytes);
  EXPECT_TRUE(reserve(good).ok());

  v1::ReserveRequest request = good;
  request.mutable_session()->set_block_token("0123456789abcdef");
  EXPECT_EQ(reserve(request).code(), absl::StatusCode::kUnauthenticated);
  request = good;
  request.set_block_bytes(3 << 20);
  EXPECT_THAT(reserve(request).message(), HasSubstr("expected 1 to 2097152"));
  request = good;
  request.mutable_chain()->add_keys(7);
  EXPECT_THAT(reserve(request).message(), HasSubstr("expected two halves and 16 tokens"));
  request = good;
  request.mutable_chain()->set_keys(3, good.chain().keys(1));
  EXPECT_THAT(reserve(request).message(), HasSubstr("a key is twice"));
  request = good;
  request.mutable_chain()->set_block_tokens(4097);
  EXPECT_THAT(reserve(request).message(), HasSubstr("4097 tokens in a block"));

  v1::MapChunksRequest map;
  *map.mutable_session() = worker.session();
  map.add_chunk_ids(31);
  grpc::ClientContext map_context;
  v1::MapChunksResponse mapped;
  EXPECT_EQ(FromGrpcStatus(worker.stub().MapChunks(&map_context, map, &mapped)).code(),
            absl::StatusCode::kFailedPrecondition);

  // What operators ask is not answered where workers are.
  auto admin = v1::BlockAdmin::NewStub(grpc::CreateChannel(absl::StrCat("unix:", node_.control()),
                                                           grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  v1::PurgeRequest purge;
  purge.set_tenant("beta");
  v1::PurgeResponse purged;
  EXPECT_EQ(admin->Purge(&context, purge, &purged).error_code(), grpc::StatusCode::UNIMPLEMENTED);
}

TEST_F(BlockProcessTest, HintsReachTheTenantsOwnBlocks) {
  StartBroker(Yaml());
  SocketBlockWorker worker(kBlockBytes);
  ASSERT_TRUE(worker.Hello(node_.descriptors(), "alpha", TestNode::Secret("alpha")).ok());
  ASSERT_TRUE(worker.Attach(node_.control()).ok());
  ASSERT_TRUE(Eventually([&] { return worker.Put(1, 4).value_or(0) == 4; }));
  v1::HintRequest hint;
  *hint.mutable_session() = worker.session();
  *hint.mutable_chain() = worker.Chain(1, 4);
  v1::HintResponse response;
  const auto give = [&] {
    grpc::ClientContext context;
    context.set_deadline(GrpcTimeout(kPatience));
    return FromGrpcStatus(worker.stub().Hint(&context, hint, &response));
  };
  EXPECT_THAT(give().message(), HasSubstr("no action"));
  hint.mutable_action()->mutable_retain()->set_priority(101);
  EXPECT_THAT(give().message(), HasSubstr("priority is 101"));
  hint.mutable_action()->mutable_release();
  hint.set_first_block(5);
  EXPECT_THAT(give().message(), HasSubstr("at most the chain's 4"));
  hint.set_first_block(2);
  const absl::Status given = give();
  ASSERT_TRUE(given.ok()) << given;
  EXPECT_EQ(response.blocks(), 2u);
  EXPECT_EQ(worker.Get(1, 4, 1, absl::ZeroDuration()).value_or(9), 2u);
  hint.clear_chain();
  EXPECT_THAT(give().message(), HasSubstr("neither a chain nor a conversation"));
  hint.set_conversation_id(77);
  EXPECT_THAT(give().message(), HasSubstr("first_block is 2"));
  hint.set_first_block(0);
  EXPECT_TRUE(give().ok());
  EXPECT_EQ(response.blocks(), 0u) << "nobody remembers it";
}

TEST_F(BlockProcessTest, WithoutTiersTheStoreSaysSo) {
  StartBroker(Yaml(false));
  SocketBlockWorker worker(kBlockBytes);
  ASSERT_TRUE(worker.Hello(node_.descriptors(), "alpha", TestNode::Secret("alpha")).ok());
  ASSERT_TRUE(worker.Attach(node_.control()).ok());
  EXPECT_EQ(worker.session().block_token(), "");
  EXPECT_EQ(worker.Put(1, 1).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(Status()->tiers_size(), 0);
}

TEST_F(BlockProcessTest, OperatorsCheckTheTiersAndPurge) {
  StartBroker(Yaml());
  auto worker = Worker();
  ASSERT_TRUE(Eventually([&] { return NvmeServes(); }));
  PutAll(*worker, 2);
  grpc::ClientContext check_context;
  v1::CheckTiersResponse checked;
  ASSERT_TRUE(Operator()->CheckTiers(&check_context, {}, &checked).ok());
  ASSERT_EQ(checked.tiers_size(), 2);
  for (const v1::CheckedTier& tier : checked.tiers()) {
    EXPECT_EQ(tier.error(), "");
    EXPECT_EQ(tier.blocks(), 8u);
  }
  grpc::ClientContext purge_context;
  v1::PurgeRequest purge;
  purge.set_tenant("alpha");
  v1::PurgeResponse purged;
  ASSERT_TRUE(Operator()->Purge(&purge_context, purge, &purged).ok());
  EXPECT_EQ(purged.blocks(), 8u);
  EXPECT_EQ(Number(*worker, "get 1 4 1 0"), 0u);
}

}  // namespace
}  // namespace palimpsest
