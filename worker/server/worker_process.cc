#include "worker/server/worker_process.h"

#include <algorithm>
#include <limits>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/clock.h"
#include "common/file.h"
#include "common/file_lock.h"
#include "common/log.h"
#include "common/stored_block.h"
#include "worker/compute/cpu/cpu_runner.h"
#include "worker/compute/cpu/host_block_copier.h"
#include "worker/compute/cpu/host_swap_copier.h"
#include "worker/compute/cpu/kernels.h"
#include "worker/compute/cuda/cuda_compute.h"
#include "worker/core/block_keys.h"
#include "worker/memory/cuda_backend.h"
#include "worker/model/image_layout.h"
#include "worker/model/manifest.h"
#include "worker/model/tensor_parallel.h"

namespace palimpsest {
namespace {

// How often a drain looks whether it should hurry.
constexpr absl::Duration kDrainSlice = absl::Milliseconds(100);
// Well above what a worker takes to measure algorithms and capture graphs.
constexpr absl::Duration kTurnPatience = absl::Minutes(5);
// For the last messages of streams that were ended.
constexpr absl::Duration kLastWrites = absl::Seconds(2);

// Blocks that are being taken apart or put together.
constexpr Bytes kStagingBytes = MiB(256);
constexpr int64_t kLeastStagingBlocks = 64;

class OutputTokenBytes final : public TokenBytes {
 public:
  explicit OutputTokenBytes(const Tokenizer* tokenizer) : tokenizer_(tokenizer) {}

  absl::string_view BytesOf(TokenId token) const override { return tokenizer_->OutputBytes(token); }

 private:
  const Tokenizer* const tokenizer_;
};

WeightFormat FormatOf(const WorkerConfig& config) {
  return config.device == WorkerConfig::Device::kCuda ? WeightFormat::kRowMajor
                                                      : WeightFormat::kCpuPanels;
}

// GPUs that share the model.
int32_t RanksOf(const WorkerConfig& config) {
  return config.device == WorkerConfig::Device::kCuda ? static_cast<int32_t>(config.gpus.size())
                                                      : 1;
}

// A worker takes the KV's type from the manifest.
absl::Status CheckImage(const v1::ImageManifest& manifest, ModelConfig rank, WeightFormat format) {
  const absl::StatusOr<KvDtype> kv_dtype = ParseKvDtype(manifest.kv_dtype());
  if (!kv_dtype.ok()) return kv_dtype.status();
  rank.kv_dtype = *kv_dtype;
  const auto layout = LayOutImage(rank, Bytes(static_cast<int64_t>(manifest.slab_bytes())), format);
  if (!layout.ok()) return layout.status();
  return CheckManifest(manifest, rank, *layout);
}

void LogProgress(const v1::ImageProgress& progress) {
  Log(LogLevel::kInfo, "the broker prepares the parameter image",
      {{"phase", progress.phase()},
       {"done", Bytes(static_cast<int64_t>(progress.done_bytes()))},
       {"total", Bytes(static_cast<int64_t>(progress.total_bytes()))}});
}

}  // namespace

WorkerProcess::WorkerProcess(const WorkerConfig& config)
    : config_(config), metrics_(MetricProcess::kWorker), engine_metrics_(metrics_) {}

WorkerProcess::~WorkerProcess() {
  // Its thread uses the members that are destroyed first.
  StopEngine();
}

void WorkerProcess::StopEngine() {
  if (engine_ != nullptr) engine_->Stop();
  if (grouped_store_ != nullptr) grouped_store_->Stop();
  if (store_ != nullptr) store_->Shutdown();
}

absl::StatusOr<std::unique_ptr<WorkerProcess>> WorkerProcess::Start(
    const WorkerConfig& config, std::function<void(const absl::Status&)> on_fatal,
    std::optional<int> listen_socket) {
  std::unique_ptr<WorkerProcess> process(new WorkerProcess(config));
  auto metrics = MetricsServer::Start(process->metrics_, config.metrics_listen);
  if (!metrics.ok()) return metrics.status();
  process->metrics_server_ = *std::move(metrics);
  if (absl::Status status = process->LoadModel(); !status.ok()) return status;
  if (absl::Status status = process->Attach(std::move(on_fatal)); !status.ok()) return status;
  if (absl::Status status = process->StartEngine(); !status.ok()) return status;
  if (absl::Status status = process->Serve(listen_socket); !status.ok()) return status;
  return process;
}

absl::Status WorkerProcess::LoadModel() {
  auto model = ReadModelConfig(config_.model_path);
  if (!model.ok()) return model.status();
  model_ = *std::move(model);
  auto rank = RankConfig(model_, RanksOf(config_));
  if (!rank.ok()) return rank.status();
  rank_model_ = *std::move(rank);
  if (absl::Status status = ReadHeads(); !status.ok()) return status;
  auto tokenizer = Tokenizer::Load(config_.model_path);
  if (!tokenizer.ok()) return tokenizer.status();
  tokenizer_ = *std::move(tokenizer);
  token_bytes_ = std::make_unique<OutputTokenBytes>(tokenizer_.get());
  return absl::OkStatus();
}

absl::Status WorkerProcess::Attach(std::function<void(const absl::Status&)> on_fatal) {
  GrpcMemoryClient::Options options;
  options.connection.address = absl::StrCat("unix:", config_.control_socket);
  options.connection.descriptor_socket = config_.descriptor_socket;
  options.connection.tenant = config_.tenant;
  options.connection.on_progress = LogProgress;
  options.connection.rotates = true;
  if (!config_.secret_file.empty()) {
    auto secret = ReadSecretFile(config_.secret_file);
    if (!secret.ok()) return secret.status();
    options.connection.secret = *std::move(secret);
  }
  options.check_manifest = [this](const v1::ImageManifest& manifest) {
    return CheckImage(manifest, rank_model_, FormatOf(config_));
  };
  if (config_.device == WorkerConfig::Device::kCuda) {
    const auto turn = AwaitTurn();
    if (!turn.ok()) return turn.status();
    auto backend = OpenCudaMemory(config_.gpus);
    if (!backend.ok()) return backend.status();
    backend_ = *std::move(backend);
    options.backend = backend_.get();
  }
  options.restore_threads = config_.restore_threads;
  options.verify_parameters = config_.verify_parameters;
  options.on_fatal = std::move(on_fatal);
  options.metrics = &metrics_;
  auto memory = GrpcMemoryClient::Connect(std::move(options));
  if (!memory.ok()) return memory.status();
  memory_ = *std::move(memory);
  const auto kv_dtype = ParseKvDtype(memory_->manifest().kv_dtype());
  if (!kv_dtype.ok()) return kv_dtype.status();
  model_.kv_dtype = rank_model_.kv_dtype = *kv_dtype;
  // So that parameters come while the runner is made; the engine would ask for them afterwards.
  memory_->RequestActivation(ActivationReason::kEager);
  return absl::OkStatus();
}

absl::StatusOr<std::vector<FileLock>> WorkerProcess::AwaitTurn() const {
  std::vector<FileLock> turn;
  absl::StatusOr<FileLock> lock =
      FileLock::Join(StartLockPath(config_.control_socket), kTurnPatience);
  if (lock.ok()) {
    turn.push_back(*std::move(lock));
  } else {
    Log(LogLevel::kWarning,
        "this worker starts beside others: what they take of GPUs may be counted as its own",
        {{"status", lock.status()}});
  }
  if (config_.gemm_cache_file.empty()) return turn;
  lock = FileLock::Acquire(config_.gemm_cache_file + ".lock");
  if (!lock.ok()) return lock.status();
  turn.push_back(*std::move(lock));
  return turn;
}

absl::StatusOr<EngineOptions> WorkerProcess::MakeEngineOptions() const {
  const v1::ImageManifest& manifest = memory_->manifest();
  const auto packed_tokens = static_cast<int32_t>(manifest.max_sequence_tokens());
  if (config_.max_sequence_tokens > packed_tokens) {
    return absl::FailedPreconditionError(
        absl::StrCat("model.max_sequence_tokens is ", config_.max_sequence_tokens,
                     ", but the broker serves at most ", packed_tokens,
                     "; lower it, or raise the tenant's model.max_sequence_tokens at the broker"));
  }
  // Parameters and workspace.
  const auto fixed_slabs = static_cast<int32_t>(
      manifest.image_bytes() / manifest.slab_bytes() +
      static_cast<uint64_t>(memory_->workspace_bytes() / memory_->slab_bytes()));
  const int32_t kv_slabs = std::min(memory_->quota_slabs(), memory_->pool_slabs()) - fixed_slabs;
  if (kv_slabs < 1) {
    return absl::FailedPreconditionError(
        absl::StrCat("the tenant's quota of ", memory_->quota_slabs(),
                     " slabs leaves no room for KV cache beside ", fixed_slabs,
                     " slabs of parameters and workspace; raise its quota at the broker"));
  }
  EngineOptions options;
  SchedulerConfig& scheduler = options.scheduler;
  scheduler.geometry.slab_bytes = memory_->slab_bytes();
  scheduler.geometry.block_bytes = Bytes(static_cast<int64_t>(manifest.kv_block_bytes()));
  scheduler.geometry.block_tokens = static_cast<int32_t>(manifest.kv_block_tokens());
  scheduler.geometry.region_slabs = memory_->pool_slabs();
  scheduler.max_kv_slabs = kv_slabs;
  scheduler.vocab_size = model_.vocab_size;
  scheduler.max_sequence_tokens =
      config_.max_sequence_tokens == 0 ? packed_tokens : config_.max_sequence_tokens;
  scheduler.sliding_window = model_.sliding_window.value_or(0);
  scheduler.eos_token_ids = model_.eos_token_ids;
  scheduler.max_batch_sequences = config_.max_batch_sequences;
  scheduler.max_step_tokens = config_.max_step_tokens;
  scheduler.queue_capacity = config_.queue_capacity;
  scheduler.swap_blocks = SwapBlocks();
  const auto root_key = RootBlockKey();
  if (!root_key.ok()) return root_key.status();
  scheduler.root_key = *root_key;
  options.kv_target = {.low_water_slabs = config_.kv_low_water_slabs,
                       .high_water_slabs = config_.kv_high_water_slabs,
                       .shrink_delay = config_.kv_shrink_delay,
                       .max_slabs = kv_slabs};
  options.stream_tokens = config_.stream_tokens;
  options.stall_timeout = config_.stall_timeout;
  if (config_.heads.sample_every > 0) {
    options.heads.emplace();
    options.heads->layers = rank_model_.num_layers;
    options.heads->kv_heads = rank_model_.num_kv_heads;
  }
  if (absl::Status status = options.Validate(); !status.ok()) return status;
  return options;
}

int32_t WorkerProcess::SwapBlocks() const {
  if (!memory_->swaps()) return 0;
  const Bytes block(static_cast<int64_t>(memory_->manifest().kv_block_bytes()));
  const int64_t blocks = config_.swap_space / (block * memory_->ranks());
  if (blocks == 0) {
    Log(LogLevel::kWarning,
        "the broker's memory_policy is swap, but engine.swap_space holds no KV block: preempted "
        "sequences will be computed again",
        {{"swap_space", config_.swap_space}, {"block", block * memory_->ranks()}});
  }
  return static_cast<int32_t>(std::min<int64_t>(blocks, std::numeric_limits<int32_t>::max()));
}

absl::StatusOr<BlockKey> WorkerProcess::RootBlockKey() const {
  std::string salt;
  if (!config_.block_salt_file.empty()) {
    auto secret = ReadSecretFile(config_.block_salt_file);
    if (!secret.ok()) return secret.status();
    salt = *std::move(secret);
  }
  const v1::ImageManifest& manifest = memory_->manifest();
  // Kernels of another instruction set differ in the last bits.
  std::string layout =
      absl::StrCat(manifest.weight_format(), "/",
                   backend_ != nullptr ? backend_->name() : SupportedKernels().front()->name);
  // The KV behind a lossy layer is another.
  if (lossy_heads_.any()) {
    absl::StrAppend(&layout, "/lossy ", lossy_heads_.recent_tokens, " ");
    for (const uint8_t dropped : lossy_heads_.dropped) layout += dropped != 0 ? '1' : '0';
  }
  // So that every worker with these keys takes blocks apart in the same way.
  for (const std::vector<int32_t>& group : head_groups_) {
    absl::StrAppend(&layout, "/heads ", absl::StrJoin(group, ","));
  }
  return RootKey({.salt = salt,
                  .fingerprint = manifest.fingerprint(),
                  .kv_dtype = manifest.kv_dtype(),
                  .layout = layout,
                  .block_tokens = static_cast<int32_t>(manifest.kv_block_tokens())});
}

absl::Status WorkerProcess::MakeStore(const SchedulerConfig& scheduler) {
  if (!config_.block_store || !memory_->has_tiers()) return absl::OkStatus();
  BlockStoreClient::Options options;
  options.address = absl::StrCat("unix:", config_.control_socket);
  options.block_bytes = scheduler.geometry.block_bytes;
  if (backend_ != nullptr) {
    options.block_bytes = StoredPartBytes(options.block_bytes) * memory_->ranks();
    options.backend = backend_.get();
  }
  options.block_tokens = scheduler.geometry.block_tokens;
  std::optional<HeadParts> parts;
  if (!head_groups_.empty()) {
    if (scheduler.sliding_window > 0) {
      return absl::FailedPreconditionError(
          absl::StrCat("engine.heads.groups: expected a model with full attention, got one with a "
                       "sliding window of ",
                       scheduler.sliding_window, " tokens; leave its blocks whole"));
    }
    auto made = HeadParts::Create(
        {.layers = model_.num_layers,
         .kv_heads = model_.num_kv_heads,
         .block_tokens = options.block_tokens,
         .row = Bytes(int64_t{model_.head_dim} * KvElementBytes(model_.kv_dtype))},
        head_groups_);
    if (!made.ok()) return made.status();
    parts = *std::move(made);
    if (parts->block_bytes() != options.block_bytes) {
      return absl::FailedPreconditionError(
          absl::StrCat("engine.heads.groups: expected KV blocks of ", parts->block_bytes().count(),
                       " bytes, which is all heads, got ", options.block_bytes.count()));
    }
    options.block_bytes = parts->part_bytes();
  }
  store_ = std::make_unique<BlockStoreClient>(options, memory_.get());
  memory_->SetArenaListener(store_.get());
  if (!parts.has_value()) return absl::OkStatus();
  Log(LogLevel::kInfo, "KV blocks go to the tiers in parts, by groups of heads",
      {{"groups", parts->count()},
       {"block", parts->block_bytes()},
       {"tier_1_bytes", config_.heads.tier_1_bytes}});
  GroupedBlockStore::Options grouped;
  grouped.staging_blocks = static_cast<int32_t>(
      std::max<int64_t>(kLeastStagingBlocks, kStagingBytes / parts->block_bytes()));
  GroupedBlockStore::TierOne tier_one = TierOneOf(scheduler, parts->part_bytes());
  grouped_store_ = std::make_unique<GroupedBlockStore>(grouped, *std::move(parts), store_.get(),
                                                       store_.get(), std::move(tier_one));
  grouped_store_->Start();
  return absl::OkStatus();
}

absl::StatusOr<ParameterGate*> WorkerProcess::MakeSwap(absl::Span<const ModelMemory> memory,
                                                       int32_t swap_blocks) {
  if (swap_blocks == 0 && store_ == nullptr) return &memory_->gate();
  if (backend_ != nullptr) {
    auto swap = MakeCudaSwapCopier(memory, {.gpus = config_.gpus,
                                            .slots = swap_blocks,
                                            .layers = model_.num_layers,
                                            .block_store = store_ != nullptr,
                                            .pacer = &memory_->pacer()});
    if (!swap.ok()) return swap.status();
    swap_ = *std::move(swap);
  } else {
    swap_ = std::make_unique<HostSwapCopier>(memory[0], swap_blocks, model_.num_layers,
                                             &memory_->pacer());
  }
  // The image's stages are the embedding, the layers and the head.
  swap_gate_ = std::make_unique<SwapGate>(&memory_->gate(), swap_.get(), /*first_layer=*/1,
                                          model_.num_layers);
  if (swap_blocks > 0) {
    Log(LogLevel::kInfo, "KV of preempted sequences goes to host memory",
        {{"swap_space", config_.swap_space}, {"blocks", swap_blocks}});
  }
  return swap_gate_.get();
}

absl::Status WorkerProcess::MakeCompute(const SchedulerConfig& scheduler) {
  const auto layout = LayOutImage(rank_model_, memory_->slab_bytes(), FormatOf(config_));
  if (!layout.ok()) return layout.status();
  const Bytes block(static_cast<int64_t>(memory_->manifest().kv_block_bytes()));
  std::vector<ModelMemory> memory;
  for (int rank = 0; rank < memory_->ranks(); ++rank) {
    memory.push_back({memory_->parameters(rank),
                      memory_->kv(rank),
                      block,
                      memory_->workspace(rank),
                      memory_->workspace_bytes(),
                      memory_->slab_bytes(),
                      {},
                      [client = memory_.get(), rank] { return client->image(rank); }});
  }
  const absl::StatusOr<ParameterGate*> gate = MakeSwap(memory, scheduler.swap_blocks);
  if (!gate.ok()) return gate.status();
  const int32_t block_tokens = scheduler.geometry.block_tokens;
  if (backend_ != nullptr) return MakeGpuCompute(*layout, memory, *gate, block_tokens);
  CpuRunnerOptions options;
  options.threads = config_.threads;
  options.block_tokens = block_tokens;
  options.head_sampling = {config_.heads.sample_every, config_.heads.recent_tokens};
  options.lossy_heads = lossy_heads_;
  auto runner = CpuRunner::Create(model_, *layout, memory[0], *gate, options);
  if (!runner.ok()) return runner.status();
  runner_ = *std::move(runner);
  copier_ = std::make_unique<HostBlockCopier>(memory[0]);
  return absl::OkStatus();
}

absl::Status WorkerProcess::MakeGpuCompute(const ImageLayout& layout,
                                           absl::Span<const ModelMemory> memory,
                                           ParameterGate* gate, int32_t block_tokens) {
  CudaComputeOptions options;
  options.gpus = config_.gpus;
  options.block_tokens = block_tokens;
  options.max_step_tokens = config_.max_step_tokens;
  options.max_sequences = config_.max_batch_sequences;
  options.gemm_cache_file = config_.gemm_cache_file;
  options.head_sampling = {config_.heads.sample_every, config_.heads.recent_tokens};
  const auto turn = AwaitTurn();
  if (!turn.ok()) return turn.status();
  std::vector<Bytes> before;
  for (int rank = 0; rank < memory_->ranks(); ++rank) {
    before.push_back(backend_->DeviceMemoryUse(rank).value_or(Bytes(0)));
  }
  auto compute = MakeCudaCompute(model_, layout, memory, gate, options);
  if (!compute.ok()) return compute.status();
  runner_ = std::move(compute->runner);
  copier_ = std::move(compute->copier);
  Bytes most;
  for (size_t rank = 0; rank < before.size(); ++rank) {
    const Bytes after = backend_->DeviceMemoryUse(static_cast<int>(rank)).value_or(before[rank]);
    const EngineMetrics::Gpu gpu{.number = config_.gpus[rank],
                                 .slab_bytes = memory_->slab_bytes(),
                                 .workspace = memory_->workspace_bytes(),
                                 .context = backend_->context_bytes(static_cast<int>(rank)),
                                 .compute = std::max(after - before[rank], Bytes(0))};
    most = std::max(most, gpu.context + gpu.compute);
    engine_metrics_.AddGpu(gpu);
    Log(LogLevel::kInfo, "GPU memory beside slabs",
        {{"gpu", gpu.number}, {"context", gpu.context}, {"kernels_and_graphs", gpu.compute}});
  }
  memory_->SetContextBytes(most);
  return absl::OkStatus();
}

absl::Status WorkerProcess::StartEngine() {
  auto options = MakeEngineOptions();
  if (!options.ok()) return options.status();
  absl::Status made = MakeStore(options->scheduler);
  if (made.ok()) made = MakeCompute(options->scheduler);
  if (!made.ok()) return made;
  options->scheduler.pipeline_depth = runner_->pipeline_depth();
  EngineParts parts;
  parts.memory = memory_.get();
  parts.runner = runner_.get();
  parts.copier = copier_.get();
  parts.swap = swap_.get();
  parts.store = store_.get();
  if (grouped_store_ != nullptr) parts.store = grouped_store_.get();
  parts.token_bytes = token_bytes_.get();
  parts.metrics = &engine_metrics_;
  parts.clock = &Clock::Real();
  parts.on_connection = [this](bool connected) { server_.SetConnected(connected); };
  engine_ = std::make_unique<Engine>(*options, parts);
  return absl::OkStatus();
}

absl::Status WorkerProcess::Serve(std::optional<int> listen_socket) {
  auto tokens = SecretFile::Open(config_.router_token_file);
  if (!tokens.ok()) return tokens.status();
  WorkerServiceOptions options;
  options.tenant = config_.tenant;
  options.model = config_.model_name;
  options.router_tokens = *std::move(tokens);
  options.on_drain = [this] { server_.SetDraining(); };
  options.hints = store_.get();
  if (grouped_store_ != nullptr) options.hints = grouped_store_.get();
  service_ = std::make_unique<WorkerService>(std::move(options), engine_.get(), memory_.get(),
                                             &engine_metrics_);
  const absl::Status status = listen_socket.has_value()
                                  ? server_.StartOn(*listen_socket, config_.listen, service_.get())
                                  : server_.Start(config_.listen, service_.get());
  if (!status.ok()) return status;
  engine_->Start();
  return absl::OkStatus();
}

v1::WorkerStats WorkerProcess::BeginHibernation() {
  server_.StopListening();
  return service_->Stats();
}

void WorkerProcess::EndForHibernation() {
  server_.Shutdown(config_.drain_timeout);
  StopEngine();
  WriteMeasuredHeads();
  memory_->Detach();
}

void WorkerProcess::Shutdown(const std::function<bool()>& hurry) {
  engine_->StartDrain();
  server_.SetDraining();
  const Clock& clock = Clock::Real();
  const absl::Time deadline = clock.Now() + config_.drain_timeout;
  int32_t left = engine_->AwaitDrained(absl::ZeroDuration());
  while (left > 0 && clock.Now() < deadline && !hurry()) left = engine_->AwaitDrained(kDrainSlice);
  if (left > 0) Log(LogLevel::kWarning, "requests cut off by the shutdown", {{"requests", left}});
  StopEngine();
  WriteMeasuredHeads();
  server_.Shutdown(kLastWrites);
  memory_->Detach();
}

}  // namespace palimpsest
