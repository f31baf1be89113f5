#include "worker/compute/cuda/cuda_runner.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "worker/compute/cuda/kernel_choice.h"
#include "worker/compute/cuda/kernels.h"
#include "worker/compute/cuda/model_check.h"
#include "worker/compute/cuda/sampler.h"

namespace palimpsest::cuda {
namespace {

constexpr int64_t kWorkspaceAlignment = 256;
// Of a step's buffer, that a kernel copies; more goes by the copy engine.
constexpr size_t kMaxBytesByKernel = size_t{1} << 20;

}  // namespace

Bytes CudaRunner::WorkspaceBytes(const ModelConfig& config, Bytes kv_block_bytes,
                                 const CudaRunnerOptions& options) {
  PackerOptions packer = MakePackerOptions(config, kv_block_bytes, options);
  packer.multiprocessors = 256;  // no GPU has more
  const ForwardPlaces places = ForwardPlaces::For(
      config, MakeForwardOptions(config, packer, options, false), MaxTiles(packer));
  // The null block starts at a multiple of the block's size.
  return Bytes(static_cast<int64_t>(places.end) + kWorkspaceAlignment) + 2 * kv_block_bytes;
}

absl::StatusOr<std::unique_ptr<CudaRunner>> CudaRunner::Create(const ModelConfig& config,
                                                               const ImageLayout& layout,
                                                               const ModelMemory& memory,
                                                               ParameterGate* gate,
                                                               const CudaRunnerOptions& options) {
  const int ranks = options.collective != nullptr ? options.collective->ranks() : 1;
  if (absl::Status status = CheckModel(config, layout, ranks); !status.ok()) return status;
  if (options.block_tokens <= 0 || options.max_sequences <= 0 ||
      options.max_step_tokens < options.max_sequences) {
    return absl::InvalidArgumentError(absl::StrCat(
        "block_tokens and max_sequences must be positive and max_step_tokens not below "
        "max_sequences, got ",
        options.block_tokens, ", ", options.max_sequences, " and ", options.max_step_tokens));
  }
  if (memory.kv_block_bytes < config.KvBytes(options.block_tokens) ||
      memory.kv_block_bytes.count() % 16 != 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("a KV block of ", options.block_tokens, " tokens takes ",
                     config.KvBytes(options.block_tokens).count(),
                     " bytes and a multiple of 16, got blocks of ", memory.kv_block_bytes.count()));
  }
  if (absl::Status status = CheckHeadSampling(config, options.head_sampling); !status.ok()) {
    return status;
  }
  const Bytes needed = WorkspaceBytes(config, memory.kv_block_bytes, options);
  if (memory.workspace < memory.kv || memory.workspace_bytes < needed) {
    return absl::InvalidArgumentError(
        absl::StrCat("the workspace must lie behind the KV region and hold ", needed.ToString(),
                     ", got ", memory.workspace_bytes.ToString()));
  }
  std::unique_ptr<CudaRunner> runner(new CudaRunner(config, gate, options));
  if (absl::Status status = runner->Prepare(layout, memory); !status.ok()) return status;
  return runner;
}

CudaRunner::CudaRunner(const ModelConfig& config, ParameterGate* gate,
                       const CudaRunnerOptions& options)
    : config_(config),
      gate_(gate),
      options_(options),
      ladder_(DecodeLadder(options.max_sequences)),
      head_sampler_(options.head_sampling),
      timing_interval_(options.timing_interval) {}

CudaRunner::~CudaRunner() {
  cudaSetDevice(options_.device);
  if (stream_ != nullptr) cudaStreamSynchronize(stream_);
  rotation_graphs_.reset();
  graphs_.reset();
  rotating_.reset();
  for (Flight& flight : flights_) {
    for (std::byte* memory : {flight.staging, flight.prefill_ints, flight.results, flight.heads}) {
      if (memory != nullptr) cudaFreeHost(memory);
    }
    for (cudaEvent_t event : {flight.begin, flight.sampling, flight.done}) {
      if (event != nullptr) cudaEventDestroy(event);
    }
  }
  forward_.reset();
  if (stream_ != nullptr) cudaStreamDestroy(stream_);
}

absl::Status CudaRunner::Prepare(const ImageLayout& layout, const ModelMemory& memory) {
  cudaDeviceProp properties;
  absl::Status status = CudaStatus(cudaSetDevice(options_.device), "choose the GPU");
  status.Update(
      CudaStatus(cudaGetDeviceProperties(&properties, options_.device), "properties of the GPU"));
  if (!status.ok()) return status;
  packer_options_ = MakePackerOptions(config_, memory.kv_block_bytes, options_);
  packer_options_.multiprocessors = properties.multiProcessorCount;
  // Kernels for sm_90a run on that architecture alone.
  const bool hopper = properties.major == 9 && properties.minor == 0;
  if (hopper && CanFuseDecode(config_, options_)) {
    packer_options_.fused_decode = packer_options_.cuda_cores = true;
    packer_options_.tensor_cores = false;
  }
  const int64_t block = memory.kv_block_bytes.count();
  const int64_t null_block = (memory.workspace - memory.kv + block - 1) / block;
  packer_options_.null_block = static_cast<int32_t>(null_block);
  packer_ = std::make_unique<StepPacker>(packer_options_);
  std::byte* usable = memory.kv + (null_block + 1) * block;
  usable += (kWorkspaceAlignment - reinterpret_cast<uintptr_t>(usable) % kWorkspaceAlignment) %
            kWorkspaceAlignment;
  status = CudaStatus(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "stream");
  status.Update(CudaStatus(cudaMemsetAsync(memory.kv + null_block * block, 0, block, stream_),
                           "clear the null block"));
  if (!status.ok()) return status;
  auto forward =
      Forward::Create(config_, layout, memory, usable, *packer_, MaxTiles(packer_options_),
                      MakeForwardOptions(config_, packer_options_, options_, hopper), stream_);
  if (!forward.ok()) return forward.status();
  forward_ = *std::move(forward);
  auto rotating = RotatingLayers::Create(layout, memory, forward_->wait_clock());
  if (!rotating.ok()) return rotating.status();
  rotating_ = *std::move(rotating);
  status = AllocateHost();
  if (status.ok() && options_.graphs) status = MakeGraphs();
  return status;
}

absl::Status CudaRunner::AllocateHost() {
  absl::Status status;
  const auto allocate = [&](std::byte*& memory, size_t bytes) {
    void* made = nullptr;
    status.Update(CudaStatus(cudaMallocHost(&made, bytes), "pinned memory"));
    memory = static_cast<std::byte*>(made);
  };
  for (Flight& flight : flights_) {
    // Copied in whole vectors.
    allocate(flight.staging, (MaxStagingBytes(packer_options_) + 15) / 16 * 16);
    if (!config_.latent.has_value()) allocate(flight.prefill_ints, kPrefillIntBytes);
    allocate(flight.results, ResultLayout::For(options_.max_sequences).bytes);
    if (SamplesHeads()) allocate(flight.heads, 2 * heads() * sizeof(float));
    status.Update(CudaStatus(cudaEventCreate(&flight.begin), "event"));
    status.Update(CudaStatus(cudaEventCreate(&flight.sampling), "event"));
    status.Update(CudaStatus(cudaEventCreate(&flight.done), "event"));
  }
  return status;
}

// Around the stages of a step that runs kernel by kernel.
class CudaRunner::StepHooks final : public ForwardHooks {
 public:
  StepHooks(CudaRunner& runner, const Flight& flight) : runner_(runner), flight_(flight) {}

  absl::Status BeginStage(int stage) override {
    absl::Status status = runner_.AwaitOnStream(stage);
    return status.ok() ? runner_.rotating_->Begin(stage, runner_.stream_) : status;
  }
  absl::Status EndStage(int stage) override {
    return runner_.rotating_->End(stage, runner_.stream_);
  }
  bool Rotates(int stage) const override { return runner_.rotating_->Rotates(stage); }
  absl::Status BeginSampling() override {
    if (!flight_.sampling_timed) return absl::OkStatus();
    return CudaStatus(cudaEventRecord(flight_.sampling, runner_.stream_), "event");
  }

 private:
  CudaRunner& runner_;
  const Flight& flight_;
};

absl::Status CudaRunner::SetRotation(const Rotation& rotation) {
  if (submitted_ != finished_) {
    return absl::FailedPreconditionError("layers begin and cease to rotate between steps only");
  }
  absl::Status status = CudaStatus(cudaSetDevice(options_.device), "choose the GPU");
  rotation_graphs_.reset();
  if (status.ok()) status = rotating_->Set(rotation);
  if (status.ok() && options_.graphs && !rotation.none()) status = MakeRotationGraphs();
  rotation_status_ = status;
  return status;
}

CudaRunnerStats CudaRunner::stats() const {
  CudaRunnerStats stats = stats_;
  if (graphs_ != nullptr) stats.graphs = graphs_->stats();
  if (rotation_graphs_ != nullptr) stats.rotation_graphs = rotation_graphs_->stats();
  return stats;
}

int32_t CudaRunner::GraphRows(const StepPlan& plan) const {
  // A graph would wait for all layers' KV before the first.
  if (!options_.graphs || plan.arriving || !packer_->IsDecode(plan)) return 0;
  for (const int32_t rows : ladder_) {
    if (static_cast<size_t>(rows) >= plan.chunks.size()) return rows;
  }
  return 0;
}

absl::Status CudaRunner::Submit(const StepPlan& plan) {
  if (submitted_ - finished_ >= kMaxPipelineDepth) {
    return absl::FailedPreconditionError(
        absl::StrCat(kMaxPipelineDepth, " steps are in flight; call Wait first"));
  }
  absl::Span<const int32_t> previous;
  if (submitted_ > finished_) previous = flights_[(submitted_ - 1) % flights_.size()].step.slots;
  if (absl::Status status = packer_->Validate(plan, previous); !status.ok()) return status;
  // The engine's thread need not be the one that made the runner.
  absl::Status chosen = CudaStatus(cudaSetDevice(options_.device), "choose the GPU");
  if (!chosen.ok()) return chosen;
  Flight& flight = flights_[submitted_ % flights_.size()];
  const int32_t graph_rows = GraphRows(plan);
  packer_->Pack(plan, previous, graph_rows, flight.staging, flight.step);
  if (flight.step.counts.prefills > 0) ChooseHeadSample(plan, flight.step);
  flight.logprobs.clear();
  for (const SequenceChunk& chunk : plan.chunks) {
    flight.logprobs.push_back(chunk.sampling != nullptr ? chunk.sampling->params.logprobs : -1);
  }
  refused_ = false;
  flight.status = Launch(flight, graph_rows);
  if (!refused_) TellRanks(flight.status);
  ++submitted_;
  return absl::OkStatus();
}

void CudaRunner::ChooseHeadSample(const StepPlan& plan, PackedStep& step) {
  const std::optional<int32_t> chunk = head_sampler_.Choose(plan);
  if (!chunk.has_value()) return;
  const SequenceChunk& sampled = plan.chunks[static_cast<size_t>(*chunk)];
  step.sampled_chunk = *chunk;
  step.sampled_tokens = sampled.first_position + static_cast<int32_t>(sampled.tokens.size());
}

absl::Status CudaRunner::AwaitOnStream(int stage) {
  if (gate_ == nullptr) return absl::OkStatus();
  void* event = nullptr;
  absl::Status status = gate_->StageEvents(stage, absl::MakeSpan(&event, 1));
  refused_ = !status.ok();
  if (!status.ok() || event == nullptr) return status;
  return CudaStatus(cudaStreamWaitEvent(stream_, static_cast<cudaEvent_t>(event), 0),
                    "wait for the parameters");
}

void CudaRunner::TellRanks(const absl::Status& status) const {
  if (!status.ok() && options_.collective != nullptr) options_.collective->Abort(status);
}

absl::Status CudaRunner::Launch(Flight& flight, int32_t graph_rows) {
  DecodeGraphs* const graphs =
      rotating_->rotation().none() ? graphs_.get() : rotation_graphs_.get();
  const DecodeGraphs::Key key{graph_rows, flight.step.kernel, flight.step.split};
  cudaGraphExec_t executable = graph_rows > 0 && graphs != nullptr ? graphs->Find(key) : nullptr;
  flight.graph = executable != nullptr;
  flight.timed = timing_interval_ > 0 && submitted_ % timing_interval_ == 0;
  flight.sampling_timed = flight.timed && !flight.graph && flight.step.counts.samples > 0;
  flight.rotated = rotating_->step_bytes();
  if (graph_rows > 0) {
    stats_.padding_rows += graph_rows - static_cast<int64_t>(flight.step.slots.size());
  }
  absl::Status status = rotation_status_;
  if (options_.collective != nullptr) status.Update(options_.collective->status());
  if (!status.ok()) return status;
  if (flight.timed) status = CudaStatus(cudaEventRecord(flight.begin, stream_), "event");
  if (status.ok()) status = CopyStep(flight);
  if (status.ok()) {
    status = flight.graph ? LaunchGraph(executable) : LaunchEager(flight);
  }
  if (status.ok() && flight.step.counts.samples > 0) {
    const ResultLayout results = ResultLayout::For(options_.max_sequences);
    const size_t tokens = static_cast<size_t>(flight.step.counts.samples) * sizeof(int32_t);
    const size_t bytes = flight.step.any_logprobs ? results.bytes : results.tokens + tokens;
    status = CudaStatus(cudaMemcpyAsync(flight.results, forward_->results(), bytes,
                                        cudaMemcpyDeviceToHost, stream_),
                        "copy the tokens from the GPU");
  }
  status.Update(CudaStatus(cudaEventRecord(flight.done, stream_), "event"));
  // While the GPU runs the step.
  const bool missing = graph_rows > 0 && graphs != nullptr && !flight.graph;
  if (status.ok() && missing && options_.collective != nullptr) status = graphs->Build(key);
  return status;
}

// The copy engine may be busy with a rotating layer for milliseconds. Otherwise it is quicker.
absl::Status CudaRunner::CopyStep(const Flight& flight) const {
  const size_t bytes = flight.step.bytes;
  const bool by_kernel = !rotating_->rotation().none() && bytes <= kMaxBytesByKernel;
  return CudaStatus(by_kernel ? CopyFromHost(flight.staging, forward_->staging(), bytes, stream_)
                              : cudaMemcpyAsync(forward_->staging(), flight.staging, bytes,
                                                cudaMemcpyHostToDevice, stream_),
                    "copy the step to the GPU");
}

absl::Status CudaRunner::LaunchGraph(cudaGraphExec_t executable) {
  for (int stage = 0; stage < config_.num_layers + 2; ++stage) {
    if (absl::Status status = AwaitOnStream(stage); !status.ok()) return status;
  }
  ++stats_.graph_steps;
  absl::Status status = CudaStatus(cudaGraphLaunch(executable, stream_), "launch a graph");
  return status.ok() ? rotating_->GraphLaunched() : status;
}

absl::Status CudaRunner::LaunchEager(Flight& flight) {
  ++stats_.eager_steps;
  const PackedStep& step = flight.step;
  PrefillShape prefill;
  if (step.counts.prefills > 0) {
    prefill.row_indptr = reinterpret_cast<int32_t*>(flight.staging + step.layout.prefill_rows);
    prefill.block_indptr = reinterpret_cast<int32_t*>(flight.staging + step.layout.prefill_blocks);
    prefill.kv_tokens = flight.step.prefill_tokens.data();
    prefill.rows = step.counts.rows - step.counts.decodes;
    prefill.sequences = step.counts.prefills;
    prefill.heads = config_.num_heads;
    prefill.kv_heads = config_.num_kv_heads;
    prefill.head_dim = config_.head_dim;
    prefill.block_tokens = options_.block_tokens;
  }
  StepHooks hooks(*this, flight);
  absl::Status status = forward_->Enqueue(step, prefill, flight.prefill_ints, hooks, stream_);
  if (status.ok() && step.sampled_chunk >= 0) {
    status =
        CudaStatus(cudaMemcpyAsync(flight.heads, forward_->head_sample(),
                                   2 * heads() * sizeof(float), cudaMemcpyDeviceToHost, stream_),
                   "copy the sample of heads");
  }
  if (!status.ok()) status.Update(rotating_->Abandon(stream_));
  return status;
}

absl::StatusOr<StepResult> CudaRunner::Wait() {
  if (submitted_ == finished_) {
    return absl::FailedPreconditionError("no step is in flight; call Submit first");
  }
  Flight& flight = flights_[finished_ % flights_.size()];
  ++finished_;
  absl::Status status = flight.status;
  const absl::Status ended = CudaStatus(cudaEventSynchronize(flight.done), "step");
  TellRanks(ended);
  status.Update(ended);
  if (status.ok() && gate_ != nullptr) status = gate_->CheckPassed();
  if (!status.ok()) return status;
  auto times = ReadTimes(flight);
  if (!times.ok()) return times.status();
  StepResult result = ReadResult(flight);
  result.times = *times;
  result.times.rotation_stall = ReadStall(flight);
  return result;
}

absl::Duration CudaRunner::ReadStall(const Flight& flight) {
  if (flight.step.counts.samples == 0) return absl::ZeroDuration();
  uint64_t waited;
  std::memcpy(&waited, flight.results + ResultLayout::For(options_.max_sequences).waited,
              sizeof(waited));
  return absl::Nanoseconds(waited - std::exchange(waited_, waited));
}

absl::StatusOr<StepTimes> CudaRunner::ReadTimes(const Flight& flight) const {
  StepTimes times;
  if (!flight.timed) return times;
  float all = 0, sampling = 0;
  absl::Status status =
      CudaStatus(cudaEventElapsedTime(&all, flight.begin, flight.done), "time of the step");
  if (status.ok() && flight.sampling_timed) {
    status = CudaStatus(cudaEventElapsedTime(&sampling, flight.sampling, flight.done),
                        "time of the sampling");
  }
  if (!status.ok()) return status;
  times.device = absl::Milliseconds(all);
  times.sampling = absl::Milliseconds(sampling);
  return times;
}

StepResult CudaRunner::ReadResult(const Flight& flight) const {
  const ResultLayout at = ResultLayout::For(options_.max_sequences);
  const auto* tokens = reinterpret_cast<const int32_t*>(flight.results + at.tokens);
  const auto* logprobs = reinterpret_cast<const float*>(flight.results + at.logprobs);
  const auto* top_tokens = reinterpret_cast<const int32_t*>(flight.results + at.top_tokens);
  const auto* top_logprobs = reinterpret_cast<const float*>(flight.results + at.top_logprobs);
  StepResult result;
  result.graph = flight.graph;
  result.rotation_bytes = flight.rotated;
  if (flight.step.sampled_chunk >= 0) {
    const auto* shares = reinterpret_cast<const float*>(flight.heads);
    result.head_sample.shares.assign(shares, shares + heads());
    result.head_sample.effects.assign(shares + heads(), shares + 2 * heads());
  }
  result.sampled.resize(flight.step.slots.size());
  for (size_t c = 0; c < flight.step.slots.size(); ++c) {
    const int32_t slot = flight.step.slots[c];
    if (slot < 0) continue;
    SampledToken& token = result.sampled[c].emplace();
    token.token = tokens[slot];
    if (flight.logprobs[c] < 0) continue;
    token.logprob = logprobs[slot];
    const int32_t top = std::min({flight.logprobs[c], kMaxTop, config_.vocab_size});
    for (int32_t i = slot * kMaxTop; i < slot * kMaxTop + top; ++i) {
      token.top.emplace_back(top_tokens[i], top_logprobs[i]);
    }
  }
  return result;
}

absl::StatusOr<std::vector<float>> CudaRunner::Logits(size_t chunk) const {
  if (submitted_ != finished_ || finished_ == 0) {
    return absl::FailedPreconditionError("logits can be read between Wait and Submit only");
  }
  const Flight& flight = flights_[(finished_ - 1) % flights_.size()];
  if (chunk >= flight.step.slots.size() || flight.step.slots[chunk] < 0) {
    return absl::InvalidArgumentError(absl::StrCat("chunk ", chunk, " sampled nothing"));
  }
  std::vector<float> logits(static_cast<size_t>(config_.vocab_size));
  const float* from = forward_->logits() + int64_t{flight.step.slots[chunk]} * config_.vocab_size;
  absl::Status status = CudaStatus(
      cudaMemcpy(logits.data(), from, logits.size() * sizeof(float), cudaMemcpyDeviceToHost),
      "read logits");
  if (!status.ok()) return status;
  return logits;
}

}  // namespace palimpsest::cuda
