#include "worker/compute/cuda/forward.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "worker/compute/cpu/rope.h"
#include "worker/compute/cuda/kernels.h"
#include "worker/compute/cuda/sampler.h"
#include "worker/compute/cuda/skinny_gemm.h"

namespace palimpsest::cuda {
namespace {

constexpr size_t kPrefillFloatBytes = size_t{64} << 20;
// What cuBLASLt recommends for Hopper.
constexpr size_t kGemmWorkspaceBytes = size_t{32} << 20;
// Above the decode sizes.
constexpr int32_t kPrefillRows[] = {384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192};

absl::Status AttentionStatus(const AttentionError& error, const char* what) {
  if (error.message != nullptr) return absl::InternalError(absl::StrCat(what, ": ", error.message));
  return CudaStatus(error.code, what);
}

int32_t QkvSize(const ModelConfig& config) {
  return (config.num_heads + 2 * config.num_kv_heads) * config.head_dim;
}

// The decode sizes for which there are no fused products.
std::vector<int32_t> DecodeSteps(const ForwardOptions& options) {
  std::vector<int32_t> steps;
  for (const int32_t rows : options.decode_rows) {
    if (rows > options.max_fused_rows) steps.push_back(rows);
  }
  if (steps.empty()) steps.push_back(options.decode_rows.back());
  return steps;
}

std::vector<int32_t> RowSteps(const ForwardOptions& options) {
  std::vector<int32_t> steps = DecodeSteps(options);
  for (const int32_t rows : kPrefillRows) {
    if (rows > steps.back() && rows < options.max_rows) steps.push_back(rows);
  }
  if (steps.back() < options.max_rows) steps.push_back(options.max_rows);
  return steps;
}

}  // namespace

ResultLayout ResultLayout::For(int32_t samples) {
  const size_t column = static_cast<size_t>(samples) * 4;
  ResultLayout layout;
  layout.logprobs = column;
  layout.top_tokens = 2 * column;
  layout.top_logprobs = (2 + kMaxTop) * column;
  layout.bytes = (2 + 2 * kMaxTop) * column;
  return layout;
}

Forward::Places Forward::Place(const ModelConfig& config, const ForwardOptions& options,
                               int32_t tiles) {
  const auto rows = static_cast<size_t>(options.max_rows);
  const auto samples = static_cast<size_t>(options.max_sequences);
  const size_t attention = static_cast<size_t>(config.num_heads) * config.head_dim;
  size_t end = 0;
  const auto place = [&end](size_t bytes) {
    const size_t offset = end;
    end = (end + bytes + 255) / 256 * 256;
    return offset;
  };
  Places p = {};
  p.staging = place(options.staging_bytes);
  p.input_tokens = place(rows * 4);
  p.rotations = place(rows * (config.head_dim / 2) * sizeof(float2));
  p.frequencies = place(static_cast<size_t>(config.head_dim / 2) * 4);
  p.counting = place((samples + 1) * 4);
  p.zeros = place(static_cast<size_t>(tiles) * 4);
  p.results = place(ResultLayout::For(options.max_sequences).bytes);
  p.partial_output = place(static_cast<size_t>(tiles) * attention * 2);
  p.partial_lse = place(static_cast<size_t>(tiles) * config.num_heads * 4);
  p.prefill_ints = place(kPrefillIntBytes);
  p.prefill_floats = place(kPrefillFloatBytes);
  p.gemm = place(kGemmWorkspaceBytes);
  p.residual = place(rows * config.hidden_size * 2);
  p.normalized = place(2 * std::max(rows * config.hidden_size, samples * attention));
  p.wide = place(rows * 2 *
                 std::max<size_t>(static_cast<size_t>(QkvSize(config)) + attention,
                                  size_t{3} * config.intermediate_size));
  p.compact = place(samples * config.hidden_size * 2);
  p.sampled_hidden = place(samples * config.hidden_size * 2);
  p.logits = place(samples * config.vocab_size * 4);
  // Any matrix can be read from here while the parameters are not there.
  const size_t largest = static_cast<size_t>(config.hidden_size) * 2 *
                         std::max(config.vocab_size, 2 * config.intermediate_size);
  p.end = std::max(end, p.residual + largest);
  return p;
}

Forward::Forward(const ModelConfig& config, const ImageLayout& layout, const ModelMemory& memory,
                 std::byte* workspace, const Places& places, const ForwardOptions& options)
    : config_(config),
      layout_(layout),
      memory_(memory),
      workspace_(workspace),
      places_(places),
      options_(options),
      qkv_size_(QkvSize(config)),
      attention_size_(config.num_heads * config.head_dim) {}

absl::StatusOr<std::unique_ptr<Forward>> Forward::Create(
    const ModelConfig& config, const ImageLayout& layout, const ModelMemory& memory,
    std::byte* workspace, int32_t tiles, const ForwardOptions& options, cudaStream_t stream) {
  std::unique_ptr<Forward> forward(
      new Forward(config, layout, memory, workspace, Place(config, options, tiles), options));
  SetLaunchOverlap(options.overlap_launches);
  absl::Status status = CudaStatus(PrepareSampler(config.vocab_size), "prepare the sampler");
  if (options.max_fused_rows > 0) {
    status.Update(CudaStatus(PrepareSkinnyGemm(), "prepare the fused products"));
  }
  if (status.ok()) status = forward->MakeProducts(stream);
  if (status.ok()) status = forward->UploadConstants(stream);
  if (status.ok()) status = forward->WarmUp(tiles, stream);
  if (!status.ok()) return status;
  return forward;
}

absl::Status Forward::MakeProducts(cudaStream_t stream) {
  GemmLibrary::Options options;
  options.stream = stream;
  options.workspace = At<void>(places_.gemm);
  options.workspace_bytes = Bytes(kGemmWorkspaceBytes);
  options.scratch = At<void>(places_.residual);
  options.scratch_bytes = Bytes(static_cast<int64_t>(places_.end - places_.residual));
  options.cache_file = options_.gemm_cache_file;
  auto library = GemmLibrary::Load(options);
  if (!library.ok()) return library.status();
  library_ = *std::move(library);
  const std::vector<int32_t> steps = RowSteps(options_);
  const std::vector<int32_t> decode_steps = DecodeSteps(options_);
  const ModelConfig& c = config_;
  const struct {
    std::unique_ptr<Gemm>& product;
    GemmShape shape;
    const std::vector<int32_t>& steps;
  } wanted[] = {
      {products_.qkv, {qkv_size_, c.hidden_size, c.qkv_bias, false, false}, steps},
      {products_.o, {c.hidden_size, attention_size_, c.o_bias, true, false}, steps},
      {products_.gate_up,
       {2 * c.intermediate_size, c.hidden_size, c.mlp_bias, false, false},
       steps},
      {products_.down, {c.hidden_size, c.intermediate_size, c.mlp_bias, true, false}, steps},
      {products_.head, {c.vocab_size, c.hidden_size, false, false, true}, decode_steps},
  };
  for (const auto& [product, shape, row_steps] : wanted) {
    auto made = Gemm::Create(*library_, shape, row_steps);
    if (!made.ok()) return made.status();
    product = *std::move(made);
  }
  return library_->StoreCache();
}

absl::Status Forward::UploadConstants(cudaStream_t stream) {
  const std::vector<float> frequencies = RopeFrequencies(config_);
  absl::Status status =
      CudaStatus(cudaMemcpyAsync(At<void>(places_.frequencies), frequencies.data(),
                                 frequencies.size() * 4, cudaMemcpyHostToDevice, stream),
                 "copy the rotary frequencies");
  std::vector<int32_t> counting(static_cast<size_t>(options_.max_sequences) + 1);
  std::iota(counting.begin(), counting.end(), 0);
  status.Update(CudaStatus(cudaMemcpyAsync(At<void>(places_.counting), counting.data(),
                                           counting.size() * 4, cudaMemcpyHostToDevice, stream),
                           "copy row numbers"));
  status.Update(CudaStatus(
      cudaMemsetAsync(At<void>(places_.zeros), 0, places_.results - places_.zeros, stream),
      "clear tile numbers"));
  status.Update(CudaStatus(cudaStreamSynchronize(stream), "copy the constants"));
  return status;
}

const void* Forward::Tensor(Bytes offset) const {
  return warming_ ? At<std::byte>(places_.residual) : memory_.parameters + offset.count();
}

// Kernels are loaded when they first run, which a capture does not allow. All rows are at token 0
// in the null block, and attention has no valid tile.
absl::Status Forward::WarmUp(int32_t tiles, cudaStream_t stream) {
  const int32_t rows = std::min(options_.max_fused_rows + 1, options_.max_sequences);
  PackedStep step;
  step.counts = {rows, rows, rows, tiles, 0};
  step.layout = StagingLayout::For(step.counts);
  absl::Status status = CudaStatus(cudaMemsetAsync(staging(), 0, step.layout.ints + 4, stream),
                                   "clear the staging buffer");
  const std::vector<int64_t> slots(static_cast<size_t>(rows),
                                   options_.null_block * (memory_.kv_block_bytes.count() / 2));
  status.Update(CudaStatus(cudaMemcpyAsync(Staged<int64_t>(step.layout.kv_slots), slots.data(),
                                           slots.size() * 8, cudaMemcpyHostToDevice, stream),
                           "fill the staging buffer"));
  warming_ = true;
  for (const DecodeKernel kernel : options_.decode_kernels) {
    step.tensor_cores = kernel == DecodeKernel::kTensorCores;
    for (const auto& [count, split] : {std::pair(1, false), {rows, false}, {1, true}}) {
      step.counts.rows = step.counts.samples = step.counts.decodes = count;
      step.split = split;
      if (!status.ok()) break;
      status = Enqueue(
          step, {}, nullptr, [](int) { return absl::OkStatus(); }, stream);
    }
  }
  warming_ = false;
  status.Update(CudaStatus(cudaStreamSynchronize(stream), "run the kernels for the first time"));
  return status;
}

absl::Status Forward::Normalize(const VectorPlacement& weight, size_t input, const int32_t* rows,
                                int32_t count, size_t output, cudaStream_t stream) {
  RmsNormArgs args;
  args.input = At<void>(input);
  args.weight = Tensor(weight.offset);
  args.row_indexes = rows;
  args.output = At<void>(output);
  args.rows = count;
  args.size = config_.hidden_size;
  args.epsilon = config_.rms_norm_eps;
  return CudaStatus(RmsNorm(args, stream), "RMS norm");
}

absl::Status Forward::Multiply(Gemm& product, const MatrixPlacement& weights,
                               const VectorPlacement& bias, size_t input, size_t output,
                               int32_t rows, cudaStream_t stream) {
  GemmCall call;
  call.rows = rows;
  call.weights = Tensor(weights.offset);
  call.bias = bias.size > 0 ? Tensor(bias.offset) : nullptr;
  call.input = At<void>(input);
  call.output = At<void>(output);
  return product.Run(call, stream);
}

PrefillBuffers Forward::BuffersOfPrefill(void* pinned) const {
  return {pinned, At<void>(places_.prefill_ints), kPrefillIntBytes,
          At<void>(places_.prefill_floats), kPrefillFloatBytes};
}

absl::Status Forward::Attention(int32_t layer, const PackedStep& step, const PrefillShape& prefill,
                                cudaStream_t stream) {
  const StagingLayout& at = step.layout;
  const int64_t token_elements = int64_t{config_.num_kv_heads} * config_.head_dim;
  auto* keys = reinterpret_cast<uint16_t*>(memory_.kv) +
               int64_t{2} * layer * options_.block_tokens * token_elements;
  PagedKv kv;
  kv.keys = keys;
  kv.values = keys + options_.block_tokens * token_elements;
  kv.page_stride = memory_.kv_block_bytes.count() / 2;
  kv.block_tokens = options_.block_tokens;
  kv.kv_heads = config_.num_kv_heads;
  kv.head_dim = config_.head_dim;
  kv.indices = Staged<int32_t>(at.ints);

  RopeAppendArgs rope;
  rope.qkv = At<void>(places_.wide);
  rope.rotations = At<float2>(places_.rotations);
  rope.kv_slots = Staged<int64_t>(at.kv_slots);
  rope.keys = kv.keys;
  rope.values = kv.values;
  rope.rows = step.counts.rows;
  rope.heads = config_.num_heads;
  rope.kv_heads = config_.num_kv_heads;
  rope.half_dim = config_.head_dim / 2;
  absl::Status status = CudaStatus(RopeAppend(rope, stream), "rotate and store");

  Queries queries;
  queries.query = At<void>(places_.wide);
  queries.query_stride = qkv_size_;
  auto* output = At<uint16_t>(places_.wide) + static_cast<size_t>(options_.max_rows) * qkv_size_;
  queries.output = output;
  queries.heads = config_.num_heads;
  queries.scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
  if (status.ok() && step.counts.decodes > 0) {
    kv.sequences = step.counts.decodes;
    kv.indptr = Staged<int32_t>(at.decode_blocks);
    kv.last_block_len = Staged<int32_t>(at.decode_last);
    DecodeWork work;
    work.tiles = step.split ? step.counts.decode_tiles : step.counts.decodes;
    work.tile_sequence = Staged<int32_t>(at.tile_sequence);
    work.tile_chunk = Staged<int32_t>(at.tile_chunk);
    work.first_tile = Staged<int32_t>(at.first_tile);
    work.chunk_tokens = Staged<int32_t>(at.chunk_tokens);
    work.valid_tiles = Staged<bool>(at.valid_tiles);
    if (step.split) {
      work.partial_output = At<void>(places_.partial_output);
      work.partial_lse = At<float>(places_.partial_lse);
    }
    work.counting = At<int32_t>(places_.counting);
    work.zeros = At<int32_t>(places_.zeros);
    status = AttentionStatus(
        DecodeAttention(step.tensor_cores ? DecodeKernel::kTensorCores : DecodeKernel::kCudaCores,
                        queries, kv, work, options_.hopper && options_.overlap_launches, stream),
        "decode attention");
  }
  if (status.ok() && step.counts.prefills > 0) {
    kv.sequences = step.counts.prefills;
    kv.indptr = Staged<int32_t>(at.prefill_blocks);
    kv.last_block_len = Staged<int32_t>(at.prefill_last);
    queries.query =
        At<uint16_t>(places_.wide) + static_cast<int64_t>(step.counts.decodes) * qkv_size_;
    queries.output = output + static_cast<int64_t>(step.counts.decodes) * attention_size_;
    status = AttentionStatus(
        RunPrefill(prefill_plan_, prefill, queries, kv, Staged<int32_t>(at.prefill_rows),
                   BuffersOfPrefill(nullptr), stream),
        "prefill attention");
  }
  return status;
}

absl::Status Forward::MultiplyFused(const Fusion& fusion, const MatrixPlacement& weights,
                                    const VectorPlacement& bias, size_t input, size_t output,
                                    int32_t rows, cudaStream_t stream) {
  SkinnyGemm product;
  product.m = rows;
  product.n = fusion.gated ? weights.rows / 2 : weights.rows;
  product.k = weights.cols;
  product.x = At<void>(input);
  product.x_stride = weights.cols;
  product.w = Tensor(weights.offset);
  product.y = At<void>(output);
  product.y_stride = product.n;
  product.fp32_output = fusion.float_output;
  if (fusion.norm != nullptr) {
    product.norm_weight = Tensor(fusion.norm->offset);
    product.norm_epsilon = config_.rms_norm_eps;
  }
  if (bias.size > 0) product.bias = Tensor(bias.offset);
  if (fusion.gated) product.activation = SkinnyActivation::kSiluAndMul;
  if (fusion.residual) {
    product.residual = At<void>(output);
    product.residual_stride = product.n;
  }
  product.programmatic = options_.overlap_launches;
  return CudaStatus(LaunchSkinnyGemm(product, stream), "fused matrix product");
}

absl::Status Forward::Qkv(const LayerPlacement& at, int32_t rows, cudaStream_t stream) {
  if (Fused(rows)) {
    return MultiplyFused({.norm = &at.attention_norm}, at.qkv, at.qkv_bias, places_.residual,
                         places_.wide, rows, stream);
  }
  absl::Status status =
      Normalize(at.attention_norm, places_.residual, nullptr, rows, places_.normalized, stream);
  if (!status.ok()) return status;
  return Multiply(*products_.qkv, at.qkv, at.qkv_bias, places_.normalized, places_.wide, rows,
                  stream);
}

// Behind the last attention only rows that are sampled matter: they are moved together.
absl::StatusOr<Forward::Rows> Forward::RowsAfterAttention(int32_t layer, const PackedStep& step,
                                                          cudaStream_t stream) {
  const size_t attention =
      places_.wide + static_cast<size_t>(options_.max_rows) * qkv_size_ * sizeof(uint16_t);
  if (layer + 1 < config_.num_layers || !Compacts(step)) {
    return Rows{attention, places_.residual, step.counts.rows};
  }
  if (step.counts.samples == 0) return Rows{attention, places_.residual, 0};
  const auto* indexes = Staged<int32_t>(step.layout.sample_rows);
  absl::Status status =
      CudaStatus(GatherRows(At<void>(attention), indexes, At<void>(places_.normalized),
                            step.counts.samples, attention_size_, stream),
                 "gather rows");
  status.Update(
      CudaStatus(GatherRows(At<void>(places_.residual), indexes, At<void>(places_.compact),
                            step.counts.samples, config_.hidden_size, stream),
                 "gather rows"));
  if (!status.ok()) return status;
  return Rows{places_.normalized, places_.compact, step.counts.samples};
}

absl::Status Forward::Mlp(const LayerPlacement& at, const Rows& rows, cudaStream_t stream) {
  const size_t activated = places_.wide + static_cast<size_t>(options_.max_rows) * 2 *
                                              config_.intermediate_size * sizeof(uint16_t);
  if (Fused(rows.count)) {
    absl::Status status =
        MultiplyFused({.norm = &at.mlp_norm, .gated = true}, at.gate_up, at.gate_up_bias,
                      rows.residual, activated, rows.count, stream);
    if (!status.ok()) return status;
    return MultiplyFused({.residual = true}, at.down, at.down_bias, activated, rows.residual,
                         rows.count, stream);
  }
  absl::Status status =
      Normalize(at.mlp_norm, rows.residual, nullptr, rows.count, places_.normalized, stream);
  if (status.ok()) {
    status = Multiply(*products_.gate_up, at.gate_up, at.gate_up_bias, places_.normalized,
                      places_.wide, rows.count, stream);
  }
  if (status.ok()) {
    status = CudaStatus(SiluMultiply(At<void>(places_.wide), At<void>(activated), rows.count,
                                     config_.intermediate_size, stream),
                        "SiLU");
  }
  if (!status.ok()) return status;
  return Multiply(*products_.down, at.down, at.down_bias, activated, rows.residual, rows.count,
                  stream);
}

absl::Status Forward::Layer(int32_t layer, const PackedStep& step, const PrefillShape& prefill,
                            cudaStream_t stream) {
  const LayerPlacement& at = layout_.layers[static_cast<size_t>(layer)];
  absl::Status status = Qkv(at, step.counts.rows, stream);
  if (status.ok()) status = Attention(layer, step, prefill, stream);
  if (!status.ok()) return status;
  const auto rows = RowsAfterAttention(layer, step, stream);
  if (!rows.ok()) return rows.status();
  if (rows->count == 0) return absl::OkStatus();
  status = Fused(rows->count) ? MultiplyFused({.residual = true}, at.o, at.o_bias, rows->attention,
                                              rows->residual, rows->count, stream)
                              : Multiply(*products_.o, at.o, at.o_bias, rows->attention,
                                         rows->residual, rows->count, stream);
  return status.ok() ? Mlp(at, *rows, stream) : status;
}

absl::Status Forward::Head(const PackedStep& step, StageGate gate, cudaStream_t stream) {
  const int32_t samples = step.counts.samples;
  if (samples == 0) return absl::OkStatus();
  absl::Status status = gate(1 + config_.num_layers);
  if (!status.ok()) return status;
  // Without prefills each row is sampled or few are not, and they are where sample_rows says.
  const bool compact = Compacts(step);
  const size_t residual = compact ? places_.compact : places_.residual;
  if (Fused(samples) && (compact || samples == step.counts.rows)) {
    status = MultiplyFused({.norm = &layout_.final_norm, .float_output = true}, layout_.lm_head, {},
                           residual, places_.logits, samples, stream);
  } else {
    status = Normalize(layout_.final_norm, residual,
                       compact ? nullptr : Staged<int32_t>(step.layout.sample_rows), samples,
                       places_.sampled_hidden, stream);
    if (status.ok()) {
      status = Multiply(*products_.head, layout_.lm_head, {}, places_.sampled_hidden,
                        places_.logits, samples, stream);
    }
  }
  if (!status.ok()) return status;
  const ResultLayout results = ResultLayout::For(options_.max_sequences);
  SampleArgs args;
  args.logits = At<float>(places_.logits);
  args.requests = Staged<SamplingRow>(step.layout.sampling);
  args.history = Staged<int32_t>(step.layout.ints);
  args.input_tokens = At<int32_t>(places_.input_tokens);
  args.tokens = At<int32_t>(places_.results + results.tokens);
  args.logprobs = At<float>(places_.results + results.logprobs);
  args.top_tokens = At<int32_t>(places_.results + results.top_tokens);
  args.top_logprobs = At<float>(places_.results + results.top_logprobs);
  args.rows = samples;
  args.vocabulary = config_.vocab_size;
  return CudaStatus(SampleRows(args, stream), "sample");
}

absl::Status Forward::Enqueue(const PackedStep& step, const PrefillShape& prefill, void* pinned,
                              StageGate gate, cudaStream_t stream) {
  absl::Status status = gate(0);
  if (!status.ok()) return status;
  EmbedArgs embed;
  embed.tokens = Staged<int32_t>(step.layout.tokens);
  embed.positions = Staged<int32_t>(step.layout.positions);
  embed.sampled = At<int32_t>(places_.results);
  embed.frequencies = At<float>(places_.frequencies);
  embed.table = Tensor(layout_.embed.offset);
  embed.input_tokens = At<int32_t>(places_.input_tokens);
  embed.hidden_states = At<void>(places_.residual);
  embed.rotations = At<float2>(places_.rotations);
  embed.rows = step.counts.rows;
  embed.hidden = config_.hidden_size;
  embed.half_dim = config_.head_dim / 2;
  status = CudaStatus(Embed(embed, stream), "embed");
  if (status.ok() && step.counts.prefills > 0) {
    const bool hopper = options_.hopper && step.window_free;
    status = AttentionStatus(
        PlanPrefill(prefill, hopper, BuffersOfPrefill(pinned), prefill_plan_, stream),
        "plan of the prefill attention");
  }
  for (int32_t layer = 0; status.ok() && layer < config_.num_layers; ++layer) {
    status = gate(1 + layer);
    if (status.ok()) status = Layer(layer, step, prefill, stream);
  }
  return status.ok() ? Head(step, gate, stream) : status;
}

}  // namespace palimpsest::cuda
