#include "worker/compute/cuda/layer_products.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/cuda/status.h"
#include "worker/compute/cuda/kernels.h"
#include "worker/compute/cuda/skinny_gemm.h"
#include "worker/compute/cuda/special_kernels.h"

namespace palimpsest::cuda {
namespace {

// The fused products read all tokens once for every few outputs. With more outputs and rows than
// these the cache could not deliver them as fast as memory delivers weights: cuBLASLt is faster.
constexpr int32_t kWideOutputs = 8192;
constexpr int32_t kMaxFusedRowsOfWide = 16;
// Above the decode sizes.
constexpr int32_t kPrefillRows[] = {384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192};

// Rows of a piece, at least, and pieces, at most, in which products of many rows meet those of
// other ranks.
constexpr int32_t kPieceRows = 1000;
constexpr int32_t kMaxPieces = 8;

// The decode sizes for which there are no fused products.
std::vector<int32_t> DecodeSteps(const ForwardOptions& options, int32_t fused_rows) {
  std::vector<int32_t> steps;
  for (const int32_t rows : options.decode_rows) {
    if (rows > fused_rows) steps.push_back(rows);
  }
  if (steps.empty()) steps.push_back(options.decode_rows.back());
  return steps;
}

SkinnyActivation FusedActivation(Activation activation) {
  switch (activation) {
    case Activation::kGeluTanhGated:
      return SkinnyActivation::kGeluTanhAndMul;
    case Activation::kRelu:
      return SkinnyActivation::kRelu;
    case Activation::kSiluGated:
      break;
  }
  return SkinnyActivation::kSiluAndMul;
}

}  // namespace

std::vector<int32_t> RowSteps(const ForwardOptions& options, int32_t fused_rows) {
  std::vector<int32_t> steps = DecodeSteps(options, fused_rows);
  for (const int32_t rows : kPrefillRows) {
    if (rows > steps.back() && rows < options.max_rows) steps.push_back(rows);
  }
  if (steps.back() < options.max_rows) steps.push_back(options.max_rows);
  return steps;
}

absl::StatusOr<std::unique_ptr<LayerProducts>> LayerProducts::Create(const ForwardContext& context,
                                                                     cudaStream_t stream) {
  std::unique_ptr<LayerProducts> products(new LayerProducts(context));
  if (context.options.max_fused_rows > 0) {
    absl::Status status = CudaStatus(PrepareSkinnyGemm(), "prepare the fused products");
    if (!status.ok()) return status;
  }
  if (absl::Status status = products->MakeProducts(stream); !status.ok()) return status;
  return products;
}

int32_t LayerProducts::FusedRows(int32_t outputs) const {
  const int32_t most = context_.options.max_fused_rows;
  return outputs > kWideOutputs ? std::min(most, kMaxFusedRowsOfWide) : most;
}

absl::Status LayerProducts::MakeProducts(cudaStream_t stream) {
  const ForwardPlaces& places = context_.places;
  GemmLibrary::Options options;
  options.stream = stream;
  options.workspace = context_.At<void>(places.gemm);
  options.workspace_bytes = Bytes(kGemmWorkspaceBytes);
  options.scratch = context_.At<void>(places.residual);
  options.scratch_bytes = Bytes(static_cast<int64_t>(places.end - places.residual));
  options.weights = context_.stand_in;
  options.weights_bytes = LargestMatrix(context_.config);
  options.cache_file = context_.options.gemm_cache_file;
  auto library = GemmLibrary::Load(options);
  if (!library.ok()) return library.status();
  library_ = *std::move(library);
  const ModelConfig& c = context_.config;
  const int32_t up_rows = (c.gated() ? 2 : 1) * c.intermediate_size;
  // Branches that are normed join the residual stream later.
  const bool residual = context_.keeps_residual() && !c.post_norms;
  const int32_t query_rank = c.latent.has_value() ? c.latent->q_lora_rank : 0;
  const struct {
    std::unique_ptr<Gemm>& product;
    GemmShape shape;
  } wanted[] = {
      {qkv_, {context_.qkv_size(), c.hidden_size, c.qkv_bias, false, false}},
      {q_up_, {c.num_heads * c.head_dim, query_rank, false, false, false}},
      {o_, {c.hidden_size, context_.attention_size(), c.o_bias, residual, false}},
      {gate_up_, {up_rows, c.hidden_size, c.mlp_bias, false, false}},
      {down_, {c.hidden_size, c.intermediate_size, c.mlp_bias, residual, false}},
      {head_, {c.head_rows(), c.hidden_size, false, false, true}},
  };
  for (const auto& [product, shape] : wanted) {
    if (shape.inputs == 0) continue;
    const int32_t fused_rows = FusedRows(shape.outputs);
    // Logits are computed for sampled rows alone, of which there are not more than sequences.
    const std::vector<int32_t> steps = &product == &head_
                                           ? DecodeSteps(context_.options, fused_rows)
                                           : RowSteps(context_.options, fused_rows);
    auto made = Gemm::Create(*library_, shape, steps);
    if (!made.ok()) return made.status();
    product = *std::move(made);
  }
  return library_->StoreCache();
}

absl::Status LayerProducts::NormalizeRows(const Norm& norm, size_t input, const int32_t* indexes,
                                          int32_t count, size_t output, cudaStream_t stream,
                                          int32_t threads) {
  const ModelConfig& config = context_.config;
  if (plain_norms()) {
    RmsNormArgs args;
    args.input = context_.At<void>(input);
    args.weight = context_.Tensor(norm.weight.offset);
    args.row_indexes = indexes;
    args.output = context_.At<void>(output);
    args.rows = count;
    args.size = config.hidden_size;
    args.threads = threads;
    args.epsilon = config.rms_norm_eps;
    return CudaStatus(RmsNorm(args, stream), "RMS norm");
  }
  NormArgs args;
  args.form = config.norm == NormKind::kLayer ? NormForm::kLayer : NormForm::kRms;
  args.input = context_.At<void>(input);
  args.weight = context_.Tensor(norm.weight.offset);
  args.bias = context_.Tensor(norm.bias.offset);
  args.offset = config.norm_weight_offset;
  args.row_indexes = indexes;
  args.output = context_.At<void>(output);
  args.rows = count;
  args.size = config.hidden_size;
  args.epsilon = config.rms_norm_eps;
  return CudaStatus(Normalize(args, stream), "norm");
}

absl::Status LayerProducts::Multiply(Gemm& product, const MatrixPlacement& weights,
                                     const VectorPlacement& bias, size_t input, size_t output,
                                     int32_t rows, cudaStream_t stream) {
  GemmCall call;
  call.rows = rows;
  call.weights = context_.Tensor(weights.offset);
  call.bias = bias.size > 0 ? context_.Tensor(bias.offset) : nullptr;
  call.input = context_.At<void>(input);
  call.output = context_.At<void>(output);
  return product.Run(call, stream);
}

absl::Status LayerProducts::MultiplyFused(const Fusion& fusion, const Norm* norm,
                                          const MatrixPlacement& weights,
                                          const VectorPlacement& bias, size_t input, size_t output,
                                          int32_t rows, cudaStream_t stream) {
  const ModelConfig& config = context_.config;
  if (norm != nullptr && !plain_norms()) {
    absl::Status status =
        NormalizeRows(*norm, input, nullptr, rows, context_.places.normalized, stream);
    if (!status.ok()) return status;
    input = context_.places.normalized;
    norm = nullptr;
  }
  SkinnyGemm product;
  product.m = rows;
  product.n = fusion.activation && config.gated() ? weights.rows / 2 : weights.rows;
  product.k = weights.cols;
  product.x = context_.At<void>(input);
  product.x_stride = fusion.input_stride > 0 ? fusion.input_stride : weights.cols;
  product.w = context_.Tensor(weights.offset);
  product.y = context_.At<void>(output);
  product.y_stride = product.n;
  product.fp32_output = fusion.float_output;
  if (norm != nullptr) {
    product.norm_weight = context_.Tensor(norm->weight.offset);
    product.norm_epsilon = config.rms_norm_eps;
  }
  if (bias.size > 0) product.bias = context_.Tensor(bias.offset);
  if (fusion.activation) product.activation = FusedActivation(config.activation);
  if (fusion.residual && context_.keeps_residual()) {
    product.residual = context_.At<void>(output);
    product.residual_stride = product.n;
  }
  product.programmatic = context_.options.overlap_launches;
  return CudaStatus(LaunchSkinnyGemm(product, stream), "fused matrix product");
}

absl::Status LayerProducts::Qkv(const LayerPlacement& at, int32_t rows, cudaStream_t stream) {
  const ForwardPlaces& places = context_.places;
  const Norm norm = {at.attention_norm, at.attention_norm_bias};
  absl::Status status;
  if (Fused(at.qkv, rows)) {
    status =
        MultiplyFused({}, &norm, at.qkv, at.qkv_bias, places.residual, places.wide, rows, stream);
  } else {
    status = NormalizeNext(norm, places.residual, rows, stream);
    if (status.ok()) {
      status = Multiply(*qkv_, at.qkv, at.qkv_bias, places.normalized, places.wide, rows, stream);
    }
  }
  return status.ok() && at.q_up.rows > 0 ? QueriesOfLatent(at, rows, stream) : status;
}

absl::Status LayerProducts::QueriesOfLatent(const LayerPlacement& at, int32_t rows,
                                            cudaStream_t stream) {
  const ForwardPlaces& places = context_.places;
  if (Fused(at.q_up, rows)) {
    const Norm norm = {at.q_norm, {}};
    return MultiplyFused({.input_stride = context_.qkv_size()}, &norm, at.q_up, {}, places.wide,
                         places.queries, rows, stream);
  }
  RmsNormArgs args;
  args.input = context_.At<void>(places.wide);
  args.input_stride = context_.qkv_size();
  args.weight = context_.Tensor(at.q_norm.offset);
  args.output = context_.At<void>(places.normalized);
  args.rows = rows;
  args.size = at.q_norm.size;
  args.epsilon = context_.config.rms_norm_eps;
  absl::Status status = CudaStatus(RmsNorm(args, stream), "RMS norm");
  if (!status.ok()) return status;
  return Multiply(*q_up_, at.q_up, {}, places.normalized, places.queries, rows, stream);
}

absl::Status LayerProducts::NormalizeNext(const Norm& norm, size_t input, int32_t rows,
                                          cudaStream_t stream) {
  // Without ranks nothing is ever set, nor written here, where two threads may be.
  if (normalized_.has_value() && std::exchange(normalized_, std::nullopt) == norm.weight.offset) {
    return absl::OkStatus();
  }
  int32_t threads = 0;
  if (norm_left_) {
    norm_left_ = false;
    threads = kSummedNormThreads;
  }
  return NormalizeRows(norm, input, nullptr, rows, context_.places.normalized, stream, threads);
}

absl::Status LayerProducts::MultiplyAndAdd(Gemm& product, const BranchEnd& end, size_t input,
                                           size_t output, int32_t rows, cudaStream_t stream) {
  const bool normed = end.post_norm.size > 0;
  if (context_.options.collective != nullptr && rows >= 2 * kPieceRows) {
    return MultiplyInPieces(product, end, input, output, rows, stream);
  }
  absl::Status status = Fused(end.weights, rows)
                            ? MultiplyFused({.residual = !normed}, nullptr, end.weights, end.bias,
                                            input, output, rows, stream)
                            : Multiply(product, end.weights, end.bias, input, output, rows, stream);
  return status.ok() ? AddRanks(output, rows, normed ? nullptr : end.next, stream) : status;
}

absl::Status LayerProducts::MultiplyInPieces(Gemm& product, const BranchEnd& end, size_t input,
                                             size_t output, int32_t rows, cudaStream_t stream) {
  Collective& collective = *context_.options.collective;
  const size_t input_row = static_cast<size_t>(end.weights.cols) * sizeof(uint16_t);
  const size_t output_row = static_cast<size_t>(end.weights.rows) * sizeof(uint16_t);
  const int64_t pieces = std::min(rows / kPieceRows, kMaxPieces);
  absl::Status status;
  for (int64_t i = 0; status.ok() && i < pieces; ++i) {
    const auto first = static_cast<size_t>(rows * i / pieces);
    const auto count = static_cast<int32_t>(rows * (i + 1) / pieces) - static_cast<int32_t>(first);
    status = Multiply(product, end.weights, end.bias, input + first * input_row,
                      output + first * output_row, count, stream);
    if (!status.ok()) break;
    status = collective.AllReduceBeside(context_.At<void>(output + first * output_row),
                                        int64_t{count} * end.weights.rows, stream);
  }
  return status.ok() ? collective.Join(stream) : status;
}

absl::Status LayerProducts::MultiplyToResidual(Gemm& product, const BranchEnd& end, size_t input,
                                               const ActivationRows& rows, cudaStream_t stream) {
  const bool normed = end.post_norm.size > 0;
  const size_t output = normed ? context_.places.branch : rows.residual;
  absl::Status status = MultiplyAndAdd(product, end, input, output, rows.count, stream);
  if (!status.ok() || !normed) return status;
  NormArgs args;
  args.input = context_.At<void>(output);
  args.weight = context_.Tensor(end.post_norm.offset);
  args.offset = context_.config.norm_weight_offset;
  args.output = context_.At<void>(rows.residual);
  args.add = true;
  args.rows = rows.count;
  args.size = context_.config.hidden_size;
  args.epsilon = context_.config.rms_norm_eps;
  return CudaStatus(Normalize(args, stream), "norm behind a branch");
}

absl::Status LayerProducts::Output(const LayerPlacement& at, const ActivationRows& rows,
                                   cudaStream_t stream) {
  const Norm next = {at.mlp_norm, at.mlp_norm_bias};
  return MultiplyToResidual(*o_, {at.o, at.o_bias, at.post_attention_norm, &next}, rows.attention,
                            rows, stream);
}

absl::Status LayerProducts::Activate(int32_t rows, cudaStream_t stream) {
  const void* input = context_.At<void>(context_.places.wide);
  void* output = context_.At<void>(context_.places.activated);
  const int32_t size = context_.config.intermediate_size;
  switch (context_.config.activation) {
    case Activation::kGeluTanhGated:
      return CudaStatus(GeluMultiply(input, output, rows, size, stream), "GELU");
    case Activation::kRelu:
      return CudaStatus(Relu(input, output, rows, size, stream), "ReLU");
    case Activation::kSiluGated:
      break;
  }
  return CudaStatus(SiluMultiply(input, output, rows, size, stream), "SiLU");
}

absl::Status LayerProducts::Mlp(const LayerPlacement& at, const NextLayer* next,
                                const ActivationRows& rows, cudaStream_t stream) {
  const ForwardPlaces& places = context_.places;
  const Norm norm = {at.mlp_norm, at.mlp_norm_bias};
  absl::Status status;
  if (Fused(at.gate_up, rows.count)) {
    status = MultiplyFused({.activation = true}, &norm, at.gate_up, at.gate_up_bias, rows.residual,
                           places.activated, rows.count, stream);
  } else {
    status = NormalizeNext(norm, rows.residual, rows.count, stream);
    if (status.ok()) {
      status = Multiply(*gate_up_, at.gate_up, at.gate_up_bias, places.normalized, places.wide,
                        rows.count, stream);
    }
    if (status.ok()) status = Activate(rows.count, stream);
  }
  if (!status.ok()) return status;
  const LayerPlacement& following = next != nullptr ? *next->at : at;
  const Norm next_norm = {following.attention_norm, following.attention_norm_bias,
                          next != nullptr && next->readable};
  return MultiplyToResidual(
      *down_, {at.down, at.down_bias, at.post_mlp_norm, next != nullptr ? &next_norm : nullptr},
      places.activated, rows, stream);
}

absl::Status LayerProducts::OwnHead(size_t residual, const int32_t* indexes, int32_t count,
                                    cudaStream_t stream) {
  const ImageLayout& layout = context_.layout;
  const ForwardPlaces& places = context_.places;
  const Norm norm = {layout.final_norm, layout.final_norm_bias};
  if (Fused(layout.lm_head, count) && indexes == nullptr) {
    return MultiplyFused({.float_output = true}, &norm, layout.lm_head, {}, residual,
                         own_logits(count), count, stream);
  }
  absl::Status status =
      NormalizeRows(norm, residual, indexes, count, places.sampled_hidden, stream);
  if (!status.ok()) return status;
  return Multiply(*head_, layout.lm_head, {}, places.sampled_hidden, own_logits(count), count,
                  stream);
}

absl::Status LayerProducts::Head(size_t residual, const int32_t* indexes, int32_t count,
                                 cudaStream_t stream) {
  absl::Status status = OwnHead(residual, indexes, count, stream);
  if (status.ok()) status = JoinLogits(count, stream);
  const float cap = context_.config.logit_softcap;
  if (!status.ok() || cap == 0) return status;
  return CudaStatus(SoftCap(context_.At<float>(context_.places.logits),
                            int64_t{count} * context_.config.vocab_size, cap, stream),
                    "soft cap of logits");
}

absl::Status LayerProducts::AddRanks(size_t place, int32_t rows, const Norm* next,
                                     cudaStream_t stream) {
  Collective* const collective = context_.options.collective;
  if (collective == nullptr) return absl::OkStatus();
  void* const data = context_.At<void>(place);
  const int32_t size = context_.config.hidden_size;
  if (next == nullptr || rows <= context_.options.max_fused_rows || !plain_norms() ||
      !collective->JoinsNorm(rows, size)) {
    return collective->AllReduce(data, int64_t{rows} * size, stream);
  }
  if (!next->readable) {
    norm_left_ = true;
    return collective->AllReduce(data, int64_t{rows} * size, stream);
  }
  SummedNorm norm;
  norm.weight = context_.Tensor(next->weight.offset);
  norm.output = context_.At<void>(context_.places.normalized);
  norm.rows = rows;
  norm.size = size;
  norm.epsilon = context_.config.rms_norm_eps;
  normalized_ = next->weight.offset;
  return collective->AllReduceNorm(data, norm, stream);
}

size_t LayerProducts::own_logits(int32_t count) const {
  const Collective* const collective = context_.options.collective;
  if (collective == nullptr) return context_.places.logits;
  return context_.places.logit_parts + static_cast<size_t>(collective->rank()) * count *
                                           context_.config.head_rows() * sizeof(float);
}

absl::Status LayerProducts::JoinLogits(int32_t count, cudaStream_t stream) {
  Collective* const collective = context_.options.collective;
  if (collective == nullptr) return absl::OkStatus();
  return collective->AllGather(context_.At<float>(context_.places.logit_parts),
                               context_.At<float>(context_.places.logits), count,
                               context_.config.head_rows(), context_.config.vocab_size, stream);
}

}  // namespace palimpsest::cuda
