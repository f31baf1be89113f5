// Whole brokers on real sockets, with workers in processes of their own, for tests.
#ifndef PALIMPSEST_BROKER_SERVER_TESTING_BROKER_FIXTURE_H_
#define PALIMPSEST_BROKER_SERVER_TESTING_BROKER_FIXTURE_H_

#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "broker/server/broker_server.h"
#include "broker/server/testing/test_node.h"
#include "broker/server/testing/worker_process.h"
#include "common/yaml_config.h"
#include "gtest/gtest.h"

namespace palimpsest {

class BrokerFixture : public ::testing::Test {
 protected:
  static constexpr int kImage = TestNode::kImageSlabs;
  static constexpr absl::Duration kPatience = absl::Seconds(20);

  explicit BrokerFixture(int layers = kImage - 2) : node_(layers) {}

  void StartBroker(const std::string& yaml) {
    auto parsed = YamlConfig::Parse(yaml, "broker.yaml");
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    auto config = ReadBrokerConfig(*parsed, "");
    ASSERT_TRUE(config.ok()) << config.status();
    auto server = BrokerServer::Start(
        *config, [](const absl::Status& status) { FAIL() << "fatal: " << status; });
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
  }

  // Short deadlines, so that what must wait for them does not take long.
  static std::string Hasty() {
    return "  revoke_deadline: 300ms\n  grant_deadline: 5s\n  activation_deadline: 400ms\n"
           "  reattach_grace: 500ms\n  min_residence: 10ms\n  residence_restores: 0\n"
           "  prefetch_grace: 10ms\n";
  }

  std::unique_ptr<WorkerProcess> StartWorker() {
    auto worker = WorkerProcess::Start();
    EXPECT_TRUE(worker.ok()) << worker.status();
    return std::make_unique<WorkerProcess>(*std::move(worker));
  }

  std::unique_ptr<WorkerProcess> Attached(const std::string& tenant) {
    auto worker = StartWorker();
    Must(*worker, node_.Hello(tenant));
    Must(*worker, "attach " + node_.control());
    return worker;
  }

  std::unique_ptr<WorkerProcess> Activated(const std::string& tenant) {
    auto worker = Attached(tenant);
    Must(*worker, "activate");
    Must(*worker, absl::StrCat("await-slabs parameter ", kImage));
    return worker;
  }

  std::string Must(WorkerProcess& worker, const std::string& command) {
    const auto answer = worker.Do(command);
    EXPECT_TRUE(answer.ok()) << answer.status();
    return answer.value_or("");
  }

  std::string Fails(WorkerProcess& worker, const std::string& command) {
    const auto answer = worker.Do(command);
    EXPECT_FALSE(answer.ok()) << command << " gave " << *answer;
    return std::string(answer.status().message());
  }

  std::vector<std::string> SlabsOf(WorkerProcess& worker, const std::string& role) {
    return absl::StrSplit(Must(worker, "slabs " + role), ',', absl::SkipEmpty());
  }

  v1::GetStatusResponse Status() {
    v1::GetStatusResponse status = server_->broker().Status();
    EXPECT_EQ(status.free_slabs() + status.granted_slabs() + status.revoking_slabs() +
                  status.cleaning_slabs() + status.quarantined_slabs(),
              status.pool_slabs());
    const absl::Status consistent = server_->broker().CheckConsistency();
    EXPECT_TRUE(consistent.ok()) << consistent;
    return status;
  }

  bool EventuallyFree(uint32_t slabs) {
    const bool free = Eventually([&] { return Status().free_slabs() == slabs; });
    if (!free) ADD_FAILURE() << Status().ShortDebugString();
    return free;
  }

  TestNode node_;
  std::unique_ptr<BrokerServer> server_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_TESTING_BROKER_FIXTURE_H_
