// Workers whose processes end when nobody asks them anything, and come back for the next request.
#include <gtest/gtest.h>
#include <signal.h>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/monotonic_time.h"
#include "tests/node.h"

namespace palimpsest {
namespace {

class HibernationTest : public ::testing::TestWithParam<NodeBackend> {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNodeCannotRun(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }

  static NodeOptions Options() {
    NodeOptions options;
    options.backend = GetParam();
    options.pool_slabs = 36;
    options.tenants = {{.name = "alpha", .hibernate_after = "700ms"}, {.name = "beta"}};
    return options;
  }

  static void AwaitSleep(Node& node) {
    node.Await("alpha's sleep", [&] {
      const auto alpha = node.Tenant("alpha");
      return !alpha.attached() && alpha.pid() == 0 && alpha.parameter_slabs() == 0 &&
             alpha.kv_slabs() == 0;
    });
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, HibernationTest,
                         ::testing::Values(NodeBackend::kHost, NodeBackend::kCuda),
                         [](const auto& info) { return NodeBackendName(info.param); });

Node::Request Story(const std::string& tenant, int number, int max_tokens) {
  return {.tenant = tenant,
          .text = absl::StrCat("Story ", number, " of ", tenant, ": once upon a time"),
          .max_tokens = max_tokens};
}

TEST_P(HibernationTest, SleeperHoldsNothingAndAnswersTheNextRequestWithTheSameTokens) {
  Node node(Options());
  node.Start();
  const Generation awake = node.Generate(Story("alpha", 0, 50));
  ASSERT_TRUE(awake.status.ok()) << awake.status;
  for (int round = 0; round < 2; ++round) {
    AwaitSleep(node);
    node.Await("cleaned slabs", [&] {
      const auto status = node.BrokerStatus();
      return status.ok() && status->quarantined_slabs() + status->cleaning_slabs() == 0;
    });
    EXPECT_FALSE(node.Tenant("alpha").fingerprint().empty()) << "the image stays";
    const absl::Time asked = MonotonicNow();
    Node::Request request = Story("alpha", 0, 50);
    absl::Duration first_token = absl::InfiniteDuration();
    request.on_message = [&](const Generation&) {
      first_token = std::min(first_token, MonotonicNow() - asked);
      return true;
    };
    const Generation woken = node.Generate(request);
    EXPECT_TRUE(woken.status.ok()) << woken.status;
    EXPECT_TRUE(SameTokens(node.backend(), awake, woken));
    EXPECT_LT(first_token, absl::Seconds(3));
  }
  EXPECT_EQ(Node::SumOfStates(*node.BrokerStatus()), node.pool_slabs());
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(HibernationTest, RequestsThatComeTogetherWakeItOnce) {
  Node node(Options());
  node.Start();
  std::vector<Generation> calm;
  for (int i = 0; i < 6; ++i) calm.push_back(node.Generate(Story("alpha", i, 60)));
  AwaitSleep(node);
  std::vector<std::future<Generation>> running;
  for (int i = 0; i < 6; ++i) running.push_back(node.GenerateAsync(Story("alpha", i, 60)));
  for (int i = 0; i < 6; ++i) {
    const Generation got = running[i].get();
    EXPECT_TRUE(got.status.ok()) << got.status;
    EXPECT_TRUE(SameTokens(node.backend(), calm[i], got)) << i;
  }
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(HibernationTest, OthersUseTheSleepersMemory) {
  Node node(Options());
  node.Start();
  AwaitSleep(node);
  std::vector<std::future<Generation>> running;
  for (int i = 0; i < 16; ++i) running.push_back(node.GenerateAsync(Story("beta", i, 900)));
  node.Await("beta in what alpha had", [&] {
    const auto beta = node.Tenant("beta");
    return beta.parameter_slabs() + beta.kv_slabs() > 36 - Node::kImageSlabs;
  });
  const Generation alpha = node.Generate(Story("alpha", 0, 20));
  EXPECT_TRUE(alpha.status.ok()) << alpha.status;
  for (auto& result : running) EXPECT_TRUE(result.get().status.ok());
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(HibernationTest, KilledChildIsStartedAgain) {
  NodeOptions options = Options();
  options.tenants[0].hibernate_after = "1h";
  Node node(options);
  node.Start();
  const Generation before = node.Generate(Story("alpha", 0, 50));
  const pid_t child = node.Tenant("alpha").pid();
  ASSERT_NE(child, node.worker("alpha")->pid());
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  node.Await("another child", [&] {
    const pid_t pid = node.Tenant("alpha").pid();
    return pid != 0 && pid != child && node.Tenant("alpha").attached();
  });
  node.AwaitServing();
  const Generation after = node.Generate(Story("alpha", 0, 50));
  EXPECT_TRUE(after.status.ok()) << after.status;
  EXPECT_TRUE(SameTokens(node.backend(), before, after));
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(HibernationTest, ChildDiesWithItsParentAndASleeperStopsAtOnce) {
  Node node(Options());
  node.Start();
  ASSERT_TRUE(node.Generate(Story("alpha", 0, 5)).status.ok());
  node.KillWorker("alpha");
  AwaitSleep(node);
  node.StartWorker("alpha");
  // The router may not have heard yet that the first one is gone.
  node.AwaitServing();
  AwaitSleep(node);
  const absl::Status stopped = node.StopAll();
  EXPECT_TRUE(stopped.ok()) << stopped;
}

}  // namespace
}  // namespace palimpsest
