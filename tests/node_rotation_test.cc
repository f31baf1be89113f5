// Running tenants whose layers rotate, in nodes of real processes: memory goes to whoever needs KV,
// processes die while it does, and no token changes.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tests/node.h"
#include "tests/node_stories.h"

namespace palimpsest {
namespace {

// Both images and some KV.
constexpr int kPool = 2 * Node::kImageSlabs + 12;

// Two tenants with more to say at once than their KV has room for beside whole models.
class NodeRotationTest : public ::testing::TestWithParam<NodeBackend> {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNodeCannotRun(GetParam()); !why.empty()) GTEST_SKIP() << why;
    NodeOptions options;
    options.backend = GetParam();
    options.pool_slabs = kPool;
    options.tenants = {{.name = "alpha"}, {.name = "beta"}};
    options.policy = {"rotation: {enabled: true}", "reversion_delay: 200ms"};
    node_ = std::make_unique<Node>(options);
    node_->Start();
    for (int i = 0; i < 6; ++i) requests_.push_back(Story("alpha", i, 1200));
    for (const Node::Request& request : Pressure(12, 600)) requests_.push_back(request);
    // For machines that do other things as well.
    for (Node::Request& request : requests_) request.deadline = absl::Minutes(3);
    calm_ = Calm(*node_, requests_);
  }

  // Sends alpha's requests, then, as soon as the broker knows that alpha runs, those of beta.
  void Begin() {
    node_->AwaitReady();
    running_.clear();
    for (const Node::Request& request : requests_) {
      if (request.tenant == "beta" && requests_[running_.size() - 1].tenant == "alpha") {
        node_->Await("an active alpha",
                     [&] { return AllEnded() || node_->Tenant("alpha").load().active(); });
      }
      running_.push_back(node_->GenerateAsync(request));
    }
  }

  // Until layers of whichever tenant rotate. A fast machine has answered everything before restored
  // parameters may be touched: then all of it is asked for again.
  void AwaitRotation() {
    node_->Await("layers that rotate", [&] {
      if (AllEnded()) {
        End();
        Begin();
      }
      return Freed() > 0;
    });
  }

  bool AllEnded() {
    return std::all_of(running_.begin(), running_.end(), [](const auto& result) {
      return result.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
    });
  }

  // Of the tenants whose worker lives, every token is as without pressure; of another one, those
  // that came.
  void End(const std::string& killed = "") {
    for (size_t i = 0; i < running_.size(); ++i) {
      const Generation got = running_[i].get();
      const bool whole = requests_[i].tenant != killed;
      if (whole) {
        EXPECT_TRUE(got.status.ok()) << got.status;
      }
      EXPECT_TRUE(SameTokens(node_->backend(), calm_[i], got, /*greedy=*/true, !whole)) << i;
    }
  }

  uint32_t Freed() {
    return node_->Tenant("alpha").freed_layers() + node_->Tenant("beta").freed_layers();
  }

  void ExpectNothingLost() {
    node_->Await("the end of quarantine", [&] {
      const auto status = node_->BrokerStatus();
      return status.ok() && status->quarantined_slabs() == 0;
    });
    EXPECT_EQ(Node::SumOfStates(*node_->BrokerStatus()), node_->pool_slabs());
    EXPECT_TRUE(node_->EverySlabExistsOnce());
  }

  void KillInMidRotation(const std::string& tenant) {
    Begin();
    ASSERT_NO_FATAL_FAILURE(AwaitRotation());
    node_->KillWorker(tenant);
    End(tenant);
    node_->StartWorker(tenant);
    node_->AwaitReady();
    ExpectNothingLost();
    Begin();
    End();
    EXPECT_TRUE(node_->StopAll().ok());
  }

  std::unique_ptr<Node> node_;
  std::vector<Node::Request> requests_;
  std::vector<Generation> calm_;
  std::vector<std::future<Generation>> running_;
};

INSTANTIATE_TEST_SUITE_P(Backends, NodeRotationTest,
                         ::testing::Values(NodeBackend::kHost, NodeBackend::kCuda,
                                           NodeBackend::kTwoGpus),
                         [](const auto& info) { return NodeBackendName(info.param); });

TEST_P(NodeRotationTest, RunningTenantsGiveLayersWithoutChangingAToken) {
  Begin();
  ASSERT_NO_FATAL_FAILURE(AwaitRotation());
  End();
  node_->Await("the return of every layer", [&] { return Freed() == 0; });
  for (const char* tenant : {"alpha", "beta"}) EXPECT_EQ(node_->Tenant(tenant).slot_slabs(), 0u);
  ExpectNothingLost();
  EXPECT_TRUE(node_->StopAll().ok());
}

TEST_P(NodeRotationTest, OneWorkerKilledInMidRotationCostsItsOwnStreamsAlone) {
  KillInMidRotation("alpha");
}

TEST_P(NodeRotationTest, TheOtherWorkerKilledInMidRotationCostsItsOwnStreamsAlone) {
  KillInMidRotation("beta");
}

TEST_P(NodeRotationTest, BrokerKilledInMidRotationCostsNoToken) {
  Begin();
  ASSERT_NO_FATAL_FAILURE(AwaitRotation());
  node_->KillBroker();
  node_->StartBroker();
  End();
  node_->Await("both workers' return", [&] {
    const auto status = node_->BrokerStatus();
    return status.ok() && status->broker_generation() == 2 && node_->Tenant("alpha").attached() &&
           node_->Tenant("beta").attached();
  });
  ExpectNothingLost();
  Begin();
  End();
  EXPECT_TRUE(node_->StopAll().ok());
}

}  // namespace
}  // namespace palimpsest
