#include "worker/compute/cuda/layer_latent_attention.h"

#include <algorithm>
#include <utility>

#include "common/cuda/status.h"
#include "worker/compute/cuda/latent_attention.h"
#include "worker/compute/cuda/latent_plan.h"
#include "worker/compute/cuda/layer_products.h"

namespace palimpsest::cuda {

absl::StatusOr<LayerLatentAttention::Product> LayerLatentAttention::MakeProduct(
    GemmLibrary& library, const GemmShape& shape) const {
  Product product;
  if (HasHeadProduct(shape.outputs, shape.inputs)) {
    product.fused_rows = std::min(context_.options.max_fused_rows, kHeadProductRows);
  }
  auto gemm = Gemm::Create(library, shape, RowSteps(context_.options, product.fused_rows));
  if (!gemm.ok()) return gemm.status();
  product.gemm = *std::move(gemm);
  return product;
}

HeadProductArgs LayerLatentAttention::FusedArgs(const Product& product,
                                                const GemmCall& call) const {
  const GemmShape& shape = product.gemm->shape();
  HeadProductArgs args;
  args.weights = call.weights;
  args.input = call.input;
  args.input_stride = shape.input_stride;
  args.input_step = shape.input_step;
  args.output = call.output;
  args.output_stride = shape.output_stride;
  args.output_step = shape.output_step;
  args.rows = call.rows;
  args.heads = shape.batch;
  args.outputs = shape.outputs;
  args.inputs = shape.inputs;
  return args;
}

GemmCall LayerLatentAttention::CallOf(const MatrixPlacement& weights, size_t input, size_t output,
                                      int32_t rows) const {
  GemmCall call;
  call.rows = rows;
  call.weights = context_.Tensor(weights.offset);
  call.input = context_.At<void>(input);
  call.output = context_.At<void>(output);
  return call;
}

absl::StatusOr<std::unique_ptr<LayerLatentAttention>> LayerLatentAttention::Create(
    const ForwardContext& context, GemmLibrary& library) {
  const ModelConfig& config = context.config;
  const LatentAttention& latent = *config.latent;
  std::unique_ptr<LayerLatentAttention> attention(new LayerLatentAttention(context));
  GemmShape absorb;
  absorb.outputs = latent.kv_lora_rank;
  absorb.inputs = latent.qk_nope_head_dim;
  absorb.input_stride = context.query_stride();
  absorb.output_stride = int64_t{config.num_heads} * latent.kv_lora_rank;
  absorb.batch = config.num_heads;
  absorb.input_step = config.head_dim;
  absorb.output_step = latent.kv_lora_rank;
  auto k_up = attention->MakeProduct(library, absorb);
  if (!k_up.ok()) return k_up.status();
  attention->k_up_ = *std::move(k_up);
  GemmShape expand;
  expand.outputs = latent.v_head_dim;
  expand.inputs = latent.kv_lora_rank;
  expand.input_stride = absorb.output_stride;
  expand.output_stride = context.attention_size();
  expand.batch = config.num_heads;
  expand.input_step = latent.kv_lora_rank;
  expand.output_step = latent.v_head_dim;
  auto v_up = attention->MakeProduct(library, expand);
  if (!v_up.ok()) return v_up.status();
  attention->v_up_ = *std::move(v_up);
  if (absl::Status status = library.StoreCache(); !status.ok()) return status;
  return attention;
}

std::byte* LayerLatentAttention::LatentsOf(int32_t layer) const {
  return context_.memory.kv +
         context_.config.KvTokenBytes().count() * layer * context_.options.block_tokens;
}

LatentAppendArgs LayerLatentAttention::AppendArgs(int32_t layer, const PackedStep& step) const {
  const ModelConfig& config = context_.config;
  const LatentAttention& latent = *config.latent;
  const LayerPlacement& at = context_.layout.layers[static_cast<size_t>(layer)];
  LatentAppendArgs args;
  args.down =
      context_.At<uint16_t>(context_.places.wide) + context_.qkv_size() - latent.cache_width();
  args.down_stride = context_.qkv_size();
  args.norm_weight = context_.Tensor(at.k_norm.offset);
  args.epsilon = config.rms_norm_eps;
  args.queries = context_.At<void>(context_.places.queries);
  args.query_stride = context_.query_stride();
  args.rotations = context_.At<float2>(context_.places.rotations);
  args.kv_slots = context_.Staged<int64_t>(step.layout.kv_slots);
  args.latents = LatentsOf(layer);
  args.rows = step.counts.rows;
  args.heads = config.num_heads;
  args.head_dim = config.head_dim;
  args.rank = latent.kv_lora_rank;
  args.half_dim = latent.qk_rope_head_dim / 2;
  return args;
}

absl::Status LayerLatentAttention::AbsorbAndStore(int32_t layer, const PackedStep& step,
                                                  cudaStream_t stream) {
  const MatrixPlacement& k_up = context_.layout.layers[static_cast<size_t>(layer)].k_up;
  const int32_t rows = step.counts.rows;
  const LatentAppendArgs append = AppendArgs(layer, step);
  const GemmCall call = CallOf(k_up, context_.places.queries, context_.places.absorbed, rows);
  if (rows <= k_up_.fused_rows) {
    return CudaStatus(HeadProduct(FusedArgs(k_up_, call), append, stream), "absorb and store");
  }
  absl::Status status = CudaStatus(LatentAppend(append, stream), "rotate and store");
  return status.ok() ? k_up_.gemm->Run(call, stream) : status;
}

absl::Status LayerLatentAttention::Expand(int32_t layer, int32_t rows, cudaStream_t stream) {
  const MatrixPlacement& v_up = context_.layout.layers[static_cast<size_t>(layer)].v_up;
  const GemmCall call = CallOf(v_up, context_.places.absorbed, context_.places.attention, rows);
  if (rows > v_up_.fused_rows) return v_up_.gemm->Run(call, stream);
  return CudaStatus(HeadProduct(FusedArgs(v_up_, call), {}, stream), "expand values");
}

absl::Status LayerLatentAttention::Attend(int32_t layer, const PackedStep& step,
                                          cudaStream_t stream) {
  const ModelConfig& config = context_.config;
  const ForwardPlaces& places = context_.places;
  LatentAttentionArgs args;
  args.absorbed = context_.At<void>(places.absorbed);
  args.rotary = context_.At<uint16_t>(places.queries) + config.latent->qk_nope_head_dim;
  args.rotary_row = static_cast<uint32_t>(context_.query_stride());
  args.rotary_head = static_cast<uint32_t>(config.head_dim);
  args.heads = config.num_heads;
  args.scale = config.AttentionScale();
  args.latents = LatentsOf(layer);
  args.block_stride = static_cast<uint32_t>(context_.memory.kv_block_bytes.count() / 2);
  args.block_tokens = context_.options.block_tokens;
  args.block_ids = context_.Staged<int32_t>(step.layout.ints);
  const auto plan = LatentPlanLayout::For(step.counts.latent_pieces, step.counts.latent_blocks);
  const std::pair<int32_t*&, size_t> arrays[] = {
      {args.first_row, plan.first_row},
      {args.first_block, plan.first_block},
      {args.rows, plan.rows},
      {args.tokens, plan.tokens},
      {args.tile, plan.tile},
      {args.begin, plan.begin},
      {args.end, plan.end},
      {args.partial, plan.partial},
      {args.team_pieces, plan.team_pieces},
      {args.merge_begin, plan.merge_begin},
      {args.merge_end, plan.merge_end},
      {args.merge_partial_begin, plan.merge_partial_begin},
      {args.merge_partial_end, plan.merge_partial_end},
      {args.merge_stride, plan.merge_stride},
  };
  for (const auto& [pointer, offset] : arrays) {
    pointer = context_.Staged<int32_t>(step.layout.latent_plan + offset);
  }
  args.team_blocks = step.latent_grid.team_blocks;
  args.teams = step.latent_grid.teams;
  args.partial_output = context_.At<void>(places.partial_output);
  args.partial_lse = context_.At<float>(places.partial_lse);
  return AttentionStatus(context_.options.hopper ? LatentAttentionHopper(args, stream)
                                                 : LatentAttentionAmpere(args, stream),
                         "latent attention");
}

absl::Status LayerLatentAttention::Run(int32_t layer, const PackedStep& step, cudaStream_t stream) {
  absl::Status status = AbsorbAndStore(layer, step, stream);
  if (status.ok()) status = Attend(layer, step, stream);
  return status.ok() ? Expand(layer, step.counts.rows, stream) : status;
}

}  // namespace palimpsest::cuda
