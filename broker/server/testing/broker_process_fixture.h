// Tests of the broker's executable: it is spawned, killed and started again under workers in
// processes of their own.
#ifndef PALIMPSEST_BROKER_SERVER_TESTING_BROKER_PROCESS_FIXTURE_H_
#define PALIMPSEST_BROKER_SERVER_TESTING_BROKER_PROCESS_FIXTURE_H_

#include <fcntl.h>
#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "broker/server/testing/test_node.h"
#include "broker/server/testing/worker_process.h"
#include "common/fd.h"
#include "common/file.h"
#include "common/grpc_time.h"
#include "common/process.h"
#include "gtest/gtest.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"

namespace palimpsest {

class BrokerProcessFixture : public ::testing::Test {
 protected:
  static constexpr absl::Duration kPatience = absl::Seconds(20);

  explicit BrokerProcessFixture(int layers = TestNode::kImageSlabs - 2) : node_(layers) {}

  // `shell` runs first, in the process that becomes the broker; "$@" is the broker's command line.
  void SpawnBroker(const std::string& yaml, const std::string& shell = "exec \"$@\"") {
    const std::string path = node_.folder() + "/broker.yaml";
    ASSERT_TRUE(WriteFileAtomically(path, yaml).ok());
    const UniqueFd output(
        open(SaidPath().c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    SpawnOptions options;
    options.argv = {"/bin/sh",  "-c", shell, "sh", "broker/server/palimpsest-broker",
                    "--config", path};
    options.output = output.get();
    auto broker = ChildProcess::Spawn(options);
    ASSERT_TRUE(broker.ok()) << broker.status();
    broker_.reset();
    broker_.emplace(*std::move(broker));
  }

  std::string SaidPath() const { return node_.folder() + "/said"; }
  // All that the brokers of this test wrote.
  std::string Said() const { return ReadFile(SaidPath(), MiB(16)).value_or(""); }

  // Waits until it serves.
  void StartBroker(const std::string& yaml, const std::string& shell = "exec \"$@\"") {
    SpawnBroker(yaml, shell);
    AwaitBroker();
  }

  void AwaitBroker() {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 50);
    stub_ = v1::Broker::NewStub(grpc::CreateCustomChannel(
        "unix:" + node_.control(), grpc::InsecureChannelCredentials(), arguments));
    ASSERT_TRUE(Eventually([&] { return Status().has_value(); })) << Said();
  }

  void KillBroker() {
    ASSERT_TRUE(broker_->handle().Kill().ok());
    ASSERT_TRUE(broker_->handle().AwaitExit(kPatience).ok());
  }

  std::optional<v1::GetStatusResponse> Status() {
    grpc::ClientContext context;
    context.set_deadline(GrpcTimeout(absl::Seconds(5)));
    // A call that fails at once leaves the connecting to a poll that comes every five seconds.
    context.set_wait_for_ready(true);
    v1::GetStatusResponse status;
    if (!stub_->GetStatus(&context, v1::GetStatusRequest(), &status).ok()) return std::nullopt;
    EXPECT_EQ(status.free_slabs() + status.granted_slabs() + status.revoking_slabs() +
                  status.cleaning_slabs() + status.quarantined_slabs(),
              status.pool_slabs());
    return status;
  }

  void Must(WorkerProcess& worker, const std::string& command) {
    const auto answer = worker.Do(command);
    ASSERT_TRUE(answer.ok()) << command << ": " << answer.status();
  }

  TestNode node_;
  std::optional<ChildProcess> broker_;
  std::unique_ptr<v1::Broker::Stub> stub_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_TESTING_BROKER_PROCESS_FIXTURE_H_
