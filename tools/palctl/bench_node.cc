#include "tools/palctl/bench_node.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/substitute.h"
#include "absl/time/clock.h"
#include "common/fd.h"
#include "common/file.h"
#include "common/monotonic_time.h"
#include "common/random.h"
#include "tools/palctl/bench_shapes.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"
#include "worker/model/tensor_parallel.h"

namespace palimpsest::palctl {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kBlockTokens = 16;
constexpr int64_t kSpareSlabs = 4;
constexpr absl::Duration kPoll = absl::Milliseconds(2);
// How long one look at a worker waits for it.
constexpr absl::Duration kLook = absl::Milliseconds(500);
// Making the image of a large model takes most of it.
constexpr absl::Duration kLongestStart = absl::Minutes(5);
constexpr absl::Duration kLongestStop = absl::Seconds(30);
constexpr int32_t kFirstPrompt = 128;
constexpr Bytes kLongestLog = MiB(16);
constexpr size_t kLogLines = 12;

absl::Status WriteSecret(const std::string& path, const std::string& text) {
  return WriteFileAtomically(path, text, 0600);
}

std::string RandomHex() { return absl::BytesToHexString(Token::Random().bytes()); }

}  // namespace

absl::StatusOr<std::unique_ptr<BenchNode>> BenchNode::Start(const BenchNodeOptions& options) {
  std::unique_ptr<BenchNode> node(new BenchNode(options));
  if (absl::Status status = node->Prepare(); !status.ok()) return status;
  auto broker = node->Spawn("broker", "palimpsest-broker", "broker/server");
  if (!broker.ok()) return broker.status();
  node->broker_.emplace(*std::move(broker));
  return node;
}

BenchNode::~BenchNode() {
  worker_.reset();
  broker_.reset();
  std::error_code ignored;
  if (!folder_.empty()) fs::remove_all(folder_, ignored);
}

absl::Status BenchNode::Prepare() {
  // Short: a Unix socket's path has at most 107 characters.
  std::string pattern = "/tmp/palimpsest-bench.XXXXXX";
  if (mkdtemp(pattern.data()) == nullptr) return ErrnoStatus("cannot make a folder in /tmp");
  folder_ = pattern;
  model_folder_ = folder_ + "/model";
  std::error_code error;
  fs::create_directories(model_folder_, error);
  absl::Status status = WriteBenchModel(model_folder_, options_.config);
  router_token_ = RandomHex();
  status.Update(WriteSecret(folder_ + "/tenant-secret", RandomHex()));
  status.Update(WriteSecret(folder_ + "/router-token", router_token_));
  if (status.ok()) status = WriteConfigs();
  return status;
}

absl::Status BenchNode::WriteConfigs() {
  const auto whole = ParseModelConfig(options_.config, "");
  if (!whole.ok()) return whole.status();
  vocabulary_ = whole->vocab_size;
  const auto ranks = static_cast<int32_t>(options_.gpus.size());
  const auto model = RankConfig(*whole, ranks);
  if (!model.ok()) return model.status();
  const Bytes slab = options_.cuda ? MiB(32) : MiB(2);
  const auto layout =
      LayOutImage(*model, slab, options_.cuda ? WeightFormat::kRowMajor : WeightFormat::kCpuPanels);
  if (!layout.ok()) return layout.status();
  image_bytes_ = layout->total * ranks;
  // Each sequence's last block may be unfilled.
  const int64_t kv_tokens = options_.kv_tokens + kBlockTokens * options_.max_batch;
  const int64_t kv_slabs = CeilDiv(model->KvBytes(kv_tokens), slab) + kSpareSlabs;
  const int64_t workspace = options_.cuda ? CeilDiv(options_.workspace, slab) : 0;
  const int64_t pool = layout->total / slab + kv_slabs + workspace;
  const std::string backend =
      options_.cuda
          ? absl::StrCat("backend: cuda, gpus: [", absl::StrJoin(options_.gpus, ", "), "], ")
          : "";
  const auto packer = Program("packer", "worker/model");
  if (!packer.ok()) return packer.status();
  const std::string broker = absl::Substitute(
      "node: bench\nstate_dir: state\ncontrol_socket: broker.sock\n"
      "descriptor_socket: descriptors.sock\npacker: $5\n"
      "pool: {$0slab_bytes: $1 MiB, bytes: $2 MiB}\n"
      "tenants:\n  - name: bench\n    secret_file: tenant-secret\n"
      "    model: {path: model, load_format: dummy, max_sequence_tokens: $3}\n"
      "    workspace: $4 MiB\n$6",
      backend, slab / MiB(1), slab * pool / MiB(1), options_.max_sequence_tokens,
      slab * workspace / MiB(1), *packer, options_.cuda ? "    context: 0 MiB\n" : "");
  // The reserve is all that is left of the pool: no step waits for KV slabs.
  const std::string worker = absl::Substitute(
      "tenant: bench\nsecret_file: tenant-secret\nmodel: {name: bench, path: model}\n"
      "broker: {control_socket: broker.sock, descriptor_socket: descriptors.sock}\n"
      "listen: unix:worker.sock\nrouter_token_file: router-token\n"
      "engine: {device: $0, max_batch_sequences: $1, max_step_tokens: $2, "
      "kv_low_water_slabs: $3, kv_high_water_slabs: $3, gemm_cache_file: $4}\n",
      options_.cuda ? absl::StrCat("cuda, gpus: [", absl::StrJoin(options_.gpus, ", "), "]")
                    : "cpu",
      options_.max_batch, options_.max_step_tokens, kv_slabs,
      options_.gemm_cache_file.empty() ? "gemm-algorithms"
                                       : fs::absolute(options_.gemm_cache_file).string());
  absl::Status status = WriteFileAtomically(folder_ + "/broker.yaml", broker);
  status.Update(WriteFileAtomically(folder_ + "/worker.yaml", worker));
  return status;
}

absl::StatusOr<std::string> BenchNode::Program(absl::string_view name,
                                               absl::string_view built_in) const {
  std::error_code error;
  for (const std::string& path : {absl::StrCat(options_.binaries, "/", name),
                                  absl::StrCat(options_.binaries, "/", built_in, "/", name)}) {
    if (fs::exists(path, error)) return fs::absolute(path).string();
  }
  return absl::NotFoundError(absl::StrCat("no ", name, " in ", options_.binaries, " or its ",
                                          built_in,
                                          ": build it, or give --binaries (bazel-bin, or bin/ of "
                                          "a folder that tools/bundle made)"));
}

absl::StatusOr<ChildProcess> BenchNode::Spawn(absl::string_view name, absl::string_view program,
                                              absl::string_view built_in) const {
  const auto path = Program(program, built_in);
  if (!path.ok()) return path.status();
  const UniqueFd log(open(absl::StrCat(folder_, "/", name, ".log").c_str(),
                          O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
  SpawnOptions options;
  options.argv = {"/usr/bin/env", "-C", folder_, *path, "--config", absl::StrCat(name, ".yaml")};
  for (char** variable = environ; *variable != nullptr; ++variable) {
    options.environment.push_back(*variable);
  }
  options.output = log.get();
  return ChildProcess::Spawn(options);
}

absl::Status BenchNode::CheckAlive() const {
  if (broker_->handle().Exited()) {
    return absl::AbortedError(absl::StrCat("the broker has ended\n", LogEnds()));
  }
  if (worker_ != nullptr && worker_->handle().Exited()) {
    return absl::AbortedError(absl::StrCat("the worker has ended\n", LogEnds()));
  }
  return absl::OkStatus();
}

absl::Status BenchNode::AwaitStats(absl::Time deadline, bool resident) {
  for (;;) {
    const auto stats = client_->Stats(kLook);
    if (stats.ok() && stats->broker_connected() &&
        (!resident || stats->parameter_slabs_mapped() == stats->parameter_slabs_total())) {
      return absl::OkStatus();
    }
    if (absl::Status status = CheckAlive(); !status.ok()) return status;
    if (MonotonicNow() > deadline) {
      return absl::DeadlineExceededError(absl::StrCat("the worker was not ready within ",
                                                      absl::FormatDuration(kLongestStart), "\n",
                                                      LogEnds()));
    }
    absl::SleepFor(kPoll);
  }
}

absl::StatusOr<BenchNode::Readiness> BenchNode::StartWorker() {
  const std::string socket = folder_ + "/worker.sock";
  std::error_code ignored;
  fs::remove(socket, ignored);
  const absl::Time start = MonotonicNow();
  auto worker = Spawn("worker", "palimpsest-worker", "worker/server");
  if (!worker.ok()) return worker.status();
  worker_ = std::make_unique<ChildProcess>(*std::move(worker));
  client_ = std::make_unique<BenchClient>("unix:" + socket, router_token_, vocabulary_);
  const absl::Time deadline = start + kLongestStart;
  Readiness readiness;
  absl::Status status = AwaitStats(deadline, /*resident=*/false);
  if (!status.ok()) return status;
  readiness.serving = MonotonicNow() - start;
  const auto answer = client_->Ask(1, kFirstPrompt, 1);
  if (!answer.ok()) return answer.status();
  readiness.first_token = MonotonicNow() - start;
  status = AwaitStats(deadline, /*resident=*/true);
  if (!status.ok()) return status;
  readiness.resident = MonotonicNow() - start;
  return readiness;
}

absl::Status BenchNode::StopWorker() {
  absl::Status status = worker_->handle().Signal(SIGTERM);
  if (status.ok()) status = worker_->Wait(kLongestStop);
  if (!status.ok()) {
    status = absl::Status(status.code(),
                          absl::StrCat("the worker: ", status.message(), "\n", LogEnds()));
  }
  worker_.reset();
  return status;
}

std::string BenchNode::LogEnds() const {
  std::string text;
  for (const char* name : {"broker", "worker"}) {
    const auto log = ReadFile(absl::StrCat(folder_, "/", name, ".log"), kLongestLog);
    if (!log.ok()) continue;
    std::vector<absl::string_view> lines = absl::StrSplit(*log, '\n', absl::SkipEmpty());
    const size_t first = lines.size() - std::min(lines.size(), kLogLines);
    absl::StrAppend(&text, "--- ", name, ":\n",
                    absl::StrJoin(lines.begin() + first, lines.end(), "\n"), "\n");
  }
  return text;
}

}  // namespace palimpsest::palctl
