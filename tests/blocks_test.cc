// KV blocks that go down to the broker's tiers and come back, through real processes: tokens are
// those of a node without tiers, whatever is loaded, lost or killed meanwhile.
#include <grpcpp/grpcpp.h>

#include <future>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gtest/gtest.h"
#include "proto/palimpsest/v1/block_store.grpc.pb.h"
#include "tests/node.h"
#include "tests/node_tiers.h"

namespace palimpsest {
namespace {

Node::Request Ask(const std::string& text, int max_tokens = 24) {
  return {.tenant = "alpha", .text = text, .max_tokens = max_tokens};
}

NodeOptions Options(NodeBackend backend, bool tiers, int sliding_window = 0) {
  NodeOptions options = ScarceKv();
  options.backend = backend;
  options.sliding_window = sliding_window;
  if (tiers) AddTiers(options);
  return options;
}

class BlocksTest : public ::testing::TestWithParam<NodeBackend> {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNodeCannotRun(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }

  // What a node without tiers answers.
  static std::vector<Generation> Calm(const std::vector<Node::Request>& requests,
                                      int sliding_window = 0) {
    Node node(Options(GetParam(), /*tiers=*/false, sliding_window));
    node.Start();
    std::vector<Generation> answers;
    for (const Node::Request& request : requests) {
      answers.push_back(node.Generate(request));
      EXPECT_TRUE(answers.back().status.ok()) << answers.back().status;
    }
    return answers;
  }

  static void ExpectSame(const Generation& expected, const Generation& got) {
    ASSERT_TRUE(got.status.ok()) << got.status;
    EXPECT_TRUE(SameTokens(GetParam(), expected, got));
  }

  static void Trim(Node& node) {
    const auto channel =
        grpc::CreateChannel(absl::StrCat("unix:", node.folder(), "/state/operator.sock"),
                            grpc::InsecureChannelCredentials());
    grpc::ClientContext context;
    v1::TrimRequest request;
    request.set_tier(v1::TIER_DRAM);
    v1::TrimResponse response;
    const grpc::Status status =
        v1::BlockAdmin::NewStub(channel)->Trim(&context, request, &response);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }

  // So that T0 has nothing of earlier requests.
  static void Evict(Node& node) {
    for (int i = 900; i < 904; ++i) {
      const Generation other = node.Generate(Ask(LongText(i), 8));
      EXPECT_TRUE(other.status.ok()) << other.status;
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, BlocksTest,
                         ::testing::Values(NodeBackend::kHost, NodeBackend::kCuda,
                                           NodeBackend::kTwoGpus),
                         [](const auto& info) { return NodeBackendName(info.param); });

TEST_P(BlocksTest, SecondTurnComesBackFromHostMemoryAndFromBelow) {
  const std::string first = LongText(1);
  const std::string second = first + " What happened then? ";
  const std::string third = first + " Why did it rain? ";
  const std::vector<Node::Request> requests = {Ask(first), Ask(second), Ask(third)};
  const std::vector<Generation> calm = Calm(requests);

  Node node(Options(GetParam(), /*tiers=*/true));
  node.Start();
  AwaitFastTiers(node);
  ExpectSame(calm[0], node.Generate(requests[0]));
  node.Await("the first turn in T1", [&] { return TierRow(node, "dram").blocks() >= 50; });
  Evict(node);
  const Generation again = node.Generate(requests[1]);
  ExpectSame(calm[1], again);
  EXPECT_GT(again.usage.cached_tokens(), 800u);
  EXPECT_GE(TierRow(node, "dram").hit_blocks(), 50u);

  Evict(node);
  Trim(node);
  // A GPU may compute so small a model's tokens sooner than that tier has them, which then gets
  // none.
  const bool host = GetParam() == NodeBackend::kHost;
  node.Await("everything to leave T1", [&] {
    return TierRow(node, "dram").blocks() == 0 && (!host || TierRow(node, "cxl").blocks() >= 50);
  });
  // Blocks that come up need a chunk that is there, which a request brings about and the next uses.
  node.Await("a chunk of T1", [&] {
    EXPECT_TRUE(node.Generate(Ask(LongText(950), 8)).status.ok());
    return TierRow(node, "dram").blocks() >= 50;
  });
  ExpectSame(calm[2], node.Generate(requests[2]));
  if (host) EXPECT_GT(TierRow(node, "cxl").promoted_blocks(), 0u);
  EXPECT_TRUE(node.StopAll().ok());
}

// Of a prefix of more than 50 blocks the next token sees 8.
TEST_P(BlocksTest, SlidingWindowComesBackWithoutWhatItDoesNotSee) {
  if (GetParam() != NodeBackend::kHost) GTEST_SKIP() << "of the host back-end";
  constexpr int kWindow = 128;
  const std::string first = LongText(1);
  const std::vector<Node::Request> requests = {Ask(first), Ask(first + " What happened then? "),
                                               Ask(first + " Why did it rain? ")};
  const std::vector<Generation> calm = Calm(requests, kWindow);

  Node node(Options(GetParam(), /*tiers=*/true, kWindow));
  node.Start();
  AwaitFastTiers(node);
  ExpectSame(calm[0], node.Generate(requests[0]));
  node.Await("the first turn in T1", [&] { return TierRow(node, "dram").blocks() >= 50; });
  Evict(node);
  const uint64_t before = TierRow(node, "dram").hit_blocks();
  const Generation again = node.Generate(requests[1]);
  ExpectSame(calm[1], again);
  EXPECT_GT(again.usage.cached_tokens(), 800u);
  EXPECT_EQ(TierRow(node, "dram").hit_blocks() - before, 8u);

  Evict(node);
  Trim(node);
  node.Await("everything below T1", [&] {
    return TierRow(node, "dram").blocks() == 0 && TierRow(node, "cxl").blocks() >= 50;
  });
  EXPECT_TRUE(node.Generate(Ask(LongText(950), 8)).status.ok());
  node.Await("a chunk of T1", [&] { return TierRow(node, "dram").blocks() >= 50; });
  ExpectSame(calm[2], node.Generate(requests[2]));
  EXPECT_GT(TierRow(node, "cxl").promoted_blocks(), 0u);
  EXPECT_LE(TierRow(node, "cxl").promoted_blocks(), 8u);
  EXPECT_TRUE(node.StopAll().ok());
}

// Two of them run together until there is no KV for both.
TEST_P(BlocksTest, PreemptedSequencesResumeFromHostMemory) {
  // A GPU computes this small model sooner than the store answers.
  if (GetParam() != NodeBackend::kHost) GTEST_SKIP() << "of the host back-end";
  std::vector<Node::Request> requests;
  for (int i = 0; i < 3; ++i) requests.push_back(Ask(LongText(i), 600));
  const std::vector<Generation> calm = Calm(requests);
  Node node(Options(GetParam(), /*tiers=*/true));
  node.Start();
  std::vector<std::future<Generation>> running;
  for (const Node::Request& request : requests) running.push_back(node.GenerateAsync(request));
  uint32_t preemptions = 0;
  for (size_t i = 0; i < running.size(); ++i) {
    const Generation got = running[i].get();
    ExpectSame(calm[i], got);
    preemptions += got.usage.preemptions();
  }
  EXPECT_GT(preemptions, 0u);
  EXPECT_GT(TierRow(node, "dram").hit_blocks(), 0u) << "no other request begins like them";
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(BlocksTest, WorkerKilledWhileItStoresLosesNothingButThat) {
  std::vector<Node::Request> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(Ask(LongText(i)));
  const std::vector<Generation> calm = Calm(requests);
  Node node(Options(GetParam(), /*tiers=*/true));
  node.Start();
  for (int round = 0; round < 3; ++round) {
    for (const Node::Request& request : requests) {
      const Generation answer = node.Generate(request);
      ASSERT_TRUE(answer.status.ok()) << answer.status;
    }
    // Blocks of the last request are on their way.
    node.KillWorker("alpha");
    node.StartWorker("alpha");
    node.AwaitServing();
    for (size_t i = 0; i < requests.size(); ++i) ExpectSame(calm[i], node.Generate(requests[i]));
  }
  EXPECT_GT(TierRow(node, "dram").hit_blocks(), 0u);
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(BlocksTest, BrokerThatDiesTakesTheTiersWithItAndNoToken) {
  std::vector<Node::Request> requests;
  for (int i = 0; i < 4; ++i) requests.push_back(Ask(LongText(i)));
  const std::vector<Generation> calm = Calm(requests);
  Node node(Options(GetParam(), /*tiers=*/true));
  node.Start();
  for (size_t i = 0; i < requests.size(); ++i) ExpectSame(calm[i], node.Generate(requests[i]));
  std::future<Generation> running = node.GenerateAsync(requests[0]);
  node.KillBroker();
  const Generation cut = running.get();
  if (cut.status.ok()) ExpectSame(calm[0], cut);
  node.StartBroker();
  node.AwaitServing();
  for (size_t i = 0; i < requests.size(); ++i) ExpectSame(calm[i], node.Generate(requests[i]));
  node.Await("blocks in the new broker's T1", [&] {
    EXPECT_TRUE(node.Generate(requests[0]).status.ok());
    return TierRow(node, "dram").blocks() > 0;
  });
  EXPECT_TRUE(node.StopAll().ok());
}

}  // namespace
}  // namespace palimpsest
