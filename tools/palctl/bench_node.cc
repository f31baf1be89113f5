#include "tools/palctl/bench_node.h"

#include <signal.h>

#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/substitute.h"
#include "absl/time/clock.h"
#include "common/monotonic_time.h"
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

}  // namespace

absl::StatusOr<std::unique_ptr<BenchNode>> BenchNode::Start(const BenchNodeOptions& options) {
  std::unique_ptr<BenchNode> node(new BenchNode(options));
  if (absl::Status status = node->Prepare(); !status.ok()) return status;
  auto broker = node->folder_->Spawn("broker", kBrokerProgram);
  if (!broker.ok()) return broker.status();
  node->broker_.emplace(*std::move(broker));
  return node;
}

BenchNode::~BenchNode() {
  worker_.reset();
  broker_.reset();
}

absl::Status BenchNode::Prepare() {
  auto folder = BenchFolder::Create(options_.binaries);
  if (!folder.ok()) return folder.status();
  folder_ = *std::move(folder);
  std::error_code error;
  fs::create_directories(folder_->path() + "/model", error);
  absl::Status status = WriteBenchModel(folder_->path() + "/model", options_.config);
  status.Update(folder_->WriteSecret("tenant-secret").status());
  const auto token = folder_->WriteSecret("router-token");
  status.Update(token.status());
  if (!status.ok()) return status;
  router_token_ = *token;
  return WriteConfigs();
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
  const auto packer = folder_->Program(kPackerProgram);
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
  absl::Status status = folder_->Write("broker.yaml", broker);
  status.Update(folder_->Write("worker.yaml", worker));
  return status;
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
  const std::string socket = folder_->path() + "/worker.sock";
  std::error_code ignored;
  fs::remove(socket, ignored);
  const absl::Time start = MonotonicNow();
  auto worker = folder_->Spawn("worker", kWorkerProgram);
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

std::string BenchNode::LogEnds() const { return folder_->LogEnds({"broker", "worker"}); }

}  // namespace palimpsest::palctl
