#include "tools/palctl/tenant_node.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>
#include <signal.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/strip.h"
#include "absl/strings/substitute.h"
#include "absl/time/clock.h"
#include "common/file.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "tools/palctl/bench_shapes.h"
#include "worker/model/model_config.h"

namespace palimpsest::palctl {
namespace {

namespace fs = std::filesystem;

constexpr absl::Duration kPoll = absl::Milliseconds(5);
constexpr absl::Duration kLook = absl::Milliseconds(500);
constexpr absl::Duration kLongestCheck = absl::Seconds(30);
// Making the images of several large models takes most of it.
constexpr absl::Duration kLongestStart = absl::Minutes(8);
constexpr absl::Duration kLongestStop = absl::Seconds(30);
constexpr Bytes kLongestConfig = MiB(1);
// What every tenant answers before a measurement, so that graphs, caches and clocks are warm.
constexpr int32_t kWarmBatch = 4, kWarmPrompt = 64, kWarmTokens = 16;
// So that a worker's queue is never what ends a load.
constexpr int32_t kQueueCapacity = 65'536;

std::string InBraces(std::initializer_list<absl::string_view> entries) {
  std::vector<absl::string_view> present;
  for (absl::string_view entry : entries) {
    if (!entry.empty()) present.push_back(entry);
  }
  return absl::StrCat("{", absl::StrJoin(present, ", "), "}");
}

std::string Size(Bytes bytes) { return absl::StrCat(bytes / MiB(1), " MiB"); }

Bytes RoundDown(Bytes bytes, Bytes unit) { return unit * (bytes / unit); }

std::shared_ptr<grpc::Channel> Connect(const std::string& socket) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 20);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
  return grpc::CreateCustomChannel("unix:" + socket, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

absl::StatusOr<std::unique_ptr<TenantNode>> TenantNode::Create(const TenantNodeOptions& options) {
  std::unique_ptr<TenantNode> node(new TenantNode(options));
  if (absl::Status status = node->Prepare(); !status.ok()) return status;
  return node;
}

TenantNode::~TenantNode() { KillAll(); }

void TenantNode::KillAll() {
  for (Tenant& tenant : tenants_) tenant.worker.reset();
  broker_.reset();
}

absl::Status TenantNode::Prepare() {
  auto folder = BenchFolder::Create(options_.binaries, options_.folder);
  if (!folder.ok()) return folder.status();
  folder_ = *std::move(folder);
  const auto token = folder_->WriteSecret("router-token");
  if (!token.ok()) return token.status();
  router_token_ = *token;
  for (const TenantNodeOptions::Tenant& options : options_.tenants) {
    Tenant& tenant = tenants_.emplace_back();
    tenant.options = options;
    std::string config = options.model_config;
    std::error_code error;
    if (options.model_folder.empty()) {
      tenant.model_path = absl::StrCat(folder_->path(), "/model-", options.name);
      fs::create_directories(tenant.model_path, error);
      absl::Status status = WriteBenchModel(tenant.model_path, config);
      if (!status.ok()) return status;
    } else {
      tenant.model_path = fs::absolute(options.model_folder, error).string();
      auto text = ReadFile(tenant.model_path + "/config.json", kLongestConfig);
      if (!text.ok()) return text.status();
      config = *std::move(text);
    }
    const auto model = ParseModelConfig(config, "");
    if (!model.ok()) return model.status();
    tenant.vocabulary = model->vocab_size;
    const auto secret = folder_->WriteSecret(absl::StrCat("secret-", options.name));
    if (!secret.ok()) return secret.status();
  }
  broker_stub_ = v1::Broker::NewStub(Connect(folder_->path() + "/broker.sock"));
  admin_stub_ = v1::BlockAdmin::NewStub(Connect(folder_->path() + "/state/operator.sock"));
  return absl::OkStatus();
}

std::string TenantNode::SocketOf(const Tenant& tenant) const {
  return absl::StrCat(folder_->path(), "/worker-", tenant.options.name, ".sock");
}

std::string TenantNode::BrokerConfig(const TenantNodeSettings& settings,
                                     const std::string& packer) const {
  const std::string backend = options_.cuda ? absl::StrCat("backend: cuda, gpus: [",
                                                           absl::StrJoin(options_.gpus, ", "), "]")
                                            : "backend: host";
  std::string text = absl::Substitute(
      "node: bench\nstate_dir: state\ncontrol_socket: broker.sock\n"
      "descriptor_socket: descriptors.sock\npacker: $0\n"
      "pool: $1\n",
      packer,
      InBraces({backend, absl::StrCat("slab_bytes: ", Size(options_.slab)),
                absl::StrCat("bytes: ", Size(RoundDown(options_.pool, options_.slab))),
                settings.pool}));
  if (!settings.policy.empty()) absl::StrAppend(&text, "policy: {", settings.policy, "}\n");
  if (!settings.tiers.empty()) absl::StrAppend(&text, "tiers: {", settings.tiers, "}\n");
  absl::StrAppend(&text, "tenants:\n");
  for (size_t i = 0; i < tenants_.size(); ++i) {
    const TenantNodeOptions::Tenant& tenant = tenants_[i].options;
    const std::string model = absl::Substitute(
        "name: $0, secret_file: secret-$0, model: {path: \"$1\", max_sequence_tokens: $2$3}",
        tenant.name, tenants_[i].model_path, options_.max_sequence_tokens,
        tenant.model_folder.empty() ? ", load_format: dummy" : "");
    const std::string gpu = options_.cuda
                                ? absl::Substitute("workspace: $0, context: $1",
                                                   Size(tenant.workspace), Size(options_.context))
                                : "";
    // A quota is with the context, a floor is slabs alone.
    const Bytes slabs = RoundDown(tenant.share - options_.context, options_.slab);
    const std::string floor = settings.floors ? absl::StrCat("floor: ", Size(slabs)) : "";
    const std::string quota =
        settings.fixed_shares ? absl::StrCat("quota: ", Size(slabs + options_.context)) : "";
    absl::StrAppend(&text, "  - ",
                    InBraces({model, gpu, floor, quota,
                              i < settings.tenants.size() ? settings.tenants[i] : ""}),
                    "\n");
  }
  return text;
}

std::string TenantNode::WorkerConfig(const TenantNodeSettings& settings,
                                     const Tenant& tenant) const {
  const std::string device =
      options_.cuda ? absl::StrCat("device: cuda, gpus: [", absl::StrJoin(options_.gpus, ", "),
                                   "], gemm_cache_file: gemm-", tenant.options.name)
                    : "device: cpu";
  return absl::Substitute(
      "tenant: $0\nsecret_file: secret-$0\nmodel: {name: $0, path: \"$1\"}\n"
      "broker: {control_socket: broker.sock, descriptor_socket: descriptors.sock}\n"
      "listen: unix:$2\nrouter_token_file: router-token\nengine: $3\n",
      tenant.options.name, tenant.model_path, SocketOf(tenant),
      InBraces({device, absl::StrCat("queue_capacity: ", kQueueCapacity), settings.engine}));
}

absl::Status TenantNode::Check(const BenchProgram& program, const std::string& config) const {
  std::error_code ignored;
  const std::string log = folder_->path() + "/check.log";
  fs::remove(log, ignored);
  if (absl::Status status = folder_->Write("check.yaml", config); !status.ok()) return status;
  auto process = folder_->Spawn("check", program, {"--print-config"});
  if (!process.ok()) return process.status();
  const absl::Status status = process->Wait(kLongestCheck);
  if (status.ok()) return status;
  const std::string said = ReadFile(log, kLongestConfig).value_or("");
  return absl::InvalidArgumentError(said.empty()
                                        ? absl::StrCat(program.name, ": ", status.message())
                                        : std::string(absl::StripSuffix(said, "\n")));
}

absl::Status TenantNode::WriteConfigs(const TenantNodeSettings& settings) {
  const auto packer = folder_->Program(kPackerProgram);
  if (!packer.ok()) return packer.status();
  const std::string broker = BrokerConfig(settings, *packer);
  absl::Status status = Check(kBrokerProgram, broker);
  if (status.ok() && !tenants_.empty()) {
    status = Check(kWorkerProgram, WorkerConfig(settings, tenants_.front()));
  }
  if (!status.ok()) return status;
  status = folder_->Write("broker.yaml", broker);
  for (const Tenant& tenant : tenants_) {
    status.Update(folder_->Write(absl::StrCat("worker-", tenant.options.name, ".yaml"),
                                 WorkerConfig(settings, tenant)));
  }
  return status;
}

absl::Status TenantNode::Run(const TenantNodeSettings& settings) {
  if (absl::Status status = WriteConfigs(settings); !status.ok()) return status;
  if (broker_ != nullptr) {
    absl::Status status = ReplaceBroker();
    if (status.ok()) {
      StopWorkers();
      return StartWorkers();
    }
    // It did not like its settings; the workers keep the images for the next one.
    if (broker_->handle().Exited() && WorkersLive()) return status;
  }
  KillAll();
  return Start();
}

absl::Status TenantNode::Start() {
  std::error_code ignored;
  fs::remove_all(folder_->path() + "/state", ignored);
  absl::Status status = StartBroker();
  if (status.ok()) status = StartWorkers();
  return status;
}

absl::Status TenantNode::ReplaceBroker() {
  if (!broker_->handle().Exited()) {
    absl::Status status = AwaitAllAttached();
    if (status.ok()) status = broker_->handle().Signal(SIGTERM);
    if (status.ok()) status = broker_->Wait(kLongestStop);
    if (!status.ok()) return status;
  }
  absl::Status status = StartBroker();
  if (status.ok()) status = AwaitAllAttached();
  return status;
}

absl::Status TenantNode::AwaitAllAttached() {
  for (Tenant& tenant : tenants_) {
    if (tenant.worker != nullptr && !tenant.worker->handle().Exited()) continue;
    if (absl::Status status = StartWorker(tenant); !status.ok()) return status;
  }
  return Await("every worker to have its broker", kLongestStart, [this] {
    const auto now = BrokerStatus();
    return now.ok() && std::all_of(now->tenants().begin(), now->tenants().end(),
                                   [](const auto& tenant) { return tenant.attached(); });
  });
}

absl::Status TenantNode::StartBroker() {
  auto broker = folder_->Spawn("broker", kBrokerProgram);
  if (!broker.ok()) return broker.status();
  broker_ = std::make_unique<ChildProcess>(*std::move(broker));
  return absl::OkStatus();
}

absl::Status TenantNode::StartWorker(Tenant& tenant) {
  std::error_code ignored;
  fs::remove(SocketOf(tenant), ignored);
  auto worker = folder_->Spawn(absl::StrCat("worker-", tenant.options.name), kWorkerProgram);
  if (!worker.ok()) return worker.status();
  tenant.worker = std::make_unique<ChildProcess>(*std::move(worker));
  tenant.client =
      std::make_unique<BenchClient>("unix:" + SocketOf(tenant), router_token_, tenant.vocabulary);
  return absl::OkStatus();
}

absl::Status TenantNode::StartWorkers() {
  for (Tenant& tenant : tenants_) {
    if (absl::Status status = StartWorker(tenant); !status.ok()) return status;
  }
  for (Tenant& tenant : tenants_) {
    const absl::Status status = Await("every worker to serve", kLongestStart, [&tenant] {
      const auto stats = tenant.client->Stats(kLook);
      return stats.ok() && stats->broker_connected();
    });
    if (!status.ok()) return status;
  }
  for (Tenant& tenant : tenants_) {
    const auto warm = tenant.client->Ask(kWarmBatch, kWarmPrompt, kWarmTokens);
    if (!warm.ok()) {
      return absl::Status(warm.status().code(),
                          absl::StrCat("the first answer of ", tenant.options.name, ": ",
                                       warm.status().message(), "\n", LogEnds()));
    }
  }
  return absl::OkStatus();
}

void TenantNode::StopWorkers() {
  for (Tenant& tenant : tenants_) (void)tenant.worker->handle().Signal(SIGTERM);
  for (Tenant& tenant : tenants_) {
    (void)tenant.worker->Wait(kLongestStop);
    tenant.worker.reset();
  }
}

bool TenantNode::WorkersLive() const {
  return std::all_of(tenants_.begin(), tenants_.end(), [](const Tenant& tenant) {
    return tenant.worker != nullptr && !tenant.worker->handle().Exited();
  });
}

absl::Status TenantNode::CheckAlive() const {
  if (broker_ == nullptr || broker_->handle().Exited()) {
    return absl::AbortedError(absl::StrCat("the broker has ended\n", LogEnds()));
  }
  for (const Tenant& tenant : tenants_) {
    if (tenant.worker != nullptr && tenant.worker->handle().Exited()) {
      return absl::AbortedError(
          absl::StrCat("the worker of ", tenant.options.name, " has ended\n", LogEnds()));
    }
  }
  return absl::OkStatus();
}

template <typename Condition>
absl::Status TenantNode::Await(const char* what, absl::Duration timeout, Condition condition) {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (!condition()) {
    if (absl::Status status = CheckAlive(); !status.ok()) return status;
    if (MonotonicNow() > deadline) {
      return absl::DeadlineExceededError(
          absl::StrCat("waited ", absl::FormatDuration(timeout), " for ", what, "\n", LogEnds()));
    }
    absl::SleepFor(kPoll);
  }
  return absl::OkStatus();
}

absl::StatusOr<BenchClient::Answer> TenantNode::Ask(size_t tenant, int32_t batch,
                                                    int32_t prompt_tokens, int32_t tokens) {
  return tenants_[tenant].client->Ask(batch, prompt_tokens, tokens);
}

absl::Status TenantNode::AwaitIdle(absl::Duration timeout) {
  return Await("all requests to end", timeout, [this] {
    const auto all = WorkerStats();
    return all.ok() && std::all_of(all->begin(), all->end(), [](const v1::WorkerStats& stats) {
             return stats.running_sequences() + stats.waiting_sequences() == 0;
           });
  });
}

std::vector<load::LoadTarget> TenantNode::targets() const {
  std::vector<load::LoadTarget> targets;
  for (const Tenant& tenant : tenants_) {
    targets.push_back({"unix:" + SocketOf(tenant), router_token_, tenant.vocabulary});
  }
  return targets;
}

absl::StatusOr<v1::GetStatusResponse> TenantNode::BrokerStatus() const {
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(kLook));
  v1::GetStatusResponse response;
  const grpc::Status status = broker_stub_->GetStatus(&context, {}, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

absl::StatusOr<std::vector<v1::WorkerStats>> TenantNode::WorkerStats() {
  std::vector<v1::WorkerStats> all;
  for (Tenant& tenant : tenants_) {
    auto stats = tenant.client->Stats();
    if (!stats.ok()) return stats.status();
    all.push_back(*std::move(stats));
  }
  return all;
}

std::string TenantNode::LogEnds() const {
  std::vector<std::string> names = {"broker"};
  for (const Tenant& tenant : tenants_) {
    names.push_back(absl::StrCat("worker-", tenant.options.name));
  }
  return folder_->LogEnds(names);
}

}  // namespace palimpsest::palctl
