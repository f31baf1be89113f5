// Random processes die at random moments, round after round: no token changes, no slab is lost or
// doubled, and the tenant whose worker lives does not notice.
#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/node.h"

namespace palimpsest {
namespace {

using palimpsest::v1::GetStatusResponse;

constexpr int kPool = 36;
constexpr int kFloor = 16;
constexpr int kRequests = 4;  // of each tenant
#ifndef CHAOS_ROUNDS
#define CHAOS_ROUNDS 6
#endif

enum class Victim { kAlpha, kBeta, kBroker };

class ChaosTest : public ::testing::TestWithParam<NodeBackend> {
 protected:
  ChaosTest() : node_(Options()) {
    for (int i = 0; i < kRequests; ++i) {
      for (const char* tenant : {"alpha", "beta"}) {
        requests_.push_back({.tenant = tenant,
                             .text = absl::StrCat("Chapter ", i, " of ", tenant, ": at first"),
                             .max_tokens = 200 + 100 * i,
                             .temperature = i % 2 == 0 ? 0.0f : 0.8f,
                             .seed = 11u + i});
      }
    }
  }

  void SetUp() override {
    if (const std::string why = WhyNodeCannotRun(GetParam()); !why.empty()) GTEST_SKIP() << why;
  }

  static NodeOptions Options() {
    NodeOptions options;
    options.backend = GetParam();
    options.pool_slabs = kPool;
    options.tenants = {{.name = "alpha", .floor_slabs = kFloor},
                       {.name = "beta", .floor_slabs = kFloor}};
    // So that memory moves all the time.
    options.policy = {"min_residence: 10ms", "residence_restores: 0", "prefetch_grace: 10ms",
                      "reversion_delay: 50ms"};
    return options;
  }

  void Round(Victim victim, int messages_before) {
    std::atomic<int> messages = 0;
    std::vector<std::future<Generation>> running;
    for (Node::Request request : requests_) {
      request.on_message = [&messages](const Generation&) { return ++messages, true; };
      running.push_back(node_.GenerateAsync(request));
    }
    node_.Await("the moment to kill", [&] {
      bool all_done = true;
      for (const auto& result : running) {
        if (result.wait_for(std::chrono::seconds(0)) != std::future_status::ready) all_done = false;
      }
      return all_done || messages >= messages_before;
    });
    Kill(victim);
    for (size_t i = 0; i < running.size(); ++i) Check(i, running[i].get(), victim);
    CheckMemory();
    for (size_t i = 0; i < 2; ++i) Check(i, node_.Generate(requests_[i]), Victim::kBroker);
  }

  void Kill(Victim victim) {
    if (victim == Victim::kBroker) {
      node_.KillBroker();
      node_.StartBroker();
      return;
    }
    const std::string tenant = Name(victim);
    node_.KillWorker(tenant);
    node_.StartWorker(tenant);
  }

  static std::string Name(Victim victim) { return victim == Victim::kAlpha ? "alpha" : "beta"; }

  // A request fails only with its worker; what it said before is what it always says.
  void Check(size_t request, const Generation& got, Victim victim) {
    const std::string& tenant = requests_[request].tenant;
    const bool greedy = requests_[request].temperature == 0;
    if (victim == Victim::kBroker || tenant != Name(victim)) {
      ASSERT_TRUE(got.status.ok()) << tenant << ": " << got.status;
    }
    EXPECT_TRUE(SameTokens(GetParam(), calm_[request], got, greedy, /*prefix=*/!got.status.ok()))
        << "request " << request;
    if (got.status.ok()) return;
    EXPECT_EQ(got.status.code(), absl::StatusCode::kUnavailable) << got.status;
  }

  void CheckMemory() {
    node_.AwaitReady();
    node_.Await("the return of every worker and slab", [&] {
      const absl::StatusOr<GetStatusResponse> status = node_.BrokerStatus();
      if (!status.ok()) return false;
      EXPECT_EQ(Node::SumOfStates(*status), node_.pool_slabs());
      bool attached = true;
      for (const auto& tenant : status->tenants()) attached = attached && tenant.attached();
      return attached && status->quarantined_slabs() == 0 && status->cleaning_slabs() == 0 &&
             status->revoking_slabs() == 0;
    });
    // A slab that is cleaned at this moment has its old file, its new one or none.
    node_.Await("as many slab files as slabs", [&] { return node_.EverySlabExistsOnce(); });
  }

  Node node_;
  std::vector<Node::Request> requests_;
  std::vector<Generation> calm_;
};

INSTANTIATE_TEST_SUITE_P(Backends, ChaosTest,
                         ::testing::Values(NodeBackend::kHost, NodeBackend::kCuda,
                                           NodeBackend::kTwoGpus),
                         [](const auto& info) { return NodeBackendName(info.param); });

TEST_P(ChaosTest, WhoeverDiesWheneverNothingIsLostAndNoTokenChanges) {
  node_.Start();
  for (const Node::Request& request : requests_) {
    calm_.push_back(node_.Generate(request));
    ASSERT_TRUE(calm_.back().status.ok()) << calm_.back().status;
  }
  std::mt19937 random(20);
  for (int round = 0; round < CHAOS_ROUNDS; ++round) {
    // Each victim in turn; the moment is anything from before the first token to after the last.
    const auto victim = static_cast<Victim>(round % 3);
    const int messages = static_cast<int>(random() % 2000);
    SCOPED_TRACE(absl::StrCat("round ", round, ", ", messages, " messages before"));
    Round(victim, messages);
    if (HasFailure()) return;
  }
  EXPECT_TRUE(node_.StopAll().ok());
}

}  // namespace
}  // namespace palimpsest
