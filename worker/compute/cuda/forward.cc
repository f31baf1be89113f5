#include "worker/compute/cuda/forward.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/cuda/driver.h"
#include "common/cuda/repeated_mapping.h"
#include "common/cuda/status.h"
#include "worker/compute/cpu/rope.h"
#include "worker/compute/cuda/kernels.h"
#include "worker/compute/cuda/sampler.h"
#include "worker/compute/cuda/special_kernels.h"

namespace palimpsest::cuda {
namespace {

// On the GPU that is current.
absl::StatusOr<RepeatedMapping> MapStandIn(const ModelConfig& config, const ModelMemory& memory) {
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver.ok()) return driver.status();
  int gpu = 0;
  absl::Status status = CudaStatus(cudaGetDevice(&gpu), "current GPU");
  if (!status.ok()) return status;
  return RepeatedMapping::Map(
      **driver, gpu,
      {reinterpret_cast<CUdeviceptr>(memory.workspace), memory.workspace_bytes, memory.slab_bytes},
      LargestMatrix(config));
}

}  // namespace

Forward::Forward(ForwardContext context) : context_(std::move(context)), attention_(context_) {}

absl::StatusOr<std::unique_ptr<Forward>> Forward::Create(
    const ModelConfig& config, const ImageLayout& layout, const ModelMemory& memory,
    std::byte* workspace, const StepPacker& packer, int32_t tiles, const ForwardOptions& options,
    cudaStream_t stream) {
  ForwardContext context;
  context.config = config;
  context.layout = layout;
  context.memory = memory;
  context.workspace = workspace;
  context.places = ForwardPlaces::For(config, options, tiles);
  context.options = options;
  std::unique_ptr<Forward> forward(new Forward(std::move(context)));
  SetLaunchOverlap(options.overlap_launches);
  auto stand_in = MapStandIn(config, memory);
  if (!stand_in.ok()) return stand_in.status();
  forward->context_.stand_in = reinterpret_cast<const std::byte*>(stand_in->base());
  absl::Status status = forward->Prepare(packer, stream);
  // Before the stand-in goes.
  status.Update(CudaStatus(cudaStreamSynchronize(stream), "run the kernels for the first time"));
  forward->context_.stand_in = nullptr;
  if (!status.ok()) return status;
  return forward;
}

absl::Status Forward::Prepare(const StepPacker& packer, cudaStream_t stream) {
  const ModelConfig& config = context_.config;
  absl::Status status = CudaStatus(PrepareSampler(config.vocab_size), "prepare the sampler");
  if (!status.ok()) return status;
  auto products = LayerProducts::Create(context_, stream);
  if (!products.ok()) return products.status();
  products_ = *std::move(products);
  if (config.latent.has_value()) {
    auto latent = LayerLatentAttention::Create(context_, products_->gemms());
    if (!latent.ok()) return latent.status();
    latent_attention_ = *std::move(latent);
  }
  status = attention_.Prepare(stream);
  return status.ok() ? WarmUp(packer, stream) : status;
}

// Kernels are loaded when they first run, which a capture does not allow. All rows are at token 0
// in the null block, and attention has no valid tile. Other ranks have no part in it.
absl::Status Forward::WarmUp(const StepPacker& packer, cudaStream_t stream) {
  const ForwardOptions& options = context_.options;
  const int32_t rows = std::min(options.max_fused_rows + 1, options.max_sequences);
  PackedStep step;
  step.counts = packer.CountsOfGraph(rows);
  step.layout = StagingLayout::For(step.counts);
  step.latent_grid = packer.LatentGridOf(step.counts);
  absl::Status status = CudaStatus(cudaMemsetAsync(staging(), 0, step.layout.ints + 4, stream),
                                   "clear the staging buffer");
  const std::vector<int64_t> slots(static_cast<size_t>(rows),
                                   options.null_block * (context_.memory.kv_block_bytes.count() /
                                                         KvElementBytes(context_.config.kv_dtype)));
  status.Update(
      CudaStatus(cudaMemcpyAsync(context_.Staged<int64_t>(step.layout.kv_slots), slots.data(),
                                 slots.size() * 8, cudaMemcpyHostToDevice, stream),
                 "fill the staging buffer"));
  Collective* const collective = std::exchange(context_.options.collective, nullptr);
  for (const DecodeKernel kernel : options.decode_kernels) {
    step.kernel = kernel;
    for (const auto& [count, split] : {std::pair(1, false), {rows, false}, {1, true}}) {
      step.counts.rows = step.counts.samples = step.counts.decodes = count;
      step.split = split;
      if (!status.ok()) break;
      ForwardHooks hooks;
      status = Enqueue(step, {}, nullptr, hooks, stream);
    }
  }
  context_.options.collective = collective;
  const WaitClock clock = wait_clock();
  status.Update(CudaStatus(BeginWait(clock.since, stream), "begin a wait"));
  status.Update(CudaStatus(EndWait(clock.since, clock.total, stream), "end a wait"));
  status.Update(CudaStatus(cudaMemsetAsync(clock.total, 0, sizeof(*clock.total), stream),
                           "clear the time waited"));
  return status;
}

absl::Status Forward::EmbedTokens(const PackedStep& step, cudaStream_t stream) {
  const ForwardPlaces& places = context_.places;
  EmbedArgs args;
  args.tokens = context_.Staged<int32_t>(step.layout.tokens);
  args.positions = context_.Staged<int32_t>(step.layout.positions);
  const ResultLayout results = ResultLayout::For(context_.options.max_sequences);
  args.sampled = context_.At<int32_t>(places.results + results.tokens);
  args.frequencies = context_.At<float>(places.frequencies);
  args.table = context_.Tensor(context_.layout.embed.offset);
  args.input_tokens = context_.At<int32_t>(places.input_tokens);
  args.hidden_states = context_.At<void>(places.residual);
  args.rotations = context_.At<float2>(places.rotations);
  args.rows = step.counts.rows;
  args.hidden = context_.config.hidden_size;
  args.half_dim = context_.config.rotary_dim() / 2;
  absl::Status status = CudaStatus(Embed(args, stream), "embed");
  return status.ok() ? FinishEmbeddings(step, stream) : status;
}

absl::Status Forward::FinishEmbeddings(const PackedStep& step, cudaStream_t stream) {
  const ModelConfig& config = context_.config;
  const bool learned = config.position_table_offset.has_value();
  const float magnitude = RopeMagnitude(config);
  if (config.embedding_scale == 1 && !learned && magnitude == 1) return absl::OkStatus();
  FinishEmbeddingArgs args;
  args.hidden_states = context_.At<void>(context_.places.residual);
  args.scale = config.embedding_scale;
  if (learned) args.table = context_.Tensor(context_.layout.positions.offset);
  args.positions = context_.Staged<int32_t>(step.layout.positions);
  args.table_offset = config.position_table_offset.value_or(0);
  args.rotations = context_.At<float2>(context_.places.rotations);
  args.magnitude = magnitude;
  args.rows = step.counts.rows;
  args.hidden = config.hidden_size;
  args.half_dim = magnitude == 1 ? 0 : config.rotary_dim() / 2;
  return CudaStatus(FinishEmbedding(args, stream), "finish the embeddings");
}

// Behind the last attention only rows that are sampled matter: they are moved together.
absl::StatusOr<ActivationRows> Forward::RowsAfterAttention(int32_t layer, const PackedStep& step,
                                                           cudaStream_t stream) {
  const ForwardPlaces& places = context_.places;
  if (layer + 1 < context_.config.num_layers || !Compacts(step)) {
    return ActivationRows{places.attention, places.residual, step.counts.rows};
  }
  if (step.counts.samples == 0) return ActivationRows{places.attention, places.residual, 0};
  const auto* indexes = context_.Staged<int32_t>(step.layout.sample_rows);
  absl::Status status = CudaStatus(
      GatherRows(context_.At<void>(places.attention), indexes, context_.At<void>(places.normalized),
                 step.counts.samples, context_.attention_size(), stream),
      "gather rows");
  status.Update(CudaStatus(
      GatherRows(context_.At<void>(places.residual), indexes, context_.At<void>(places.compact),
                 step.counts.samples, context_.config.hidden_size, stream),
      "gather rows"));
  if (!status.ok()) return status;
  return ActivationRows{places.normalized, places.compact, step.counts.samples};
}

absl::Status Forward::Layer(int32_t layer, const PackedStep& step, const PrefillShape& prefill,
                            ForwardHooks& hooks, cudaStream_t stream) {
  const LayerPlacement& at = context_.layout.layers[static_cast<size_t>(layer)];
  absl::Status status = products_->Qkv(at, step.counts.rows, stream);
  if (status.ok()) {
    status = latent_attention_ != nullptr ? latent_attention_->Run(layer, step, stream)
                                          : attention_.Run(layer, step, prefill, stream);
  }
  if (!status.ok()) return status;
  const auto rows = RowsAfterAttention(layer, step, stream);
  if (!rows.ok()) return rows.status();
  if (rows->count == 0) return absl::OkStatus();
  status = products_->Output(at, *rows, stream);
  if (!status.ok()) return status;
  // Sums over ranks take the next norm along. Not while parameters may be coming in.
  if (context_.options.collective == nullptr || step.counts.prefills > 0 ||
      layer + 1 == context_.config.num_layers) {
    return products_->Mlp(at, nullptr, *rows, stream);
  }
  const LayerProducts::NextLayer next = {&at + 1, !hooks.Rotates(2 + layer)};
  if (next.readable) status = hooks.BeginStage(2 + layer);
  return status.ok() ? products_->Mlp(at, &next, *rows, stream) : status;
}

absl::Status Forward::Head(const PackedStep& step, ForwardHooks& hooks, cudaStream_t stream) {
  const int32_t samples = step.counts.samples;
  if (samples == 0) return absl::OkStatus();
  absl::Status status = hooks.BeginStage(1 + context_.config.num_layers);
  if (!status.ok()) return status;
  const bool compact = Compacts(step);
  // Rows of decodes are in order of the samples.
  const bool in_order = compact || (step.counts.prefills == 0 && samples == step.counts.rows);
  status = products_->Head(compact ? context_.places.compact : context_.places.residual,
                           in_order ? nullptr : context_.Staged<int32_t>(step.layout.sample_rows),
                           samples, stream);
  if (status.ok()) status = hooks.BeginSampling();
  return status.ok() ? SampleTokens(step, stream) : status;
}

absl::Status Forward::SampleTokens(const PackedStep& step, cudaStream_t stream) {
  const ForwardPlaces& places = context_.places;
  const ResultLayout results = ResultLayout::For(context_.options.max_sequences);
  SampleArgs args;
  args.logits = context_.At<float>(places.logits);
  args.requests = context_.Staged<SamplingRow>(step.layout.sampling);
  args.history = context_.Staged<int32_t>(step.layout.ints);
  args.input_tokens = context_.At<int32_t>(places.input_tokens);
  args.tokens = context_.At<int32_t>(places.results + results.tokens);
  args.logprobs = context_.At<float>(places.results + results.logprobs);
  args.top_tokens = context_.At<int32_t>(places.results + results.top_tokens);
  args.top_logprobs = context_.At<float>(places.results + results.top_logprobs);
  args.rows = step.counts.samples;
  args.vocabulary = context_.config.vocab_size;
  return CudaStatus(SampleRows(args, stream), "sample");
}

WaitClock Forward::wait_clock() const {
  const ResultLayout results = ResultLayout::For(context_.options.max_sequences);
  return {context_.At<uint64_t>(context_.places.waiting),
          context_.At<uint64_t>(context_.places.results + results.waited)};
}

absl::Status Forward::Enqueue(const PackedStep& step, const PrefillShape& prefill, void* pinned,
                              ForwardHooks& hooks, cudaStream_t stream) {
  absl::Status status = hooks.BeginStage(0);
  if (status.ok()) status = EmbedTokens(step, stream);
  if (status.ok() && step.counts.prefills > 0 && latent_attention_ == nullptr) {
    status = attention_.Plan(step, prefill, pinned, stream);
  }
  for (int32_t layer = 0; status.ok() && layer < context_.config.num_layers; ++layer) {
    status = hooks.BeginStage(1 + layer);
    if (status.ok()) status = Layer(layer, step, prefill, hooks, stream);
    if (status.ok()) status = hooks.EndStage(1 + layer);
  }
  return status.ok() ? Head(step, hooks, stream) : status;
}

}  // namespace palimpsest::cuda
