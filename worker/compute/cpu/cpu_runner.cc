#include "worker/compute/cpu/cpu_runner.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/compute/cpu/packing.h"
#include "worker/compute/cpu/rope.h"
#include "worker/core/sampling.h"

namespace palimpsest {
namespace {

// Rows (tokens times query heads of a KV head) of one attention item: enough to use a converted
// key tile well, few enough to balance the threads.
constexpr int32_t kAttentionItemRows = 48;

// Up to this many floats every thread normalises all rows for itself, which is cheaper than a
// barrier.
constexpr int64_t kPrivateNormFloats = 8192;

// Whole cache lines, and an odd number of them, so that the rows of a tile do not compete for the
// same cache sets.
constexpr int64_t RowStride(int64_t size) { return ((size + 15) / 16 | 1) * 16; }

int CpuCount() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

absl::Status CheckMultiple(const char* what, int64_t value, int64_t factor) {
  if (value > 0 && value % factor == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the CPU kernels need ", what,
                                                 " to be a positive multiple of ", factor,
                                                 ", the model has ", value));
}

absl::Status CheckShape(const ModelConfig& config, const ImageLayout& layout) {
  for (const absl::Status& status :
       {CheckMultiple("hidden_size", config.hidden_size, kPanelRows),
        CheckMultiple("intermediate_size", config.intermediate_size, kPanelRows),
        CheckMultiple("head_dim", config.head_dim, 16),
        CheckMultiple("num_attention_heads", config.num_heads, config.num_kv_heads)}) {
    if (!status.ok()) return status;
  }
  if (config.head_dim > kMaxHeadDim) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the CPU kernels take head_dim up to ", kMaxHeadDim, ", the model has ", config.head_dim));
  }
  if (layout.layers.size() != static_cast<size_t>(config.num_layers)) {
    return absl::InvalidArgumentError(absl::StrCat("the image layout has ", layout.layers.size(),
                                                   " layers, the model has ", config.num_layers));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<std::unique_ptr<CpuRunner>> CpuRunner::Create(const ModelConfig& config,
                                                             const ImageLayout& layout,
                                                             const ModelMemory& memory,
                                                             ParameterGate* gate,
                                                             const CpuRunnerOptions& options) {
  if (absl::Status status = CheckShape(config, layout); !status.ok()) return status;
  if (options.block_tokens <= 0 || options.threads < 0) {
    return absl::InvalidArgumentError(
        absl::StrCat("block_tokens must be positive and threads not negative, got ",
                     options.block_tokens, " and ", options.threads));
  }
  if (memory.kv_block_bytes < config.KvBytes(options.block_tokens)) {
    return absl::InvalidArgumentError(
        absl::StrCat("a KV block of ", options.block_tokens, " tokens takes ",
                     config.KvBytes(options.block_tokens).count(), " bytes, got blocks of ",
                     memory.kv_block_bytes.count()));
  }
  return std::unique_ptr<CpuRunner>(new CpuRunner(config, layout, memory, gate, options));
}

CpuRunner::CpuRunner(const ModelConfig& config, const ImageLayout& layout,
                     const ModelMemory& memory, ParameterGate* gate,
                     const CpuRunnerOptions& options)
    : config_(config),
      layout_(layout),
      memory_(memory),
      gate_(gate),
      block_tokens_(options.block_tokens),
      kernels_(options.kernels != nullptr ? *options.kernels : *SupportedKernels().front()),
      frequencies_(RopeFrequencies(config)),
      hidden_stride_(RowStride(config.hidden_size)),
      qkv_stride_(RowStride(int64_t{config.num_heads + 2 * config.num_kv_heads} * config.head_dim)),
      attention_stride_(RowStride(int64_t{config.num_heads} * config.head_dim)),
      intermediate_stride_(RowStride(config.intermediate_size)),
      logits_stride_(RowStride(config.vocab_size)),
      token_bytes_(int64_t{config.num_kv_heads} * config.head_dim * 2),
      thread_states_(options.threads > 0 ? options.threads : CpuCount()),
      team_(static_cast<int>(thread_states_.size()), [this](Member& member) { RunStep(member); }) {
  for (ThreadState& state : thread_states_) {
    const int64_t group = config.num_heads / config.num_kv_heads;
    state.attention.Reserve(
        AttentionScratchFloats(std::max<int64_t>(kAttentionItemRows, group), config.head_dim));
    state.normalized.Reserve(kPrivateNormFloats + hidden_stride_);
  }
}

absl::Status CpuRunner::ValidateChunk(const SequenceChunk& chunk) const {
  if (chunk.tokens.empty()) return absl::InvalidArgumentError("it has no tokens");
  const int64_t past = int64_t{chunk.first_position} + static_cast<int64_t>(chunk.tokens.size());
  if (chunk.first_position < 0 || past > config_.max_position) {
    return absl::InvalidArgumentError(absl::StrCat("positions ", chunk.first_position, " to ",
                                                   past - 1, " are not within the model's ",
                                                   config_.max_position));
  }
  if (chunk.token_from >= 0) {
    return absl::InvalidArgumentError(
        "it continues a step in flight, of which this runner has one only");
  }
  for (const TokenId token : chunk.tokens) {
    if (token < 0 || token >= config_.vocab_size) {
      return absl::InvalidArgumentError(
          absl::StrCat("token ", token, " is not within the vocabulary of ", config_.vocab_size));
    }
  }
  const int64_t blocks = (past + block_tokens_ - 1) / block_tokens_;
  if (static_cast<int64_t>(chunk.block_table.size()) < blocks) {
    return absl::InvalidArgumentError(absl::StrCat(
        past, " positions need ", blocks, " blocks, the table has ", chunk.block_table.size()));
  }
  int64_t oldest = 0;
  if (config_.sliding_window.has_value()) {
    oldest = std::max<int64_t>(0, int64_t{chunk.first_position} - *config_.sliding_window + 1);
  }
  for (int64_t b = oldest / block_tokens_; b < blocks; ++b) {
    if (chunk.block_table[b] == BlockId(0)) {
      return absl::InvalidArgumentError(
          absl::StrCat("block ", b, " of the table is the null block, but is read"));
    }
  }
  return absl::OkStatus();
}

absl::Status CpuRunner::Validate(const StepPlan& plan) const {
  if (in_flight_) return absl::FailedPreconditionError("a step is in flight; call Wait first");
  if (plan.chunks.empty()) return absl::InvalidArgumentError("the plan has no chunks");
  for (size_t i = 0; i < plan.chunks.size(); ++i) {
    if (absl::Status status = ValidateChunk(plan.chunks[i]); !status.ok()) {
      return absl::InvalidArgumentError(absl::StrCat("chunk ", i, ": ", status.message()));
    }
  }
  return absl::OkStatus();
}

void CpuRunner::CopyChunks(const StepPlan& plan) {
  chunks_.clear();
  block_tables_.clear();
  histories_.clear();
  size_t sampled = 0;
  for (const SequenceChunk& chunk : plan.chunks) {
    chunks_.push_back({.tokens = static_cast<int32_t>(chunk.tokens.size()),
                       .first_position = chunk.first_position,
                       .first_block = static_cast<int64_t>(block_tables_.size())});
    block_tables_.insert(block_tables_.end(), chunk.block_table.begin(), chunk.block_table.end());
    if (chunk.sampling == nullptr) continue;
    if (++sampled > samplings_.size()) samplings_.emplace_back();
    samplings_[sampled - 1] = *chunk.sampling;
    if (chunk.sampling->params.repetition_penalty != 1.0f) {
      histories_.insert(histories_.end(), chunk.sampling->history.begin(),
                        chunk.sampling->history.end());
    }
  }
  size_t first = 0;
  for (SamplingRequest& request : absl::MakeSpan(samplings_).first(sampled)) {
    const size_t size = request.params.repetition_penalty != 1.0f ? request.history.size() : 0;
    request.history = absl::MakeConstSpan(histories_).subspan(first, size);
    first += size;
  }
}

void CpuRunner::PlanRows(const StepPlan& plan) {
  CopyChunks(plan);
  rows_.clear();
  sampled_rows_.clear();
  sampled_chunks_.clear();
  for (size_t c = 0; c < chunks_.size(); ++c) {
    const Chunk& chunk = chunks_[c];
    for (int32_t t = 0; t < chunk.tokens; ++t) {
      rows_.push_back(
          {plan.chunks[c].tokens[t], chunk.first_position + t, static_cast<int32_t>(c)});
    }
    if (plan.chunks[c].sampling != nullptr) {
      sampled_rows_.push_back(static_cast<int32_t>(rows_.size()) - 1);
      sampled_chunks_.push_back(static_cast<int32_t>(c));
    }
  }
  result_.sampled.assign(chunks_.size(), std::nullopt);
}

void CpuRunner::PlanAttention() {
  const int32_t group = config_.num_heads / config_.num_kv_heads;
  const int32_t tile = std::max(1, kAttentionItemRows / group);
  // With enough sequences for all threads an item takes all heads of its tokens, so that the cache
  // lines of a token are read together.
  const bool many = chunks_.size() >= 2 * static_cast<size_t>(team_.size());
  items_.clear();
  rotate_in_attention_ = true;
  int32_t row = 0;
  for (size_t c = 0; c < chunks_.size(); ++c) {
    const int32_t tokens = chunks_[c].tokens;
    // One item then has all tokens of a KV head, so it can write their KV itself.
    if (tokens > tile) rotate_in_attention_ = false;
    const bool together = many && tokens * config_.num_heads <= kAttentionItemRows;
    const int32_t heads = together ? config_.num_kv_heads : 1;
    for (int32_t t = 0; t < tokens; t += tile) {
      const int32_t count = std::min(tile, tokens - t);
      int64_t keys = chunks_[c].first_position + t + count;
      if (config_.sliding_window.has_value()) {
        keys = std::min<int64_t>(keys, int64_t{*config_.sliding_window} + count);
      }
      for (int32_t h = 0; h < config_.num_kv_heads; h += heads) {
        items_.push_back({static_cast<int32_t>(c), row + t, count, h, heads,
                          keys * (int64_t{count} * group + 4) * heads});
      }
    }
    row += tokens;
  }
  // The largest first, so that the threads finish together.
  std::sort(items_.begin(), items_.end(),
            [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });
}

void CpuRunner::ReserveBuffers() {
  residual_.Reserve(rows() * hidden_stride_);
  normalized_.Reserve(rows() * hidden_stride_);
  qkv_.Reserve(rows() * qkv_stride_);
  attention_.Reserve(rows() * attention_stride_);
  intermediate_.Reserve(rows() * intermediate_stride_);
  logits_.Reserve(static_cast<int64_t>(sampled_rows_.size()) * logits_stride_);
  cosines_.Reserve(rows() * (config_.head_dim / 2));
  sines_.Reserve(rows() * (config_.head_dim / 2));
}

absl::Status CpuRunner::Submit(const StepPlan& plan) {
  if (absl::Status status = Validate(plan); !status.ok()) return status;
  PlanRows(plan);
  PlanAttention();
  ReserveBuffers();
  gate_status_ = absl::OkStatus();
  abandoned_ = false;
  in_flight_ = true;
  team_.Start();
  return absl::OkStatus();
}

absl::StatusOr<StepResult> CpuRunner::Wait() {
  if (!in_flight_) return absl::FailedPreconditionError("no step is in flight; call Submit first");
  team_.Join();
  in_flight_ = false;
  if (abandoned_) return gate_status_;
  return std::move(result_);
}

absl::Span<const float> CpuRunner::logits(size_t chunk) const {
  for (size_t i = 0; i < sampled_chunks_.size(); ++i) {
    if (static_cast<size_t>(sampled_chunks_[i]) == chunk) {
      return absl::MakeConstSpan(logits_.data() + static_cast<int64_t>(i) * logits_stride_,
                                 config_.vocab_size);
    }
  }
  return {};
}

const float* CpuRunner::VectorAt(const VectorPlacement& placement) const {
  if (placement.size == 0) return nullptr;
  return reinterpret_cast<const float*>(memory_.parameters + placement.offset.count());
}

void CpuRunner::OpenStage(int stage) {
  const bool head = stage == 1 + config_.num_layers;
  if (gate_ == nullptr || (head && sampled_rows_.empty())) return;
  gate_status_ = gate_->AwaitStage(stage);
  if (!gate_status_.ok()) abandoned_ = true;
}

// A thread that is late may see abandoned_ before the phase at which the others will: what it skips
// is over.
void CpuRunner::RunStep(Member& member) {
  member.ForEach(1, 1, [&](int64_t, int64_t) { OpenStage(0); });
  if (abandoned_) return;
  Embed(member);
  for (int layer = 0; layer < config_.num_layers; ++layer) {
    if (abandoned_) return;
    RunLayer(layer, member);
  }
  if (!abandoned_) RunHead(member);
}

void CpuRunner::Embed(Member& member) {
  const std::byte* embed = memory_.parameters + layout_.embed.offset.count();
  const int64_t half = config_.head_dim / 2;
  member.ForEach(
      rows(), 1,
      [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
          UnpackRow(embed, rows_[r].token, config_.hidden_size,
                    residual_.data() + r * hidden_stride_);
          RopeAngles(frequencies_, rows_[r].position, cosines_.data() + r * half,
                     sines_.data() + r * half);
        }
      },
      [&] { OpenStage(1); });
}

Projection CpuRunner::MakeProjection(const MatrixPlacement& matrix, const VectorPlacement& bias,
                                     FloatBuffer& output, int64_t output_stride) const {
  Projection projection;
  projection.weights = memory_.parameters + matrix.offset.count();
  projection.rows = matrix.rows;
  projection.cols = matrix.cols;
  projection.bias = VectorAt(bias);
  projection.tokens = rows();
  projection.output = output.data();
  projection.output_stride = output_stride;
  return projection;
}

void CpuRunner::NormalizeRows(const NormInput& norm, int64_t first, int64_t last,
                              float* out) const {
  const float* weight = VectorAt(norm.weight);
  for (int64_t i = first; i < last; ++i) {
    const int64_t row = norm.indexes.empty() ? i : norm.indexes[i];
    kernels_.rms_norm(residual_.data() + row * hidden_stride_, weight, config_.hidden_size,
                      config_.rms_norm_eps, out + i * hidden_stride_);
  }
}

void CpuRunner::ProjectNormalized(ProjectionKernel kernel, const MatrixPlacement& matrix,
                                  const VectorPlacement& bias, const NormInput& norm,
                                  FloatBuffer& output, int64_t output_stride, Member& member) {
  Projection projection = MakeProjection(matrix, bias, output, output_stride);
  projection.input = normalized_.data();
  projection.input_stride = hidden_stride_;
  projection.tokens = norm.count;
  const bool normalize_alone = norm.count * hidden_stride_ <= kPrivateNormFloats;
  float* own = thread_states_[member.thread()].normalized.data();
  if (normalize_alone) {
    projection.input = own;
  } else {
    member.ForEach(norm.count, 1, [&](int64_t first, int64_t last) {
      NormalizeRows(norm, first, last, normalized_.data());
    });
  }
  const bool gated = kernel == kernels_.project_gated;
  bool input_ready = !normalize_alone;
  member.ForEach(PanelCount(matrix.rows) / (gated ? 2 : 1), 1, [&](int64_t first, int64_t last) {
    if (!input_ready) NormalizeRows(norm, 0, norm.count, own);
    input_ready = true;
    kernel(projection, first, last);
  });
}

void CpuRunner::ProjectToResidual(const MatrixPlacement& matrix, const VectorPlacement& bias,
                                  const FloatBuffer& input, int64_t input_stride, Member& member,
                                  absl::FunctionRef<void()> finish) {
  Projection projection = MakeProjection(matrix, bias, residual_, hidden_stride_);
  projection.input = input.data();
  projection.input_stride = input_stride;
  member.ForEach(
      PanelCount(matrix.rows), 1,
      [&](int64_t first, int64_t last) { kernels_.project_add(projection, first, last); }, finish);
}

void CpuRunner::RotateAndStore(int layer, int64_t row, int32_t kv_head) {
  const int64_t dim = config_.head_dim, half = dim / 2;
  const int32_t group = config_.num_heads / config_.num_kv_heads;
  const float* cosines = cosines_.data() + row * half;
  const float* sines = sines_.data() + row * half;
  float* q = qkv_.data() + row * qkv_stride_;
  float* k = q + (config_.num_heads + kv_head) * dim;
  const float* v = k + config_.num_kv_heads * dim;
  for (int32_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
    kernels_.rotate(q + h * dim, cosines, sines, half);
  }
  kernels_.rotate(k, cosines, sines, half);

  const int32_t position = rows_[row].position;
  const int64_t first_block = chunks_[rows_[row].chunk].first_block;
  const BlockId block = block_tables_[first_block + position / block_tokens_];
  std::byte* keys = memory_.kv + int64_t{block.value()} * memory_.kv_block_bytes.count() +
                    (int64_t{2} * layer * block_tokens_ + position % block_tokens_) * token_bytes_ +
                    kv_head * dim * 2;
  kernels_.to_bf16(k, dim, reinterpret_cast<uint16_t*>(keys));
  kernels_.to_bf16(v, dim, reinterpret_cast<uint16_t*>(keys + block_tokens_ * token_bytes_));
}

void CpuRunner::Attend(int layer, const AttentionItem& item, int thread) {
  const int64_t dim = config_.head_dim;
  AttentionTask task;
  task.kv_heads = item.kv_heads;
  task.group = config_.num_heads / config_.num_kv_heads;
  const int64_t head_offset = int64_t{item.kv_head} * task.group * dim;
  task.query = qkv_.data() + item.first_row * qkv_stride_ + head_offset;
  task.query_stride = qkv_stride_;
  task.output = attention_.data() + item.first_row * attention_stride_ + head_offset;
  task.output_stride = attention_stride_;
  task.head_dim = config_.head_dim;
  task.first_position = rows_[item.first_row].position;
  task.tokens = item.tokens;
  if (config_.sliding_window.has_value()) task.window = *config_.sliding_window;
  task.kv = memory_.kv;
  task.block_bytes = memory_.kv_block_bytes.count();
  task.block_tokens = block_tokens_;
  task.block_table = block_tables_.data() + chunks_[item.chunk].first_block;
  task.key_offset = int64_t{2} * layer * block_tokens_ * token_bytes_ + item.kv_head * dim * 2;
  task.value_offset = task.key_offset + block_tokens_ * token_bytes_;
  task.token_bytes = token_bytes_;
  kernels_.attention(task, thread_states_[thread].attention.data());
}

void CpuRunner::RunLayer(int layer, Member& member) {
  const LayerPlacement& at = layout_.layers[layer];
  ProjectNormalized(kernels_.project, at.qkv, at.qkv_bias, {at.attention_norm, {}, rows()}, qkv_,
                    qkv_stride_, member);
  if (!rotate_in_attention_) {
    member.ForEach(rows(), 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        for (int32_t h = 0; h < config_.num_kv_heads; ++h) RotateAndStore(layer, row, h);
      }
    });
  }
  member.ForEach(static_cast<int64_t>(items_.size()), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const AttentionItem& item = items_[i];
      for (int32_t t = 0; rotate_in_attention_ && t < item.tokens; ++t) {
        for (int32_t h = 0; h < item.kv_heads; ++h) {
          RotateAndStore(layer, item.first_row + t, item.kv_head + h);
        }
      }
      Attend(layer, item, member.thread());
    }
  });
  ProjectToResidual(at.o, at.o_bias, attention_, attention_stride_, member, [] {});
  ProjectNormalized(kernels_.project_gated, at.gate_up, at.gate_up_bias, {at.mlp_norm, {}, rows()},
                    intermediate_, intermediate_stride_, member);
  ProjectToResidual(at.down, at.down_bias, intermediate_, intermediate_stride_, member,
                    [&] { OpenStage(2 + layer); });
}

void CpuRunner::RunHead(Member& member) {
  const auto sampled = static_cast<int64_t>(sampled_rows_.size());
  if (sampled == 0) return;
  ProjectNormalized(kernels_.project, layout_.lm_head, VectorPlacement{},
                    {layout_.final_norm, sampled_rows_, sampled}, logits_, logits_stride_, member);
  member.ForEach(sampled, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int32_t chunk = sampled_chunks_[i];
      result_.sampled[chunk] =
          Sample(absl::MakeConstSpan(logits_.data() + i * logits_stride_, config_.vocab_size),
                 samplings_[i], thread_states_[member.thread()].sampling);
    }
  });
}

}  // namespace palimpsest
