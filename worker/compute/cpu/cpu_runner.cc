#include "worker/compute/cpu/cpu_runner.h"

#include <sched.h>

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/monotonic_time.h"
#include "worker/compute/cpu/model_check.h"
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

// Most query heads of latent attention in one group.
constexpr int32_t kLatentGroup = 8;

int32_t GroupSize(const ModelConfig& config) {
  if (!config.latent.has_value()) return config.num_heads / config.num_kv_heads;
  int32_t size = std::min(kLatentGroup, config.num_heads);
  while (config.num_heads % size != 0) --size;
  return size;
}

int64_t QkvWidth(const ModelConfig& config) {
  const int64_t queries = int64_t{config.num_heads} * config.head_dim;
  if (!config.latent.has_value()) return queries + 2 * config.num_kv_heads * config.head_dim;
  const LatentAttention& latent = *config.latent;
  return (latent.q_lora_rank > 0 ? latent.q_lora_rank : queries) + latent.cache_width();
}

int CpuCount() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof(set), &set) == 0 ? std::max(1, CPU_COUNT(&set)) : 1;
}

Nonlinearity NonlinearityOf(Activation activation) {
  switch (activation) {
    case Activation::kGeluTanhGated:
      return Nonlinearity::kGeluTanh;
    case Activation::kRelu:
      return Nonlinearity::kRelu;
    case Activation::kSiluGated:
      break;
  }
  return Nonlinearity::kSilu;
}

}  // namespace

absl::StatusOr<std::unique_ptr<CpuRunner>> CpuRunner::Create(const ModelConfig& config,
                                                             const ImageLayout& layout,
                                                             const ModelMemory& memory,
                                                             ParameterGate* gate,
                                                             const CpuRunnerOptions& options) {
  if (absl::Status status = CheckModel(config, layout); !status.ok()) return status;
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
  if (absl::Status status = CheckHeads(config, options.head_sampling, options.lossy_heads);
      !status.ok()) {
    return status;
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
      head_sampling_(options.head_sampling),
      lossy_heads_(options.lossy_heads),
      group_(GroupSize(config)),
      groups_(config.num_heads / group_),
      hidden_stride_(RowStride(config.hidden_size)),
      qkv_stride_(RowStride(QkvWidth(config))),
      attention_stride_(RowStride(int64_t{config.num_heads} * config.value_dim())),
      intermediate_stride_(RowStride(config.intermediate_size)),
      logits_stride_(RowStride(config.vocab_size)),
      absorbed_stride_(
          config.latent ? RowStride(int64_t{config.num_heads} * config.latent->cache_width()) : 0),
      latent_stride_(
          config.latent ? RowStride(int64_t{config.num_heads} * config.latent->kv_lora_rank) : 0),
      token_bytes_(config.KvTokenBytes().count() / (config.latent ? 1 : 2)),
      head_sampler_(options.head_sampling),
      thread_states_(options.threads > 0 ? options.threads : CpuCount()),
      team_(static_cast<int>(thread_states_.size()), [this](Member& member) { RunStep(member); }) {
  for (ThreadState& state : thread_states_) {
    state.attention.Reserve(
        AttentionScratchFloats(std::max(kAttentionItemRows, group_),
                               config.latent ? config.latent->cache_width() : config.head_dim));
    state.normalized.Reserve(kPrivateNormFloats + hidden_stride_);
    state.sampled.Reserve(int64_t{2} * group_ * config.value_dim());
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
  result_ = {};
  result_.sampled.assign(chunks_.size(), std::nullopt);
  PlanHeadSample(plan);
}

void CpuRunner::PlanAttention() {
  const int32_t tile = std::max(1, kAttentionItemRows / group_);
  const bool latent = config_.latent.has_value();
  // With enough sequences for all threads an item takes all heads of its tokens, so that the cache
  // lines of a token are read together.
  const bool many =
      !latent && !lossy_heads_.any() && chunks_.size() >= 2 * static_cast<size_t>(team_.size());
  items_.clear();
  rotate_in_attention_ = !latent;
  int32_t row = 0;
  for (size_t c = 0; c < chunks_.size(); ++c) {
    const int32_t tokens = chunks_[c].tokens;
    // One item then has all tokens of a KV head, so it can write their KV itself.
    if (tokens > tile) rotate_in_attention_ = false;
    const bool together = many && tokens * config_.num_heads <= kAttentionItemRows;
    const int32_t groups = together ? groups_ : 1;
    for (int32_t t = 0; t < tokens; t += tile) {
      const int32_t count = std::min(tile, tokens - t);
      int64_t keys = chunks_[c].first_position + t + count;
      if (config_.sliding_window.has_value()) {
        keys = std::min<int64_t>(keys, int64_t{*config_.sliding_window} + count);
      }
      for (int32_t g = 0; g < groups_; g += groups) {
        items_.push_back({static_cast<int32_t>(c), row + t, count, g, groups,
                          keys * (int64_t{count} * group_ + 4) * groups});
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
  cosines_.Reserve(rows() * std::ssize(frequencies_));
  sines_.Reserve(rows() * std::ssize(frequencies_));
  if (config_.post_norms) branch_.Reserve(rows() * hidden_stride_);
  if (config_.latent.has_value()) {
    queries_.Reserve(rows() * int64_t{config_.num_heads} * config_.head_dim);
    absorbed_.Reserve(rows() * absorbed_stride_);
    latents_.Reserve(rows() * latent_stride_);
  }
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
  CloseStage(0);
  if (!sampled_rows_.empty()) CloseStage(1 + config_.num_layers);
  return std::move(result_);
}

absl::Status CpuRunner::SetRotation(const Rotation& rotation) {
  rotation_ = rotation;
  return absl::OkStatus();
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
  const bool rotates =
      std::binary_search(rotation_.stages.begin(), rotation_.stages.end(), int32_t{stage});
  const absl::Time start = rotates ? MonotonicNow() : absl::Time();
  gate_status_ = gate_->AwaitStage(stage);
  if (rotates) result_.times.rotation_stall += MonotonicNow() - start;
  if (!gate_status_.ok()) abandoned_ = true;
}

void CpuRunner::CloseStage(int stage) {
  if (gate_ != nullptr) gate_->ReleaseStage(stage);
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
  const std::byte* positions = memory_.parameters + layout_.positions.offset.count();
  const int64_t half = std::ssize(frequencies_), size = config_.hidden_size;
  const float magnitude = RopeMagnitude(config_);
  float* place = thread_states_[member.thread()].normalized.data();
  member.ForEach(
      rows(), 1,
      [&](int64_t first, int64_t last) {
        for (int64_t r = first; r < last; ++r) {
          float* x = residual_.data() + r * hidden_stride_;
          UnpackRow(embed, rows_[r].token, size, x);
          if (config_.embedding_scale != 1.0f) {
            for (int64_t i = 0; i < size; ++i) x[i] *= config_.embedding_scale;
          }
          if (config_.position_table_offset.has_value()) {
            UnpackRow(positions, rows_[r].position + *config_.position_table_offset, size, place);
            for (int64_t i = 0; i < size; ++i) x[i] += place[i];
          }
          RopeAngles(frequencies_, magnitude, rows_[r].position, cosines_.data() + r * half,
                     sines_.data() + r * half);
        }
      },
      [&] { OpenStage(1); });
}

Projection CpuRunner::MakeProjection(const Linear& linear, FloatBuffer& output,
                                     int64_t output_stride) const {
  Projection projection;
  projection.weights = memory_.parameters + linear.matrix.offset.count();
  projection.rows = linear.matrix.rows;
  projection.cols = linear.matrix.cols;
  projection.bias = VectorAt(linear.bias);
  projection.tokens = rows();
  projection.output = output.data();
  projection.output_stride = output_stride;
  projection.nonlinearity = linear.nonlinearity;
  return projection;
}

void CpuRunner::Normalize(const float* x, const VectorPlacement& weight,
                          const VectorPlacement& bias, float* out) const {
  if (config_.norm == NormKind::kLayer) {
    kernels_.layer_norm(x, VectorAt(weight), VectorAt(bias), config_.hidden_size,
                        config_.rms_norm_eps, out);
  } else {
    kernels_.rms_norm(x, VectorAt(weight), config_.hidden_size, config_.rms_norm_eps,
                      config_.norm_weight_offset, out);
  }
}

void CpuRunner::NormalizeRows(const NormInput& norm, int64_t first, int64_t last,
                              float* out) const {
  for (int64_t i = first; i < last; ++i) {
    const int64_t row = norm.indexes.empty() ? i : norm.indexes[i];
    Normalize(residual_.data() + row * hidden_stride_, norm.weight, norm.bias,
              out + i * hidden_stride_);
  }
}

void CpuRunner::ProjectNormalized(const Linear& linear, const NormInput& norm, FloatBuffer& output,
                                  int64_t output_stride, Member& member) {
  Projection projection = MakeProjection(linear, output, output_stride);
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
  const int64_t panels = PanelCount(linear.matrix.rows);
  const bool gated = linear.kernel == kernels_.project_gated;
  bool input_ready = !normalize_alone;
  member.ForEach(gated ? panels / 2 : panels, 1, [&](int64_t first, int64_t last) {
    if (!input_ready) NormalizeRows(norm, 0, norm.count, own);
    input_ready = true;
    linear.kernel(projection, first, last);
  });
}

void CpuRunner::ProjectToResidual(const Linear& linear, const FloatBuffer& input,
                                  int64_t input_stride, const VectorPlacement& post_norm,
                                  Member& member, absl::FunctionRef<void()> finish) {
  const bool normed = post_norm.size > 0;
  Projection projection = MakeProjection(linear, normed ? branch_ : residual_, hidden_stride_);
  projection.input = input.data();
  projection.input_stride = input_stride;
  const auto project = [&](int64_t first, int64_t last) {
    (normed ? kernels_.project : kernels_.project_add)(projection, first, last);
  };
  if (!normed) return member.ForEach(PanelCount(linear.matrix.rows), 1, project, finish);
  member.ForEach(PanelCount(linear.matrix.rows), 1, project);
  member.ForEach(
      rows(), 1,
      [&](int64_t first, int64_t last) {
        for (int64_t row = first; row < last; ++row) {
          float* branch = branch_.data() + row * hidden_stride_;
          float* residual = residual_.data() + row * hidden_stride_;
          Normalize(branch, post_norm, VectorPlacement(), branch);
          for (int64_t i = 0; i < config_.hidden_size; ++i) residual[i] += branch[i];
        }
      },
      finish);
}

void CpuRunner::RunLayer(int layer, Member& member) {
  const LayerPlacement& at = layout_.layers[layer];
  if (config_.latent.has_value()) {
    RunLatentAttention(layer, member);
  } else {
    RunAttention(layer, member);
  }
  ProjectToResidual({kernels_.project_add, at.o, at.o_bias}, attention_, attention_stride_,
                    at.post_attention_norm, member, [] {});
  const Linear up = {config_.gated() ? kernels_.project_gated : kernels_.project, at.gate_up,
                     at.gate_up_bias, NonlinearityOf(config_.activation)};
  ProjectNormalized(up, {at.mlp_norm, at.mlp_norm_bias, {}, rows()}, intermediate_,
                    intermediate_stride_, member);
  ProjectToResidual({kernels_.project_add, at.down, at.down_bias}, intermediate_,
                    intermediate_stride_, at.post_mlp_norm, member, [&] {
                      CloseStage(1 + layer);
                      OpenStage(2 + layer);
                    });
}

void CpuRunner::RunHead(Member& member) {
  const auto sampled = static_cast<int64_t>(sampled_rows_.size());
  if (sampled == 0) return;
  const VectorPlacement no_bias;
  ProjectNormalized({kernels_.project, layout_.lm_head, no_bias},
                    {layout_.final_norm, layout_.final_norm_bias, sampled_rows_, sampled}, logits_,
                    logits_stride_, member);
  member.ForEach(sampled, 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const int32_t chunk = sampled_chunks_[i];
      if (config_.logit_softcap > 0) {
        kernels_.soft_cap(logits_.data() + i * logits_stride_, logits_stride_,
                          config_.logit_softcap);
      }
      result_.sampled[chunk] =
          Sample(absl::MakeConstSpan(logits_.data() + i * logits_stride_, config_.vocab_size),
                 samplings_[i], thread_states_[member.thread()].sampling);
    }
  });
}

}  // namespace palimpsest
