// Temporal sharing on a node of real processes: tenants take turns in a pool that holds the
// parameters of one of them, processes die and hang, and no token changes.
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <set>

#include "absl/strings/str_cat.h"
#include "tests/node.h"
#include "tests/node_stories.h"

namespace palimpsest {
namespace {

class TurnsTest : public ::testing::TestWithParam<NodeBackend> {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNodeCannotRun(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }

  // The pool holds one model and its KV.
  static NodeOptions Temporal(const std::vector<NodeTenant>& tenants) {
    NodeOptions options;
    options.backend = GetParam();
    options.pool_slabs = 18;
    options.tenants = tenants;
    options.policy = {"sharing: temporal", "quantum: 150ms", "turn_deadline: 2s",
                      "min_residence: 100ms"};
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, TurnsTest,
                         ::testing::Values(NodeBackend::kHost, NodeBackend::kCuda),
                         [](const auto& info) { return NodeBackendName(info.param); });

std::vector<Node::Request> Stories(const std::vector<std::string>& tenants, int each,
                                   int max_tokens) {
  std::vector<Node::Request> requests;
  for (int i = 0; i < each; ++i) {
    for (const std::string& tenant : tenants) requests.push_back(Story(tenant, i, max_tokens));
  }
  return requests;
}

// Who has a turn; fails the test if it is more than one.
std::string Holder(Node& node) {
  const auto status = node.BrokerStatus();
  std::string holder;
  if (!status.ok()) return holder;
  for (const auto& tenant : status->tenants()) {
    if (!tenant.has_turn()) continue;
    EXPECT_EQ(holder, "") << "beside " << tenant.tenant();
    holder = tenant.tenant();
  }
  return holder;
}

TEST_P(TurnsTest, TwoTenantsThatFitOnlyOneByOneShareByTurns) {
  Node node(Temporal({{"alpha"}, {"beta"}}));
  node.Start();
  const std::vector<Node::Request> requests = Stories({"alpha", "beta"}, 4, 400);
  const std::vector<Generation> calm = OneByOne(node, requests);
  EXPECT_EQ(node.BrokerStatus()->sharing(), "temporal");
  SteadyPressure both(node, requests);
  std::string last;
  int changes = 0;
  node.Await("turns of both", [&] {
    const std::string holder = Holder(node);
    if (!holder.empty() && holder != last) {
      ++changes;
      last = holder;
    }
    return changes > 3;
  });
  ExpectSameTokens(node, requests, calm, both.Answers());
  EXPECT_EQ(Node::SumOfStates(*node.BrokerStatus()), node.pool_slabs());
  EXPECT_TRUE(node.EverySlabExistsOnce());
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(TurnsTest, ThreeTenantsAllGetTheirTurns) {
  NodeOptions options = Temporal({{"alpha"}, {.name = "beta", .priority = 1}, {"gamma"}});
  options.pool_slabs = 30;
  Node node(options);
  node.Start();
  const std::vector<Node::Request> requests = Stories({"alpha", "beta", "gamma"}, 4, 300);
  const std::vector<Generation> calm = OneByOne(node, requests);
  ExpectSameTokens(node, requests, calm, AllAtOnce(node, requests));
  EXPECT_EQ(Node::SumOfStates(*node.BrokerStatus()), node.pool_slabs());
  EXPECT_TRUE(node.EverySlabExistsOnce());
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(TurnsTest, KilledHolderLeavesTheTurnToTheOther) {
  NodeOptions options = Temporal({{"alpha"}, {"beta"}});
  options.policy[1] = "quantum: 1h";
  Node node(options);
  node.Start();
  const Generation calm = node.Generate(Story("beta", 0, 200));
  Node::Request doomed = Story("alpha", 0, 1900);
  std::atomic<bool> started = false;
  doomed.on_message = [&](const Generation&) { return started = true; };
  auto alpha = node.GenerateAsync(doomed);
  node.Await("alpha's turn", [&] { return started && Holder(node) == "alpha"; });
  auto beta = node.GenerateAsync(Story("beta", 0, 200));
  node.Await("beta's wait", [&] { return node.Tenant("beta").waits_for_turn(); });
  node.KillWorker("alpha");
  EXPECT_EQ(alpha.get().status.code(), absl::StatusCode::kUnavailable);
  const Generation got = beta.get();
  EXPECT_TRUE(got.status.ok()) << got.status;
  EXPECT_TRUE(SameTokens(node.backend(), calm, got));
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(TurnsTest, HolderThatStandsStillIsKilledAndTheOtherRuns) {
  NodeOptions options = Temporal({{"alpha"}, {"beta"}});
  options.policy = {"sharing: temporal", "quantum: 1h", "turn_deadline: 500ms",
                    "revoke_deadline: 500ms", "report_patience: 1500ms"};
  Node node(options);
  node.Start();
  const Generation calm = node.Generate(Story("beta", 0, 200));
  Node::Request doomed = Story("alpha", 0, 1900);
  std::atomic<bool> started = false;
  doomed.on_message = [&](const Generation&) { return started = true; };
  auto alpha = node.GenerateAsync(doomed);
  node.Await("alpha's turn", [&] { return started && Holder(node) == "alpha"; });
  ASSERT_TRUE(node.worker("alpha")->handle().Signal(SIGSTOP).ok());
  const Generation got = node.Generate(Story("beta", 0, 200));
  EXPECT_TRUE(got.status.ok()) << got.status;
  EXPECT_TRUE(SameTokens(node.backend(), calm, got));
  EXPECT_EQ(alpha.get().status.code(), absl::StatusCode::kUnavailable);
  node.Await("alpha's end", [&] { return node.worker("alpha")->handle().Exited(); });
  node.KillWorker("alpha");
  node.StartWorker("alpha");
  node.AwaitReady();
  EXPECT_TRUE(node.Generate(Story("alpha", 1, 4)).status.ok());
  EXPECT_EQ(Node::SumOfStates(*node.BrokerStatus()), node.pool_slabs());
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(TurnsTest, BrokerKilledBetweenTurnsCostsNoRequest) {
  NodeOptions options = Temporal({{"alpha"}, {"beta"}});
  options.pool_slabs = 26;
  Node node(options);
  node.Start();
  const std::vector<Node::Request> requests = Stories({"alpha", "beta"}, 2, 600);
  const std::vector<Generation> calm = OneByOne(node, requests);
  auto both = std::async(std::launch::async, [&] { return AllAtOnce(node, requests); });
  std::set<std::string> holders;
  node.Await("turns of both", [&] {
    holders.insert(Holder(node));
    return holders.contains("alpha") && holders.contains("beta");
  });
  node.KillBroker();
  node.StartBroker();
  ExpectSameTokens(node, requests, calm, both.get());
  node.Await("both workers' return", [&] {
    const auto status = node.BrokerStatus();
    return status.ok() && status->broker_generation() == 2 && status->quarantined_slabs() == 0 &&
           node.Tenant("alpha").attached() && node.Tenant("beta").attached();
  });
  EXPECT_EQ(Node::SumOfStates(*node.BrokerStatus()), node.pool_slabs());
  EXPECT_TRUE(node.EverySlabExistsOnce());
  node.AwaitReady();
  for (const char* tenant : {"alpha", "beta"}) {
    const Generation later = node.Generate(Story(tenant, 9, 4));
    EXPECT_TRUE(later.status.ok()) << later.status;
  }
  EXPECT_TRUE(node.StopAll().ok());
}

}  // namespace
}  // namespace palimpsest
