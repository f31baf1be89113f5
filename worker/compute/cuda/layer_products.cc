#include "worker/compute/cuda/layer_products.h"

#include <utility>
#include <vector>

#include "common/cuda/status.h"
#include "worker/compute/cuda/kernels.h"
#include "worker/compute/cuda/skinny_gemm.h"

namespace palimpsest::cuda {
namespace {

// Above the decode sizes.
constexpr int32_t kPrefillRows[] = {384, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192};

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

absl::Status LayerProducts::MakeProducts(cudaStream_t stream) {
  const ForwardPlaces& places = context_.places;
  GemmLibrary::Options options;
  options.stream = stream;
  options.workspace = context_.At<void>(places.gemm);
  options.workspace_bytes = Bytes(kGemmWorkspaceBytes);
  options.scratch = context_.At<void>(places.residual);
  options.scratch_bytes = Bytes(static_cast<int64_t>(places.end - places.residual));
  options.cache_file = context_.options.gemm_cache_file;
  auto library = GemmLibrary::Load(options);
  if (!library.ok()) return library.status();
  library_ = *std::move(library);
  const std::vector<int32_t> steps = RowSteps(context_.options);
  const std::vector<int32_t> decode_steps = DecodeSteps(context_.options);
  const ModelConfig& c = context_.config;
  const bool residual = context_.keeps_residual();
  const struct {
    std::unique_ptr<Gemm>& product;
    GemmShape shape;
    const std::vector<int32_t>& steps;
  } wanted[] = {
      {qkv_, {context_.qkv_size(), c.hidden_size, c.qkv_bias, false, false}, steps},
      {o_, {c.hidden_size, context_.attention_size(), c.o_bias, residual, false}, steps},
      {gate_up_, {2 * c.intermediate_size, c.hidden_size, c.mlp_bias, false, false}, steps},
      {down_, {c.hidden_size, c.intermediate_size, c.mlp_bias, residual, false}, steps},
      {head_, {c.head_rows(), c.hidden_size, false, false, true}, decode_steps},
  };
  for (const auto& [product, shape, row_steps] : wanted) {
    auto made = Gemm::Create(*library_, shape, row_steps);
    if (!made.ok()) return made.status();
    product = *std::move(made);
  }
  return library_->StoreCache();
}

absl::Status LayerProducts::Normalize(const VectorPlacement& weight, size_t input,
                                      const int32_t* indexes, int32_t count, size_t output,
                                      cudaStream_t stream) {
  RmsNormArgs args;
  args.input = context_.At<void>(input);
  args.weight = context_.Tensor(weight.offset);
  args.row_indexes = indexes;
  args.output = context_.At<void>(output);
  args.rows = count;
  args.size = context_.config.hidden_size;
  args.epsilon = context_.config.rms_norm_eps;
  return CudaStatus(RmsNorm(args, stream), "RMS norm");
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

absl::Status LayerProducts::MultiplyFused(const Fusion& fusion, const MatrixPlacement& weights,
                                          const VectorPlacement& bias, size_t input, size_t output,
                                          int32_t rows, cudaStream_t stream) {
  SkinnyGemm product;
  product.m = rows;
  product.n = fusion.gated ? weights.rows / 2 : weights.rows;
  product.k = weights.cols;
  product.x = context_.At<void>(input);
  product.x_stride = weights.cols;
  product.w = context_.Tensor(weights.offset);
  product.y = context_.At<void>(output);
  product.y_stride = product.n;
  product.fp32_output = fusion.float_output;
  if (fusion.norm != nullptr) {
    product.norm_weight = context_.Tensor(fusion.norm->offset);
    product.norm_epsilon = context_.config.rms_norm_eps;
  }
  if (bias.size > 0) product.bias = context_.Tensor(bias.offset);
  if (fusion.gated) product.activation = SkinnyActivation::kSiluAndMul;
  if (fusion.residual && context_.keeps_residual()) {
    product.residual = context_.At<void>(output);
    product.residual_stride = product.n;
  }
  product.programmatic = context_.options.overlap_launches;
  return CudaStatus(LaunchSkinnyGemm(product, stream), "fused matrix product");
}

absl::Status LayerProducts::Qkv(const LayerPlacement& at, int32_t rows, cudaStream_t stream) {
  const ForwardPlaces& places = context_.places;
  if (Fused(rows)) {
    return MultiplyFused({.norm = &at.attention_norm}, at.qkv, at.qkv_bias, places.residual,
                         places.wide, rows, stream);
  }
  absl::Status status =
      Normalize(at.attention_norm, places.residual, nullptr, rows, places.normalized, stream);
  if (!status.ok()) return status;
  return Multiply(*qkv_, at.qkv, at.qkv_bias, places.normalized, places.wide, rows, stream);
}

absl::Status LayerProducts::OwnOutput(const LayerPlacement& at, const ActivationRows& rows,
                                      cudaStream_t stream) {
  if (Fused(rows.count)) {
    return MultiplyFused({.residual = true}, at.o, at.o_bias, rows.attention, rows.residual,
                         rows.count, stream);
  }
  return Multiply(*o_, at.o, at.o_bias, rows.attention, rows.residual, rows.count, stream);
}

absl::Status LayerProducts::Activate(int32_t rows, cudaStream_t stream) {
  return CudaStatus(SiluMultiply(context_.At<void>(context_.places.wide),
                                 context_.At<void>(context_.places.activated), rows,
                                 context_.config.intermediate_size, stream),
                    "SiLU");
}

absl::Status LayerProducts::OwnMlp(const LayerPlacement& at, const ActivationRows& rows,
                                   cudaStream_t stream) {
  const ForwardPlaces& places = context_.places;
  if (Fused(rows.count)) {
    absl::Status status =
        MultiplyFused({.norm = &at.mlp_norm, .gated = true}, at.gate_up, at.gate_up_bias,
                      rows.residual, places.activated, rows.count, stream);
    if (!status.ok()) return status;
    return MultiplyFused({.residual = true}, at.down, at.down_bias, places.activated, rows.residual,
                         rows.count, stream);
  }
  absl::Status status =
      Normalize(at.mlp_norm, rows.residual, nullptr, rows.count, places.normalized, stream);
  if (status.ok()) {
    status = Multiply(*gate_up_, at.gate_up, at.gate_up_bias, places.normalized, places.wide,
                      rows.count, stream);
  }
  if (status.ok()) status = Activate(rows.count, stream);
  if (!status.ok()) return status;
  return Multiply(*down_, at.down, at.down_bias, places.activated, rows.residual, rows.count,
                  stream);
}

absl::Status LayerProducts::OwnHead(size_t residual, const int32_t* indexes, int32_t count,
                                    cudaStream_t stream) {
  const ImageLayout& layout = context_.layout;
  const ForwardPlaces& places = context_.places;
  if (Fused(count) && indexes == nullptr) {
    return MultiplyFused({.norm = &layout.final_norm, .float_output = true}, layout.lm_head, {},
                         residual, own_logits(count), count, stream);
  }
  absl::Status status =
      Normalize(layout.final_norm, residual, indexes, count, places.sampled_hidden, stream);
  if (!status.ok()) return status;
  return Multiply(*head_, layout.lm_head, {}, places.sampled_hidden, own_logits(count), count,
                  stream);
}

absl::Status LayerProducts::Output(const LayerPlacement& at, const ActivationRows& rows,
                                   cudaStream_t stream) {
  absl::Status status = OwnOutput(at, rows, stream);
  return status.ok() ? AddRanks(rows, stream) : status;
}

absl::Status LayerProducts::Mlp(const LayerPlacement& at, const ActivationRows& rows,
                                cudaStream_t stream) {
  absl::Status status = OwnMlp(at, rows, stream);
  return status.ok() ? AddRanks(rows, stream) : status;
}

absl::Status LayerProducts::Head(size_t residual, const int32_t* indexes, int32_t count,
                                 cudaStream_t stream) {
  absl::Status status = OwnHead(residual, indexes, count, stream);
  return status.ok() ? JoinLogits(count, stream) : status;
}

absl::Status LayerProducts::AddRanks(const ActivationRows& rows, cudaStream_t stream) {
  Collective* const collective = context_.options.collective;
  if (collective == nullptr) return absl::OkStatus();
  return collective->AllReduce(context_.At<void>(rows.residual),
                               int64_t{rows.count} * context_.config.hidden_size, stream);
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
