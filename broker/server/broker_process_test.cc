// The broker's executable: killed and started again under running workers, its command line, its
// signals.
#include <grpcpp/grpcpp.h>

#include <csignal>
#include <memory>
#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "broker/server/testing/test_node.h"
#include "broker/server/testing/worker_process.h"
#include "common/process.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

constexpr int kImage = TestNode::kImageSlabs;
constexpr absl::Duration kPatience = absl::Seconds(20);

class BrokerProcessTest : public ::testing::Test {
 protected:
  void StartBroker(int pool_slabs) {
    const std::string path = node_.folder() + "/broker.yaml";
    ASSERT_TRUE(WriteFileAtomically(path, node_.Config(pool_slabs)).ok());
    SpawnOptions options;
    options.argv = {"broker/server/palimpsest-broker", "--config", path};
    auto broker = ChildProcess::Spawn(options);
    ASSERT_TRUE(broker.ok()) << broker.status();
    broker_.reset();
    broker_.emplace(*std::move(broker));
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 50);
    stub_ = v1::Broker::NewStub(grpc::CreateCustomChannel(
        "unix:" + node_.control(), grpc::InsecureChannelCredentials(), arguments));
    ASSERT_TRUE(Eventually([&] { return Status().has_value(); }));
  }

  std::optional<v1::GetStatusResponse> Status() {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(5));
    v1::GetStatusResponse status;
    if (!stub_->GetStatus(&context, v1::GetStatusRequest(), &status).ok()) return std::nullopt;
    EXPECT_EQ(status.free_slabs() + status.granted_slabs() + status.revoking_slabs() +
                  status.cleaning_slabs() + status.quarantined_slabs(),
              status.pool_slabs());
    return status;
  }

  void Must(WorkerProcess& worker, const std::string& command) {
    const auto answer = worker.Do(command);
    ASSERT_TRUE(answer.ok()) << answer.status();
  }

  TestNode node_;
  std::optional<ChildProcess> broker_;
  std::unique_ptr<v1::Broker::Stub> stub_;
};

TEST_F(BrokerProcessTest, AKilledBrokersSuccessorFindsEverySlab) {
  StartBroker(14);
  auto alpha = WorkerProcess::Start();
  auto beta = WorkerProcess::Start();
  ASSERT_TRUE(alpha.ok() && beta.ok());
  for (auto& [worker, tenant] : {std::pair{&*alpha, "alpha"}, std::pair{&*beta, "beta"}}) {
    Must(*worker, node_.Hello(tenant));
    Must(*worker, "attach " + node_.control());
    Must(*worker, "activate");
    Must(*worker, absl::StrCat("await-slabs parameter ", kImage));
    Must(*worker, "kv 2 1");
    Must(*worker, "await-slabs kv 2");
  }
  ASSERT_TRUE(broker_->handle().Kill().ok());
  ASSERT_TRUE(broker_->handle().AwaitExit(kPatience).ok());
  Must(*alpha, "await-lost");
  ASSERT_TRUE(beta->Kill().ok());
  ASSERT_TRUE(beta->AwaitExit(kPatience).ok());

  StartBroker(14);
  // Beta died with the old broker: its slabs are fresh and free. Alpha's wait for alpha.
  ASSERT_TRUE(Eventually([&] {
    const auto status = Status();
    return status && status->free_slabs() == 14 - kImage - 2;
  }));
  EXPECT_EQ(Status()->quarantined_slabs(), kImage + 2);
  Must(*alpha, "drop");
  Must(*alpha, node_.Hello("alpha"));
  Must(*alpha, "reattach " + node_.control());
  const auto status = Status();
  EXPECT_EQ(status->broker_generation(), 2);
  EXPECT_EQ(status->granted_slabs(), kImage + 2);
  EXPECT_EQ(status->quarantined_slabs(), 0);
  ASSERT_TRUE(alpha->Kill().ok());
  EXPECT_TRUE(Eventually([&] { return Status()->free_slabs() == 14; }));
}

TEST_F(BrokerProcessTest, SigtermIsACleanEnd) {
  StartBroker(12);
  ASSERT_TRUE(broker_->handle().Signal(SIGTERM).ok());
  EXPECT_TRUE(broker_->Wait(kPatience).ok());
  EXPECT_FALSE(std::filesystem::exists(node_.descriptors()));
}

TEST_F(BrokerProcessTest, AWrongConfigurationEndsItAtOnce) {
  const std::string path = node_.folder() + "/broker.yaml";
  ASSERT_TRUE(WriteFileAtomically(path, "node: x\nsurprise: 1\n").ok());
  const std::string said = node_.folder() + "/said";
  const UniqueFd output(open(said.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  SpawnOptions options;
  options.argv = {"broker/server/palimpsest-broker", "--config", path};
  options.output = output.get();
  auto broker = ChildProcess::Spawn(options);
  ASSERT_TRUE(broker.ok());
  EXPECT_THAT(std::string(broker->Wait(kPatience).message()), HasSubstr("status 1"));
  EXPECT_THAT(*ReadFile(said, KiB(64)), HasSubstr("broker.yaml:2"));
}

}  // namespace
}  // namespace palimpsest
