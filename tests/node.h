// A node of real processes for tests: broker, workers and router, each spawned from its binary with
// a config file in a fresh folder, talking over Unix sockets there (no fixed ports or paths).
// Models are small and random, with a byte-level tokenizer. Everything is killed and removed at the
// end.
//
// Threads: not thread-safe, except Generate and the stubs.
#ifndef PALIMPSEST_TESTS_NODE_H_
#define PALIMPSEST_TESTS_NODE_H_

#include <gtest/gtest.h>

#include <functional>
#include <future>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/ids.h"
#include "common/process.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"
#include "proto/palimpsest/v1/router.grpc.pb.h"

namespace palimpsest {

// Whose slabs they are, and what computes.
// kTwoGpus: each model is shared between two.
enum class NodeBackend { kHost, kCuda, kTwoGpus };

// "Host", "Cuda", "TwoGpus": names of test instances.
std::string NodeBackendName(NodeBackend backend);

// Empty where nodes of this back-end can run; otherwise what is missing.
std::string WhyNodeCannotRun(NodeBackend backend);

struct NodeTenant {
  std::string name;
  int priority = 0;
  bool pin = false;
  // In slabs of 2 MiB; 0: best effort.
  int floor_slabs = 0;
  int quota_slabs = 0;  // 0: the pool
  std::string kv_dtype = "bf16";
  // Such as "500ms"; a worker with this is supervised.
  std::string hibernate_after = "";
};

struct NodeOptions {
  NodeBackend backend = NodeBackend::kHost;
  // Beside workspaces, which workers have on a GPU; so are floors and quotas.
  int pool_slabs = 40;
  int max_sequence_tokens = 2048;
  // Of the model; with 128, KV takes twice the bytes and a token as much time as with 64.
  int head_dim = 64;
  int intermediate_size = 256;  // of the model; a step's time grows with it
  int sliding_window = 0;       // of the model, in tokens; 0: none
  std::vector<NodeTenant> tenants = {{"alpha"}, {"beta"}};
  // Lines of the broker's `policy` map, such as "revoke_deadline: 500ms".
  std::vector<std::string> policy;
  // Lines of the broker's `tiers` map; none: no tiers.
  std::vector<std::string> tiers;
  // Lines of the workers' `engine` map.
  std::vector<std::string> engine = {"kv_low_water_slabs: 1", "kv_high_water_slabs: 3",
                                     "kv_shrink_delay: 500ms"};
};

struct Generation {
  absl::Status status;
  std::vector<TokenId> tokens;
  std::string text;
  std::vector<palimpsest::v1::TokenLogprob> logprobs;  // of a GPU
  palimpsest::v1::FinishReason finish_reason = palimpsest::v1::FINISH_REASON_UNSPECIFIED;
  palimpsest::v1::Usage usage;
};

// Whether `got` is `expected`, or with `prefix` the beginning of it. Host back-end: token by token.
// GPUs: steps of other sizes use other kernels, so low bits differ and a near tie may turn; what
// follows it is another text. Before the first different token log-probabilities must agree, and
// there each run must have had the other's token close behind its own, if tokens are greedy.
::testing::AssertionResult SameTokens(NodeBackend backend, const Generation& expected,
                                      const Generation& got, bool greedy = true,
                                      bool prefix = false);

class Node {
 public:
  // Slabs of the test model's image: embed, 8 layers and head, each less than one slab.
  static constexpr int kImageSlabs = 10;

  // Writes models, secrets and configs; starts nothing.
  explicit Node(NodeOptions options = {});
  ~Node();

  // Starts every process and waits until all are ready.
  void Start();

  void StartBroker();
  void StartWorker(const std::string& tenant);
  void StartRouter();
  void AwaitReady();
  // Until each tenant answers a request: after a process was lost the router may still believe what
  // it last heard of its worker.
  void AwaitServing();

  // The process, for signals. Null when it was not started or has been stopped.
  ChildProcess* broker() { return broker_.get(); }
  ChildProcess* worker(const std::string& tenant) { return workers_[tenant].get(); }
  // SIGKILLs and reaps.
  void KillBroker() { broker_.reset(); }
  void KillWorker(const std::string& tenant) { workers_[tenant].reset(); }

  // SIGTERM to all, in reverse order of start; the first that does not exit with 0 in time.
  absl::Status StopAll();

  absl::StatusOr<palimpsest::v1::GetStatusResponse> BrokerStatus();
  // The tenant's row of BrokerStatus; fails the test if there is none.
  palimpsest::v1::TenantMemory Tenant(const std::string& name);

  // Fails the test with `what`, what the broker says and the logs' ends if `condition` does not
  // hold within `timeout`. It is evaluated again and again, with nothing but a short poll in
  // between.
  void Await(const std::string& what, const std::function<bool()>& condition,
             absl::Duration timeout = absl::Seconds(30));

  struct Request {
    std::string tenant;
    std::string text;
    int max_tokens = 32;
    float temperature = 0;
    uint64_t seed = 1;
    absl::Duration deadline = absl::Seconds(60);
    std::string conversation;
    palimpsest::v1::RequestHints hints;
    // Called after each message; false cancels the call.
    std::function<bool(const Generation&)> on_message;
  };
  Generation Generate(const Request& request);
  std::future<Generation> GenerateAsync(const Request& request);

  palimpsest::v1::Router::Stub& router() { return *router_stub_; }
  palimpsest::v1::Broker::Stub& broker_stub() { return *broker_stub_; }
  // The bearer token of a tenant.
  const std::string& token(const std::string& tenant) { return tokens_[tenant]; }
  const std::string& folder() const { return folder_; }
  std::string Log(const std::string& process) const;
  // HOST:PORT under which a process that runs serves its metrics.
  std::string MetricsAddress(const std::string& process) const;

  // All slabs, those of workspaces included.
  int pool_slabs() const;

  // Whether as many slabs have memory as the pool has: distinct slab files that broker and workers
  // hold, whoever counts them. Memory of a GPU has no such files: true there.
  bool EverySlabExistsOnce();

  // Sum of all slab states of the broker; equal to the pool unless something was lost.
  static int SumOfStates(const palimpsest::v1::GetStatusResponse& status);

  NodeBackend backend() const { return options_.backend; }
  // The path of a program of ours: beside this one in a bundle, else where Bazel puts it.
  static std::string Program(const std::string& name, const std::string& package);

 private:
  void WriteModel();
  void WriteConfigs();
  std::unique_ptr<ChildProcess> Spawn(const std::string& name, const std::string& binary);
  std::string LogEnds() const;
  int WorkspaceSlabs() const;
  // As in a configuration.
  std::string GpuList() const;
  std::string EngineLines() const;

  const NodeOptions options_;
  std::string folder_;
  std::map<std::string, std::string> tokens_;
  std::unique_ptr<ChildProcess> broker_;
  std::map<std::string, std::unique_ptr<ChildProcess>> workers_;
  std::unique_ptr<ChildProcess> router_;
  std::unique_ptr<palimpsest::v1::Broker::Stub> broker_stub_;
  std::unique_ptr<palimpsest::v1::Router::Stub> router_stub_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_TESTS_NODE_H_
