// A broker and a worker for each of several tenants, as processes in a folder of their own: the
// programs that are shipped, under settings that change from one measurement to the next.
//
// Making the images of large models takes much longer than a measurement. So new settings do not
// start everything anew: the broker is replaced while the workers live, who bring the images to its
// successor, and then the workers are. Images are lost only with a broker that ends without
// workers.
//
// Threads: BrokerStatus is thread-safe; else one at a time. The calls block. Everything is killed
// and removed at the end.
#ifndef PALIMPSEST_TOOLS_PALCTL_TENANT_NODE_H_
#define PALIMPSEST_TOOLS_PALCTL_TENANT_NODE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/process.h"
#include "proto/palimpsest/v1/block_store.grpc.pb.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"
#include "tools/load/load_generator.h"
#include "tools/palctl/bench_client.h"
#include "tools/palctl/bench_folder.h"

namespace palimpsest::palctl {

struct TenantNodeOptions {
  struct Tenant {
    std::string name;
    std::string model_config;  // text of a config.json, for dummy weights; or
    std::string model_folder;  // of a checkpoint
    Bytes share;               // its part of the pool, context included
    Bytes workspace;           // on a GPU
  };

  std::string binaries;  // bench_folder.h
  std::string folder;    // in which the node has its own, with its tiers; empty: /tmp
  bool cuda = false;
  std::vector<int> gpus = {0};
  Bytes slab;
  Bytes pool;
  Bytes context;  // of each tenant
  int32_t max_sequence_tokens = 0;
  std::vector<Tenant> tenants;
};

// Entries of YAML maps in braces: "a: 1, b: {c: 2}"; empty ones are left out.
struct TenantNodeSettings {
  std::string policy;                // of the broker
  std::string pool;                  // of the broker's pool, beside what the options say
  std::vector<std::string> tenants;  // of each tenant's entry there
  std::string engine;                // of the workers
  std::string tiers;                 // of the broker; empty: none
  bool floors = false;               // the floor of each tenant is its share
  bool fixed_shares = false;         // and its quota too
};

class TenantNode {
 public:
  // Writes models and secrets; starts nothing. InvalidArgument for a model that is none.
  static absl::StatusOr<std::unique_ptr<TenantNode>> Create(const TenantNodeOptions& options);
  ~TenantNode();
  TenantNode(const TenantNode&) = delete;
  TenantNode& operator=(const TenantNode&) = delete;

  // Makes the node run under these settings, with workers that have served nothing yet, and waits
  // until all answer. InvalidArgument: a program refuses the settings; whatever ran goes on.
  absl::Status Run(const TenantNodeSettings& settings);

  // Of the tenant's worker; see BenchClient.
  absl::StatusOr<BenchClient::Answer> Ask(size_t tenant, int32_t batch, int32_t prompt_tokens,
                                          int32_t tokens);

  BenchClient& client(size_t tenant) { return *tenants_[tenant].client; }

  // OK once no worker has requests.
  absl::Status AwaitIdle(absl::Duration timeout);

  std::vector<load::LoadTarget> targets() const;
  absl::StatusOr<v1::GetStatusResponse> BrokerStatus() const;
  // What operators ask of the block store.
  v1::BlockAdmin::Stub& block_admin() { return *admin_stub_; }
  absl::StatusOr<std::vector<v1::WorkerStats>> WorkerStats();
  std::string LogEnds() const;

 private:
  struct Tenant {
    TenantNodeOptions::Tenant options;
    std::string model_path;
    int32_t vocabulary = 0;
    std::unique_ptr<ChildProcess> worker;
    std::unique_ptr<BenchClient> client;
  };

  explicit TenantNode(const TenantNodeOptions& options) : options_(options) {}

  absl::Status Prepare();
  std::string BrokerConfig(const TenantNodeSettings& settings, const std::string& packer) const;
  std::string WorkerConfig(const TenantNodeSettings& settings, const Tenant& tenant) const;
  std::string SocketOf(const Tenant& tenant) const;
  // Whether the program takes this configuration.
  absl::Status Check(const BenchProgram& program, const std::string& config) const;
  absl::Status WriteConfigs(const TenantNodeSettings& settings);
  absl::Status Start();
  // A new broker, to which the workers bring the images.
  absl::Status ReplaceBroker();
  void KillAll();
  absl::Status StartBroker();
  absl::Status StartWorker(Tenant& tenant);
  absl::Status StartWorkers();
  // One that does not end in time is killed.
  void StopWorkers();
  bool WorkersLive() const;
  // Workers that have ended are started again first.
  absl::Status AwaitAllAttached();
  absl::Status CheckAlive() const;
  template <typename Condition>
  absl::Status Await(const char* what, absl::Duration timeout, Condition condition);

  const TenantNodeOptions options_;
  std::unique_ptr<BenchFolder> folder_;
  std::string router_token_;
  std::vector<Tenant> tenants_;
  std::unique_ptr<v1::Broker::Stub> broker_stub_;
  std::unique_ptr<v1::BlockAdmin::Stub> admin_stub_;
  std::unique_ptr<ChildProcess> broker_;
};

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_TENANT_NODE_H_
