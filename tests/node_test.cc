// One node of real processes: memory moves, processes die, and no token changes. The same tests for
// each back-end; where there is no GPU those of the CUDA back-end are skipped.
#include "tests/node.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>

#include <atomic>
#include <cstdlib>
#include <optional>
#include <set>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "common/fd.h"
#include "common/file.h"
#include "tests/node_stories.h"

namespace palimpsest {
namespace {

using palimpsest::v1::GetStatusResponse;

constexpr int kFloor = 16;  // parameters, workspace and one sequence of kLongest tokens
constexpr int kLongest = 1024;
constexpr int kPool = 36;

class NodeTest : public ::testing::TestWithParam<NodeBackend> {
 protected:
  void SetUp() override {
    if (const std::string why = WhyNodeCannotRun(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }

  static NodeOptions Options() {
    NodeOptions options;
    options.backend = GetParam();
    return options;
  }

  static NodeOptions TwoTenants() {
    NodeOptions options = Options();
    options.pool_slabs = kPool;
    options.head_dim = 128;
    options.max_sequence_tokens = kLongest;
    options.tenants = {{.name = "alpha", .floor_slabs = kFloor},
                       {.name = "beta", .floor_slabs = kFloor}};
    return options;
  }
};

INSTANTIATE_TEST_SUITE_P(Backends, NodeTest,
                         ::testing::Values(NodeBackend::kHost, NodeBackend::kCuda,
                                           NodeBackend::kTwoGpus),
                         [](const auto& info) { return NodeBackendName(info.param); });

void Stop(Node& node, const std::string& tenant) {
  ASSERT_TRUE(node.worker(tenant)->handle().Signal(SIGSTOP).ok());
}

// Beta's answers to `requests` without pressure; alpha has its parameters afterwards, is idle and
// stands still.
std::vector<Generation> CalmAnswersThenStopIdleAlpha(Node& node,
                                                     const std::vector<Node::Request>& requests) {
  std::vector<Generation> calm = Calm(node, requests);
  EXPECT_TRUE(node.Generate(Story("alpha", 0, 4)).status.ok());
  node.Await("an idle alpha", [&] { return !node.Tenant("alpha").load().active(); });
  Stop(node, "alpha");
  return calm;
}

TEST_P(NodeTest, ParametersGiveWayToKvAndComeBackWithoutChangingATokenOfEither) {
  Node node(TwoTenants());
  node.Start();
  const std::vector<Node::Request> alpha_requests = {Story("alpha", 0, 200),
                                                     Story("alpha", 1, 200)};
  const std::vector<Node::Request> beta_requests = Pressure(16, 450);
  const std::vector<Generation> alpha_calm = Calm(node, alpha_requests);
  const std::vector<Generation> beta_calm = Calm(node, beta_requests);
  ASSERT_TRUE(alpha_calm[0].status.ok()) << alpha_calm[0].status;
  ASSERT_EQ(alpha_calm[0].tokens.size(), 200);
  node.Await("a complete alpha",
             [&] { return node.Tenant("alpha").parameter_slabs() == Node::kImageSlabs; });

  SteadyPressure pressure(node, beta_requests);
  node.Await("a revoke of alpha's parameters",
             [&] { return node.Tenant("alpha").parameter_slabs() < Node::kImageSlabs; });
  ExpectSameTokens(node, beta_requests, beta_calm, pressure.Answers());

  ExpectSameTokens(node, alpha_requests, alpha_calm, OneByOne(node, alpha_requests));
  EXPECT_EQ(node.Tenant("alpha").parameter_slabs(), Node::kImageSlabs);
  const absl::StatusOr<GetStatusResponse> status = node.BrokerStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(Node::SumOfStates(*status), node.pool_slabs());
  std::set<int> kinds;
  for (const auto& transfer : status->transfers()) kinds.insert(transfer.kind());
  EXPECT_TRUE(kinds.contains(palimpsest::v1::Transfer::KIND_REVOKE));
  EXPECT_TRUE(kinds.contains(palimpsest::v1::Transfer::KIND_RESTORE));
  EXPECT_TRUE(node.EverySlabExistsOnce());
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(NodeTest, BothTenantsUnderPressureAtOnceKeepTheirTokens) {
  Node node(TwoTenants());
  node.Start();
  std::vector<Node::Request> requests;
  for (int i = 0; i < 8; ++i) {
    requests.push_back(Story("alpha", i, 250));
    requests.push_back(Story("beta", i, 250));
    requests.back().temperature = 0.8f;
    requests.back().seed = 7 + i;
  }
  const std::vector<Generation> calm = Calm(node, requests);
  ExpectSameTokens(node, requests, calm, AllAtOnce(node, requests));
  EXPECT_TRUE(node.StopAll().ok());
}

// What the worker says of a counter; nothing where there is no curl to ask with.
std::optional<double> Counter(Node& node, const std::string& tenant, const std::string& row) {
  const std::string file = absl::StrCat(node.folder(), "/", tenant, ".metrics");
  const std::string command = absl::StrCat("curl --silent --fail --max-time 20 --output ", file,
                                           " http://", node.MetricsAddress(tenant), "/metrics");
  if (std::system(command.c_str()) != 0) return std::nullopt;
  const absl::StatusOr<std::string> text = ReadFile(file, MiB(1));
  const size_t at = text.ok() ? text->find(absl::StrCat("\n", row, " ")) : std::string::npos;
  if (at == std::string::npos) return std::nullopt;
  return std::atof(text->c_str() + at + row.size() + 2);
}

TEST_P(NodeTest, SwappedKvKeepsTokensAndParametersStay) {
  NodeOptions options = TwoTenants();
  options.policy.push_back("memory_policy: swap");
  options.engine.push_back("swap_space: 64 MiB");
  Node node(options);
  node.Start();
  std::vector<Node::Request> requests;
  for (int i = 0; i < 9; ++i) {
    requests.push_back(Story("alpha", i, 300));
    requests.push_back(Story("beta", i, 300));
  }
  const std::vector<Generation> calm = OneByOne(node, requests);
  const std::vector<Generation> pressed = AllAtOnce(node, requests);
  ExpectSameTokens(node, requests, calm, pressed);
  int preemptions = 0;
  for (const Generation& generation : pressed) preemptions += generation.usage.preemptions();
  EXPECT_GT(preemptions, 0);
  double swapped_in = 0;
  for (const char* tenant : {"alpha", "beta"}) {
    EXPECT_EQ(node.Tenant(tenant).parameter_slabs(), Node::kImageSlabs);
    const auto bytes =
        Counter(node, tenant, "palimpsest_worker_swapped_bytes_total{direction=\"in\"}");
    if (!bytes.has_value()) GTEST_SKIP() << "curl is not installed here";
    swapped_in += *bytes;
  }
  EXPECT_GT(swapped_in, 0);
  const absl::StatusOr<GetStatusResponse> status = node.BrokerStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(status->memory_policy(), "swap");
  for (const auto& transfer : status->transfers()) {
    EXPECT_FALSE(transfer.kind() == palimpsest::v1::Transfer::KIND_REVOKE &&
                 transfer.role() == palimpsest::v1::SLAB_ROLE_PARAMETER);
  }
  EXPECT_TRUE(node.StopAll().ok());
}

// On the host, where tokens are the same bit for bit; gpu_check judges a GPU's.
TEST(KvInEightBitsTest, TenantsOfOneImageWithOtherKvKeepTheirTokens) {
  NodeOptions options;
  options.pool_slabs = kPool;
  options.head_dim = 128;
  options.max_sequence_tokens = kLongest;
  options.tenants = {{.name = "alpha", .floor_slabs = kFloor},
                     {.name = "beta", .floor_slabs = kFloor, .kv_dtype = "fp8_e4m3"}};
  Node node(options);
  node.Start();
  std::vector<Node::Request> requests = Pressure(6, 150);
  for (int i = 0; i < 2; ++i) requests.push_back(Story("alpha", i, 150));
  const std::vector<Generation> calm = OneByOne(node, requests);
  ExpectSameTokens(node, requests, calm, AllAtOnce(node, requests));
}

TEST_P(NodeTest, WorkerKilledInMidStreamReturnsItsSlabsAndLeavesTheOtherTenantAlone) {
  Node node(TwoTenants());
  node.Start();
  const Generation alpha_calm = Calm(node, {Story("alpha", 0, 750)})[0];
  const Generation beta_calm = Calm(node, {Story("beta", 0, 100)})[0];
  ASSERT_TRUE(alpha_calm.status.ok()) << alpha_calm.status;

  auto alpha = node.GenerateAsync(Story("alpha", 0, 750));
  Node::Request doomed = Story("beta", 1, 900);
  std::atomic<bool> started = false;
  doomed.on_message = [&](const Generation&) { return started = true; };
  auto beta = node.GenerateAsync(doomed);
  node.Await("beta's first token", [&] { return started.load(); });
  node.KillWorker("beta");
  EXPECT_EQ(beta.get().status.code(), absl::StatusCode::kUnavailable);
  node.Await("the return of beta's slabs", [&] {
    const auto tenant = node.Tenant("beta");
    return tenant.parameter_slabs() + tenant.kv_slabs() == 0 && !tenant.attached();
  });
  EXPECT_TRUE(SameTokens(node.backend(), alpha_calm, alpha.get()));

  node.StartWorker("beta");
  node.AwaitReady();
  EXPECT_TRUE(SameTokens(node.backend(), beta_calm, node.Generate(Story("beta", 0, 100))));
  EXPECT_EQ(Node::SumOfStates(*node.BrokerStatus()), node.pool_slabs());
  EXPECT_TRUE(node.EverySlabExistsOnce());
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(NodeTest, BrokerKilledWhileBothStreamCostsNeitherARequestNorASlab) {
  Node node(TwoTenants());
  node.Start();
  const std::vector<Node::Request> requests = {Story("alpha", 0, 900), Story("beta", 0, 900)};
  const std::vector<Generation> calm = Calm(node, requests);

  std::atomic<int> streaming = 0;
  std::vector<std::future<Generation>> running;
  for (Node::Request request : requests) {
    request.on_message = [&, counted = false](const Generation&) mutable {
      if (!std::exchange(counted, true)) ++streaming;
      return true;
    };
    running.push_back(node.GenerateAsync(request));
  }
  node.Await("both streams", [&] { return streaming == 2; });
  node.KillBroker();
  node.StartBroker();
  std::vector<Generation> results;
  for (std::future<Generation>& result : running) results.push_back(result.get());
  ExpectSameTokens(node, requests, calm, results);

  node.Await("both workers' return", [&] {
    const auto status = node.BrokerStatus();
    return status.ok() && status->broker_generation() == 2 && status->quarantined_slabs() == 0 &&
           node.Tenant("alpha").attached() && node.Tenant("beta").attached();
  });
  EXPECT_EQ(Node::SumOfStates(*node.BrokerStatus()), node.pool_slabs());
  EXPECT_TRUE(node.EverySlabExistsOnce());
  node.AwaitServing();
  ExpectSameTokens(node, requests, calm, OneByOne(node, requests));
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(NodeTest, WorkerThatDoesNotAnswerARevokeIsKilledAndItsMemoryGoesToTheOther) {
  NodeOptions options = TwoTenants();
  options.policy = {"revoke_deadline: 500ms"};
  Node node(options);
  node.Start();
  const std::vector<Node::Request> requests = Pressure(16, 450);
  const std::vector<Generation> calm = CalmAnswersThenStopIdleAlpha(node, requests);
  SteadyPressure pressure(node, requests);
  node.Await("alpha's end", [&] { return node.worker("alpha")->handle().Exited(); });
  ExpectSameTokens(node, requests, calm, pressure.Answers());
  node.Await("the return of alpha's slabs", [&] {
    return node.Tenant("alpha").parameter_slabs() == 0 &&
           node.BrokerStatus()->quarantined_slabs() == 0;
  });
  node.KillWorker("alpha");
  node.StartWorker("alpha");
  node.AwaitReady();
  EXPECT_TRUE(node.Generate(Story("alpha", 0, 4)).status.ok());
  EXPECT_EQ(Node::SumOfStates(*node.BrokerStatus()), node.pool_slabs());
  EXPECT_TRUE(node.StopAll().ok());
}

// Stopped with requests under way: what it said last is that it is active.
TEST_P(NodeTest, WorkerThatHangsInMidStreamLosesItsMemoryToTheTenantThatNeedsIt) {
  NodeOptions options = TwoTenants();
  options.policy = {"revoke_deadline: 500ms"};
  Node node(options);
  node.Start();
  const std::vector<Node::Request> requests = Pressure(16, 450);
  const std::vector<Generation> calm = Calm(node, requests);
  ASSERT_TRUE(node.Generate(Story("alpha", 0, 4)).status.ok());

  Node::Request doomed = Story("alpha", 1, 950);
  std::atomic<bool> started = false;
  doomed.on_message = [&](const Generation&) { return started = true; };
  auto alpha = node.GenerateAsync(doomed);
  node.Await("an active alpha", [&] { return started && node.Tenant("alpha").load().active(); });
  Stop(node, "alpha");
  SteadyPressure pressure(node, requests);
  node.Await("alpha's end", [&] { return node.worker("alpha")->handle().Exited(); });
  pressure.Finish();
  EXPECT_EQ(alpha.get().status.code(), absl::StatusCode::kUnavailable);
  ExpectSameTokens(node, requests, calm, pressure.Answers());
  node.Await("the return of alpha's slabs", [&] {
    return node.Tenant("alpha").parameter_slabs() == 0 &&
           node.BrokerStatus()->quarantined_slabs() == 0;
  });
  node.KillWorker("alpha");
  node.StartWorker("alpha");
  node.AwaitReady();
  EXPECT_TRUE(node.Generate(Story("alpha", 0, 4)).status.ok());
  EXPECT_EQ(Node::SumOfStates(*node.BrokerStatus()), node.pool_slabs());
  EXPECT_TRUE(node.EverySlabExistsOnce());
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(NodeTest, BrokerThatStandsStillIsNoticedAndPickedUpAgain) {
  Node node(TwoTenants());
  node.Start();
  const std::vector<Node::Request> requests = {Story("alpha", 0, 900), Story("beta", 0, 900)};
  const std::vector<Node::Request> pressure_requests = Pressure(16, 450);
  // On this node, which then holds all KV that they need while nobody can grant any.
  const std::vector<Generation> calm = OneByOne(node, requests);
  const std::vector<Generation> pressure_calm = Calm(node, pressure_requests);

  std::atomic<int> streaming = 0;
  std::vector<std::future<Generation>> running;
  for (Node::Request request : requests) {
    request.on_message = [&, counted = false](const Generation&) mutable {
      if (!std::exchange(counted, true)) ++streaming;
      return true;
    };
    running.push_back(node.GenerateAsync(request));
  }
  node.Await("both streams", [&] { return streaming == 2; });
  ASSERT_TRUE(node.broker()->handle().Signal(SIGSTOP).ok());
  std::vector<Generation> results;
  for (std::future<Generation>& result : running) results.push_back(result.get());
  ExpectSameTokens(node, requests, calm, results);
  node.Await("the workers' notice", [&] {
    return absl::StrContains(node.Log("alpha"), "the broker is lost") &&
           absl::StrContains(node.Log("beta"), "the broker is lost");
  });

  ASSERT_TRUE(node.broker()->handle().Signal(SIGCONT).ok());
  node.Await("both workers' return", [&] {
    const auto status = node.BrokerStatus();
    return status.ok() && absl::StrContains(node.Log("alpha"), "reattached") &&
           absl::StrContains(node.Log("beta"), "reattached") && node.Tenant("alpha").attached() &&
           node.Tenant("beta").attached();
  });
  const absl::StatusOr<GetStatusResponse> status = node.BrokerStatus();
  ASSERT_TRUE(status.ok()) << status.status();
  EXPECT_EQ(status->broker_generation(), 1);
  EXPECT_EQ(status->quarantined_slabs(), 0);
  EXPECT_EQ(Node::SumOfStates(*status), node.pool_slabs());
  EXPECT_TRUE(node.EverySlabExistsOnce());

  node.AwaitReady();
  ExpectSameTokens(node, pressure_requests, pressure_calm, AllAtOnce(node, pressure_requests));
  ExpectSameTokens(node, requests, calm, OneByOne(node, requests));
  EXPECT_TRUE(node.EverySlabExistsOnce());
  EXPECT_TRUE(node.StopAll().ok());
}

// Alpha cannot answer a revoke, then the broker cannot read the answer.
TEST_P(NodeTest, BrokerThatStoodStillBlamesNobodyForIt) {
  NodeOptions options = TwoTenants();
  options.policy = {"revoke_deadline: 3s"};
  Node node(options);
  node.Start();
  const std::vector<Node::Request> requests = Pressure(16, 450);
  const std::vector<Generation> calm = CalmAnswersThenStopIdleAlpha(node, requests);
  SteadyPressure pressure(node, requests);
  node.Await("a revoke that is not answered",
             [&] { return node.Tenant("alpha").revokes_in_flight() > 0; });
  pressure.Finish();
  ASSERT_TRUE(node.broker()->handle().Signal(SIGSTOP).ok());
  ASSERT_TRUE(node.worker("alpha")->handle().Signal(SIGCONT).ok());
  // Later than the deadline of the revoke.
  node.Await("beta's notice",
             [&] { return absl::StrContains(node.Log("beta"), "the broker is lost"); });
  ASSERT_TRUE(node.broker()->handle().Signal(SIGCONT).ok());
  ExpectSameTokens(node, requests, calm, pressure.Answers());
  node.Await("both workers' return",
             [&] { return node.Tenant("alpha").attached() && node.Tenant("beta").attached(); });
  EXPECT_FALSE(node.worker("alpha")->handle().Exited());
  node.AwaitReady();
  EXPECT_TRUE(node.Generate(Story("alpha", 0, 4)).status.ok());
  EXPECT_EQ(Node::SumOfStates(*node.BrokerStatus()), node.pool_slabs());
  EXPECT_TRUE(node.EverySlabExistsOnce());
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(NodeTest, TwoTenantsThatActivateAtOnceInAPoolThatFitsOneBothGetTheirTurn) {
  NodeOptions options = Options();
  options.pool_slabs = 18;
  Node node(options);
  node.Start();
  const std::vector<Node::Request> requests = {Story("alpha", 0, 50), Story("beta", 0, 50)};
  const std::vector<Generation> calm = Calm(node, requests);
  for (int round = 0; round < 3; ++round)
    ExpectSameTokens(node, requests, calm, AllAtOnce(node, requests));
  EXPECT_EQ(Node::SumOfStates(*node.BrokerStatus()), node.pool_slabs());
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(NodeTest, KilledClientFreesItsSequenceAtTheWorkerAndNobodyElseNotices) {
  NodeOptions options = Options();
  options.pool_slabs = 60;
  options.max_sequence_tokens = 16384;  // tens of seconds, if nobody stops it
  Node node(options);
  node.Start();
  const Generation alpha_calm = node.Generate(Story("alpha", 0, 300));
  ASSERT_TRUE(alpha_calm.status.ok()) << alpha_calm.status;

  const std::string token_file = node.folder() + "/client-token";
  ASSERT_TRUE(WriteFileAtomically(token_file, node.token("beta"), 0600).ok());
  const std::string output = node.folder() + "/client-output";
  const UniqueFd out(::open(output.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  SpawnOptions client;
  client.argv = {Node::Program("palctl", "tools/palctl"),
                 "--router",
                 absl::StrCat("unix:", node.folder(), "/router.sock"),
                 "--token-file",
                 token_file,
                 "generate",
                 "--tenant",
                 "beta",
                 "--ignore-eos",
                 "--max-tokens",
                 "16000",
                 "Once upon a time"};
  client.output = out.get();
  absl::StatusOr<ChildProcess> process = ChildProcess::Spawn(client);
  ASSERT_TRUE(process.ok()) << process.status();
  node.Await("beta's sequence", [&] { return node.Tenant("beta").load().kv_slabs_used() > 0; });
  auto alpha = node.GenerateAsync(Story("alpha", 0, 300));
  ASSERT_TRUE(process->handle().Kill().ok());
  node.Await(
      "the end of beta's sequence",
      [&] {
        const auto load = node.Tenant("beta").load();
        return load.running_sequences() == 0 && load.kv_slabs_used() == 0;
      },
      absl::Seconds(5));
  EXPECT_TRUE(SameTokens(node.backend(), alpha_calm, alpha.get()));
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(NodeTest, EveryProcessServesMetricsThatPrometheusAccepts) {
  if (GetParam() != NodeBackend::kHost && std::system("command -v promtool curl >/dev/null") != 0) {
    GTEST_SKIP() << "promtool and curl are not installed here";
  }
  Node node(TwoTenants());
  node.Start();
  for (const char* tenant : {"alpha", "beta"}) {
    EXPECT_TRUE(node.Generate(Story(tenant, 0, 5)).status.ok());
  }
  for (const char* process : {"broker", "alpha", "beta", "router"}) {
    const std::string file = absl::StrCat(node.folder(), "/", process, ".metrics");
    const std::string command = absl::StrCat(
        "curl --silent --show-error --fail --max-time 20 --output ", file, " http://",
        node.MetricsAddress(process), "/metrics && promtool check metrics < ", file, " 1>&2");
    EXPECT_EQ(std::system(command.c_str()), 0) << process << ": " << command;
    const absl::StatusOr<std::string> text = ReadFile(file, MiB(1));
    ASSERT_TRUE(text.ok()) << text.status();
    EXPECT_TRUE(absl::StrContains(*text, "\npalimpsest_")) << *text;
  }
  EXPECT_TRUE(node.StopAll().ok());
}

TEST_P(NodeTest, PinnedTenantKeepsItsParametersAndTheOtherOneStillFinishes) {
  NodeOptions options = TwoTenants();
  options.tenants[0].pin = true;
  Node node(options);
  node.Start();
  const std::vector<Node::Request> requests = Pressure(16, 450);
  const std::vector<Generation> calm = Calm(node, requests);
  std::atomic<bool> taken = false;
  auto pressure = std::async(std::launch::async, [&] { return AllAtOnce(node, requests); });
  node.Await(
      "the end of the pressure",
      [&] {
        if (node.Tenant("alpha").parameter_slabs() != Node::kImageSlabs) taken = true;
        return pressure.wait_for(std::chrono::seconds(0)) == std::future_status::ready;
      },
      absl::Seconds(60));
  ExpectSameTokens(node, requests, calm, pressure.get());
  EXPECT_FALSE(taken);
  EXPECT_TRUE(node.StopAll().ok());
}

}  // namespace
}  // namespace palimpsest
