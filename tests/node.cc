#include "tests/node.h"

#include <dlfcn.h>
#include <fcntl.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <set>
#include <sstream>
#include <thread>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/substitute.h"
#include "absl/time/clock.h"
#include "common/fd.h"
#include "common/grpc_idle_channels.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "common/random.h"
#include "tests/byte_tokenizer.h"
#include "worker/model/testing.h"

namespace palimpsest {
namespace {

namespace fs = std::filesystem;
using palimpsest::v1::GetStatusResponse;
using palimpsest::v1::TenantMemory;

constexpr absl::Duration kPoll = absl::Milliseconds(5);
constexpr absl::Duration kExit = absl::Seconds(20);

void WriteText(const std::string& path, const std::string& text, mode_t mode = 0600) {
  std::ofstream(path) << text;
  ASSERT_EQ(::chmod(path.c_str(), mode), 0);
}

std::string RandomHex() { return absl::BytesToHexString(Token::Random().bytes()); }

// Of the largest step of a test's model on a GPU; most of it is of fixed size.
constexpr int kWorkspaceSlabs = 64;
// Alternatives of each token, to judge a difference by.
constexpr uint32_t kAlternatives = 20;
// Between log-probabilities of the same token in steps of different sizes.
constexpr float kLogprobMargin = 0.1f;

// The slab files that a process holds, by inode.
void AddSlabFiles(pid_t pid, std::set<std::pair<dev_t, ino_t>>& files) {
  std::error_code error;
  for (const auto& entry : fs::directory_iterator(absl::StrCat("/proc/", pid, "/fd"), error)) {
    const std::string target = fs::read_symlink(entry.path(), error).string();
    struct stat status;
    if (!absl::StrContains(target, "memfd:") || !absl::StrContains(target, "slab")) continue;
    if (::stat(entry.path().c_str(), &status) == 0 && status.st_size > 0) {
      files.emplace(status.st_dev, status.st_ino);
    }
  }
}

int Gpus(NodeBackend backend) {
  return backend == NodeBackend::kHost ? 0 : backend == NodeBackend::kCuda ? 1 : 2;
}

// What each GPU has of it is the same for any number of them.
ModelConfig TestModelConfig(const NodeOptions& options) {
  const int ranks = std::max(Gpus(options.backend), 1);
  ModelConfig config = TinyModelConfig();
  config.num_layers = 8;
  config.hidden_size = 256;
  config.num_heads = 256 / options.head_dim * ranks;
  config.num_kv_heads = 2 * ranks;
  config.head_dim = options.head_dim;
  config.intermediate_size = options.intermediate_size * ranks;
  config.vocab_size = 256;
  config.max_position = options.max_sequence_tokens;
  if (options.sliding_window > 0) {
    config.architecture = "MistralForCausalLM";
    config.sliding_window = options.sliding_window;
  }
  return config;
}

// The number of GPUs that the driver finds; 0 without a driver.
int CountGpus() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return 0;
  const auto init = reinterpret_cast<int (*)(unsigned)>(dlsym(library, "cuInit"));
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(library, "cuDeviceGetCount"));
  int gpus = 0;
  if (init == nullptr || count == nullptr || init(0) != 0 || count(&gpus) != 0) return 0;
  return gpus;
}

std::string Inherited(const char* variable) {
  const char* const value = std::getenv(variable);
  return absl::StrCat(variable, "=", value == nullptr ? "" : value);
}

}  // namespace

namespace {

using palimpsest::v1::TokenLogprob;

// How far the chosen token is ahead of another one; infinite if that is not among the alternatives.
float Lead(const TokenLogprob& chosen, int32_t other) {
  for (const auto& top : chosen.top()) {
    if (top.token_id() == other) return chosen.logprob() - top.logprob();
  }
  return std::numeric_limits<float>::infinity();
}

::testing::AssertionResult Agree(const std::vector<TokenLogprob>& expected,
                                 const std::vector<TokenLogprob>& got, bool greedy) {
  for (size_t i = 0; i < std::min(expected.size(), got.size()); ++i) {
    const TokenLogprob &a = expected[i], &b = got[i];
    if (a.token_id() != b.token_id()) {
      const float lead = std::max(Lead(a, b.token_id()), Lead(b, a.token_id()));
      if (!greedy || lead <= 2 * kLogprobMargin) return ::testing::AssertionSuccess();
      return ::testing::AssertionFailure() << "token " << i << " differs, by a lead of " << lead;
    }
    if (std::abs(a.logprob() - b.logprob()) > kLogprobMargin) {
      return ::testing::AssertionFailure() << "log-probabilities of token " << i << " are "
                                           << a.logprob() << " and " << b.logprob();
    }
  }
  return ::testing::AssertionSuccess();
}

}  // namespace

::testing::AssertionResult SameTokens(NodeBackend backend, const Generation& expected,
                                      const Generation& got, bool greedy, bool prefix) {
  if (prefix ? got.tokens.size() > expected.tokens.size()
             : got.tokens.size() != expected.tokens.size()) {
    return ::testing::AssertionFailure()
           << got.tokens.size() << " tokens where " << expected.tokens.size() << " were expected";
  }
  if (Gpus(backend) > 0) return Agree(expected.logprobs, got.logprobs, greedy);
  const auto [a, b] = std::mismatch(got.tokens.begin(), got.tokens.end(), expected.tokens.begin());
  if (a == got.tokens.end()) return ::testing::AssertionSuccess();
  return ::testing::AssertionFailure() << "token " << a - got.tokens.begin() << " is " << *a
                                       << " where " << *b << " was expected";
}

std::string NodeBackendName(NodeBackend backend) {
  constexpr const char* kNames[] = {"Host", "Cuda", "TwoGpus"};
  return kNames[static_cast<int>(backend)];
}

std::string WhyNodeCannotRun(NodeBackend backend) {
  if (backend == NodeBackend::kHost) return "";
#ifdef PALIMPSEST_HAVE_CUDA
  static const int gpus = CountGpus();
  if (gpus >= Gpus(backend)) return "";
  return absl::StrCat("there are ", gpus,
                      " GPUs here; tools/gpu-check runs this test on a machine with ",
                      Gpus(backend));
#else
  (void)CountGpus;
  return "this build has no CUDA toolkit";
#endif
}

Node::Node(NodeOptions options) : options_(std::move(options)) {
  WatchIdleChannels();
  // Not under the test runner's folder: a Unix socket's path has at most 107 characters.
  std::string pattern = "/tmp/palimpsest-node.XXXXXX";
  folder_ = ::mkdtemp(pattern.data());
  fs::create_directories(folder_ + "/secrets");
  for (const NodeTenant& tenant : options_.tenants) {
    tokens_[tenant.name] = RandomHex();
    WriteText(absl::StrCat(folder_, "/secrets/", tenant.name), RandomHex());
  }
  WriteText(folder_ + "/secrets/router", RandomHex());
  WriteText(folder_ + "/secrets/tenants",
            absl::StrCat(absl::StrJoin(tokens_, "\n", absl::PairFormatter(" ")), "\n"));
  WriteModel();
  WriteConfigs();
  const auto channel = [&](const std::string& socket) {
    grpc::ChannelArguments arguments;
    arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
    arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 100);
    arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 20);
    return grpc::CreateCustomChannel(absl::StrCat("unix:", folder_, "/", socket),
                                     grpc::InsecureChannelCredentials(), arguments);
  };
  broker_stub_ = palimpsest::v1::Broker::NewStub(channel("broker.sock"));
  router_stub_ = palimpsest::v1::Router::NewStub(channel("router.sock"));
}

Node::~Node() {
  router_.reset();
  workers_.clear();
  broker_.reset();
  std::error_code ignored;
  fs::remove_all(folder_, ignored);
}

void Node::WriteModel() {
  const std::string model = folder_ + "/model";
  fs::create_directories(model);
  ASSERT_TRUE(WriteRandomModel(model, TestModelConfig(options_)).ok());
  WriteText(model + "/tokenizer.json", ByteTokenizerJson(), 0644);
  WriteText(
      model + "/tokenizer_config.json",
      R"({"chat_template": "{% for m in messages %}{{ m['role'] + ':' + m['content'] }}{% endfor %}"})",
      0644);
}

int Node::WorkspaceSlabs() const { return Gpus(options_.backend) > 0 ? kWorkspaceSlabs : 0; }

int Node::pool_slabs() const {
  return options_.pool_slabs + WorkspaceSlabs() * static_cast<int>(options_.tenants.size());
}

std::string Node::GpuList() const {
  constexpr const char* kLists[] = {"[]", "[0]", "[0, 1]"};
  return kLists[Gpus(options_.backend)];
}

// The same steps on both back-ends. Algorithms of a GPU are measured once for all nodes.
std::string Node::EngineLines() const {
  if (options_.backend == NodeBackend::kHost) return "  threads: 1\n";
  return absl::StrCat("  device: cuda\n  gpus: ", GpuList(),
                      "\n  max_step_tokens: 256\n  max_batch_sequences: 32\n",
                      "  gemm_cache_file: ", ::testing::TempDir(), "/palimpsest-node-gemm\n");
}

void Node::WriteConfigs() {
  const int workspace = WorkspaceSlabs();
  std::string broker = absl::Substitute(
      "node: test\nstate_dir: state\ncontrol_socket: broker.sock\n"
      "descriptor_socket: descriptors.sock\nmetrics_listen: 127.0.0.1:0\npacker: $0\n"
      "pool: {backend: $1, gpus: $2, slab_bytes: 2 MiB, bytes: $3 MiB}\n",
      Program("packer", "worker/model"), Gpus(options_.backend) > 0 ? "cuda" : "host", GpuList(),
      pool_slabs() * 2);
  if (!options_.policy.empty()) absl::StrAppend(&broker, "policy:\n");
  for (const std::string& line : options_.policy) absl::StrAppend(&broker, "  ", line, "\n");
  if (!options_.tiers.empty()) absl::StrAppend(&broker, "tiers:\n");
  for (const std::string& line : options_.tiers) absl::StrAppend(&broker, "  ", line, "\n");
  absl::StrAppend(&broker, "tenants:\n");
  std::string router =
      "listen: unix:router.sock\nmetrics_listen: 127.0.0.1:0\nauth_file: secrets/tenants\n"
      "worker_token_file: secrets/router\nhealth: {interval: 100ms, timeout: 2s}\ntenants:\n";
  for (const NodeTenant& tenant : options_.tenants) {
    absl::StrAppend(
        &broker, absl::Substitute(
                     "  - name: $0\n    secret_file: secrets/$0\n"
                     "    model: {path: model, max_sequence_tokens: $1, kv_dtype: $8}\n"
                     "    priority: $2\n    pin: $3\n    floor: $4 MiB\n    quota: $5 MiB\n"
                     "    workspace: $6 MiB\n$7",
                     tenant.name, options_.max_sequence_tokens, tenant.priority,
                     tenant.pin ? "true" : "false",
                     tenant.floor_slabs == 0 ? 0 : 2 * (tenant.floor_slabs + workspace),
                     2 * (tenant.quota_slabs == 0 ? pool_slabs() : tenant.quota_slabs + workspace),
                     2 * workspace,
                     // Beside the pool, which the tests count in slabs.
                     workspace > 0 ? "    context: 0 MiB\n" : "", tenant.kv_dtype));
    if (!tenant.hibernate_after.empty()) {
      absl::StrAppend(&broker, "    hibernate_after: ", tenant.hibernate_after, "\n");
    }
    std::string worker = absl::Substitute(
        "tenant: $0\nsecret_file: secrets/$0\n"
        "model: {name: tiny, path: model, max_sequence_tokens: $1}\n"
        "broker: {control_socket: broker.sock, descriptor_socket: descriptors.sock}\n"
        "listen: unix:worker-$0.sock\nrouter_token_file: secrets/router\n"
        "metrics_listen: 127.0.0.1:0\nengine:\n$2",
        tenant.name, options_.max_sequence_tokens, EngineLines());
    for (const std::string& line : options_.engine) absl::StrAppend(&worker, "  ", line, "\n");
    if (!tenant.hibernate_after.empty()) absl::StrAppend(&worker, "supervise: true\n");
    WriteText(absl::StrCat(folder_, "/", tenant.name, ".yaml"), worker);
    absl::StrAppend(
        &router,
        absl::Substitute("  - name: $0\n    models:\n      - name: tiny\n        path: model\n"
                         "        workers: [\"unix:worker-$0.sock\"]\n",
                         tenant.name));
  }
  WriteText(folder_ + "/broker.yaml", broker);
  WriteText(folder_ + "/router.yaml", router);
}

std::string Node::Program(const std::string& name, const std::string& package) {
  std::error_code error;
  const fs::path beside = fs::read_symlink("/proc/self/exe", error).parent_path() / name;
  return fs::exists(beside, error) ? beside.string()
                                   : fs::absolute(fs::path(package) / name).string();
}

std::unique_ptr<ChildProcess> Node::Spawn(const std::string& name, const std::string& binary) {
  UniqueFd log(::open(absl::StrCat(folder_, "/", name, ".log").c_str(),
                      O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  // The processes' paths are relative to their working directory.
  SpawnOptions options;
  options.argv = {"/usr/bin/env", "-C", folder_, binary, "--config", absl::StrCat(name, ".yaml")};
  // A GPU's libraries may be where only the environment says.
  options.environment = {"PATH=/usr/bin:/bin", Inherited("LD_LIBRARY_PATH")};
  options.output = log.get();
  absl::StatusOr<ChildProcess> process = ChildProcess::Spawn(options);
  if (!process.ok()) {
    ADD_FAILURE() << name << ": " << process.status();
    return nullptr;
  }
  return std::make_unique<ChildProcess>(*std::move(process));
}

void Node::StartBroker() {
  broker_ = Spawn("broker", Program("palimpsest-broker", "broker/server"));
}

void Node::StartWorker(const std::string& tenant) {
  workers_[tenant] = Spawn(tenant, Program("palimpsest-worker", "worker/server"));
}

void Node::StartRouter() {
  router_ = Spawn("router", Program("palimpsest-router", "router/server"));
}

void Node::Start() {
  StartBroker();
  for (const NodeTenant& tenant : options_.tenants) StartWorker(tenant.name);
  StartRouter();
  AwaitReady();
}

void Node::AwaitReady() {
  for (const NodeTenant& tenant : options_.tenants) {
    Await(absl::StrCat("readiness of ", tenant.name), [&] {
      grpc::ClientContext context;
      context.AddMetadata("authorization", absl::StrCat("Bearer ", token(tenant.name)));
      context.set_deadline(GrpcTimeout(absl::Seconds(5)));
      palimpsest::v1::GetTenantStatusResponse response;
      const grpc::Status status = router_stub_->GetTenantStatus(&context, {}, &response);
      return status.ok() && response.workers_size() > 0 && response.workers(0).healthy();
    });
  }
}

void Node::AwaitServing() {
  for (const NodeTenant& tenant : options_.tenants) {
    Await(absl::StrCat("an answer of ", tenant.name), [&] {
      return Generate({.tenant = tenant.name, .text = "Who is there?", .max_tokens = 1})
          .status.ok();
    });
  }
}

absl::Status Node::StopAll() {
  absl::Status first;
  const auto stop = [&](const std::string& name, std::unique_ptr<ChildProcess>& process) {
    if (process == nullptr) return;
    absl::Status status = process->handle().Signal(SIGTERM);
    if (status.ok()) status = process->Wait(kExit);
    if (!status.ok()) {
      first.Update(
          absl::Status(status.code(), absl::StrCat(name, ": ", status.message(), "\n", LogEnds())));
    }
    process.reset();
  };
  stop("router", router_);
  for (auto& [name, process] : workers_) stop(name, process);
  stop("broker", broker_);
  return first;
}

absl::StatusOr<GetStatusResponse> Node::BrokerStatus() {
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(absl::Seconds(5)));
  GetStatusResponse response;
  const grpc::Status status = broker_stub_->GetStatus(&context, {}, &response);
  if (!status.ok()) return FromGrpcStatus(status);
  return response;
}

TenantMemory Node::Tenant(const std::string& name) {
  const absl::StatusOr<GetStatusResponse> status = BrokerStatus();
  if (status.ok()) {
    for (const TenantMemory& tenant : status->tenants()) {
      if (tenant.tenant() == name) return tenant;
    }
  }
  ADD_FAILURE() << "no status of " << name << ": " << status.status();
  return {};
}

void Node::Await(const std::string& what, const std::function<bool()>& condition,
                 absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (!condition()) {
    if (MonotonicNow() > deadline) {
      const auto status = BrokerStatus();
      FAIL() << what << " did not happen within " << timeout << "\n"
             << (status.ok() ? status->DebugString() : status.status().ToString()) << LogEnds();
    }
    absl::SleepFor(kPoll);
  }
}

Generation Node::Generate(const Request& request) {
  grpc::ClientContext context;
  context.AddMetadata("authorization", absl::StrCat("Bearer ", tokens_.at(request.tenant)));
  context.set_deadline(GrpcTimeout(request.deadline));
  palimpsest::v1::GenerateRequest message;
  message.set_text(request.text);
  message.set_conversation_id(request.conversation);
  *message.mutable_hints() = request.hints;
  message.mutable_sampling()->set_max_tokens(request.max_tokens);
  message.mutable_sampling()->set_temperature(request.temperature);
  message.mutable_sampling()->set_seed(request.seed);
  message.mutable_sampling()->set_ignore_eos(true);
  if (Gpus(options_.backend) > 0) {
    message.mutable_sampling()->set_logprobs(kAlternatives);
  }
  auto stream = router_stub_->Generate(&context, message);
  Generation result;
  palimpsest::v1::GenerateResponse response;
  while (stream->Read(&response)) {
    result.tokens.insert(result.tokens.end(), response.token_ids().begin(),
                         response.token_ids().end());
    result.text += response.text();
    result.logprobs.insert(result.logprobs.end(), response.logprobs().begin(),
                           response.logprobs().end());
    if (response.has_usage()) result.usage = response.usage();
    if (response.finish_reason() != palimpsest::v1::FINISH_REASON_UNSPECIFIED) {
      result.finish_reason = response.finish_reason();
    }
    if (request.on_message && !request.on_message(result)) context.TryCancel();
  }
  result.status = FromGrpcStatus(stream->Finish());
  return result;
}

std::future<Generation> Node::GenerateAsync(const Request& request) {
  return std::async(std::launch::async, [this, request] { return Generate(request); });
}

std::string Node::Log(const std::string& process) const {
  std::ifstream in(absl::StrCat(folder_, "/", process, ".log"));
  std::stringstream text;
  text << in.rdbuf();
  return text.str();
}

std::string Node::MetricsAddress(const std::string& process) const {
  const std::string log = Log(process);
  const std::string key = "metrics=";
  const size_t found = log.rfind(key);
  if (found == std::string::npos) {
    ADD_FAILURE() << process << " does not say where it serves metrics:\n" << log;
    return "";
  }
  const size_t begin = found + key.size();
  return log.substr(begin, log.find_first_of(" \n", begin) - begin);
}

std::string Node::LogEnds() const {
  std::string out;
  std::vector<std::string> names = {"broker", "router"};
  for (const NodeTenant& tenant : options_.tenants) names.push_back(tenant.name);
  for (const std::string& name : names) {
    const std::string log = Log(name);
    absl::StrAppend(&out, "--- ", name, ":\n",
                    log.substr(log.size() > 2000 ? log.size() - 2000 : 0), "\n");
  }
  return out;
}

bool Node::EverySlabExistsOnce() {
  if (Gpus(options_.backend) > 0) return true;
  std::set<std::pair<dev_t, ino_t>> files;
  if (broker_ != nullptr) AddSlabFiles(broker_->pid(), files);
  for (const auto& [tenant, worker] : workers_) {
    if (worker != nullptr) AddSlabFiles(worker->pid(), files);
  }
  return files.size() == static_cast<size_t>(pool_slabs());
}

int Node::SumOfStates(const GetStatusResponse& status) {
  return static_cast<int>(status.free_slabs() + status.granted_slabs() + status.revoking_slabs() +
                          status.cleaning_slabs() + status.quarantined_slabs());
}

}  // namespace palimpsest
