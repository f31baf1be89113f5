#include "worker/compute/cuda/layer_attention.h"

#include <algorithm>
#include <cstddef>
#include <numeric>
#include <vector>

#include "common/cuda/status.h"
#include "worker/compute/cpu/rope.h"
#include "worker/compute/cuda/head_sample.h"
#include "worker/compute/cuda/kernels.h"
#include "worker/compute/cuda/whole_prefill.h"
#include "worker/core/far_keys.h"

namespace palimpsest::cuda {

absl::Status LayerAttention::Prepare(cudaStream_t stream) {
  if (context_.options.fused_decode) {
    cache_.kv = context_.memory.kv;
    cache_.block_bytes = context_.memory.kv_block_bytes.count();
    cache_.blocks = context_.options.null_block + 1;
    cache_.layers = context_.config.num_layers;
    cache_.heads = context_.config.num_heads;
    cache_.kv_heads = context_.config.num_kv_heads;
    cache_.head_dim = context_.config.head_dim;
    cache_.block_tokens = context_.options.block_tokens;
    absl::Status status =
        CudaStatus(PrepareFusedDecode(cache_, context_.options.max_sequences, &cache_map_),
                   "prepare the decode attention");
    if (!status.ok()) return status;
  }
  return UploadConstants(stream);
}

absl::Status LayerAttention::UploadConstants(cudaStream_t stream) {
  const ForwardPlaces& places = context_.places;
  std::vector<float> frequencies = RopeFrequencies(context_.config);
  // Turning by 0 changes no bit.
  if (!context_.config.rotary()) frequencies.assign(context_.config.head_dim / 2, 0.0f);
  absl::Status status =
      CudaStatus(cudaMemcpyAsync(context_.At<void>(places.frequencies), frequencies.data(),
                                 frequencies.size() * 4, cudaMemcpyHostToDevice, stream),
                 "copy the rotary frequencies");
  std::vector<int32_t> counting(static_cast<size_t>(context_.options.max_sequences) + 1);
  std::iota(counting.begin(), counting.end(), 0);
  status.Update(CudaStatus(cudaMemcpyAsync(context_.At<void>(places.counting), counting.data(),
                                           counting.size() * 4, cudaMemcpyHostToDevice, stream),
                           "copy row numbers"));
  status.Update(CudaStatus(
      cudaMemsetAsync(context_.At<void>(places.zeros), 0, places.results - places.zeros, stream),
      "clear tile numbers and arrivals"));
  status.Update(CudaStatus(cudaStreamSynchronize(stream), "copy the constants"));
  return status;
}

int32_t LayerAttention::WindowOf(int32_t layer) const {
  const int32_t window = context_.config.WindowOf(layer);
  return window == INT32_MAX ? 0 : window;
}

// Each plan has half of the integers; what kernels keep as floats ends with them.
PrefillBuffers LayerAttention::BuffersOfPrefill(void* pinned, bool windowed) const {
  constexpr size_t kHalf = kPrefillIntBytes / 2;
  const size_t at = windowed ? kHalf : 0;
  PrefillBuffers buffers;
  if (pinned != nullptr) buffers.pinned = static_cast<std::byte*>(pinned) + at;
  buffers.ints = context_.At<void>(context_.places.prefill_ints + at);
  buffers.int_bytes = kHalf;
  buffers.floats = context_.At<void>(context_.places.prefill_floats);
  buffers.float_bytes = kPrefillFloatBytes;
  return buffers;
}

absl::Status LayerAttention::Plan(const PackedStep& step, const PrefillShape& prefill, void* pinned,
                                  cudaStream_t stream) {
  const ModelConfig& config = context_.config;
  int32_t window = 0;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    window = std::max(window, WindowOf(layer));
  }
  const bool wanted[] = {step.window_free || !config.layer_windows.empty(), !step.window_free};
  // The kernels for Hopper know neither windows nor soft caps, no heads of 256, and would want
  // queries in eight bits for keys in eight bits.
  const bool hopper = context_.options.hopper && config.attention_softcap == 0 &&
                      config.head_dim <= 128 && config.kv_dtype == KvDtype::kBf16;
  whole_prefill_ = wanted[false] && hopper && IsWholePrefill(prefill);
  for (const bool windowed : {false, true}) {
    if (!wanted[windowed]) continue;
    PrefillShape shape = prefill;
    shape.window = windowed ? window : 0;
    const PrefillBuffers buffers = BuffersOfPrefill(pinned, windowed);
    PrefillPlan& plan = prefill_plans_[windowed];
    absl::Status status =
        AttentionStatus(!windowed && whole_prefill_
                            ? PlanWholePrefill(shape, buffers, plan, stream)
                            : PlanPrefill(shape, hopper && !windowed, buffers, plan, stream),
                        "plan of the prefill attention");
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

PagedKv LayerAttention::KvOf(int32_t layer, const PackedStep& step) const {
  const ModelConfig& config = context_.config;
  const int32_t block_tokens = context_.options.block_tokens;
  const int64_t token_elements = int64_t{config.num_kv_heads} * config.head_dim;
  const int64_t part_bytes = block_tokens * token_elements * KvElementBytes(config.kv_dtype);
  PagedKv kv;
  kv.keys = context_.memory.kv + 2 * layer * part_bytes;
  kv.values = context_.memory.kv + (2 * layer + 1) * part_bytes;
  kv.e4m3 = config.kv_dtype == KvDtype::kFp8E4m3;
  kv.page_stride = context_.memory.kv_block_bytes.count() / KvElementBytes(config.kv_dtype);
  kv.block_tokens = block_tokens;
  kv.kv_heads = config.num_kv_heads;
  kv.head_dim = config.head_dim;
  kv.indices = context_.Staged<int32_t>(step.layout.ints);
  return kv;
}

absl::Status LayerAttention::RotateAndStore(int32_t layer, const PagedKv& kv,
                                            const PackedStep& step, cudaStream_t stream) {
  RopeAppendArgs args;
  args.qkv = context_.At<void>(context_.places.wide);
  args.rotations = context_.At<float2>(context_.places.rotations);
  args.kv_slots = context_.Staged<int64_t>(step.layout.kv_slots);
  args.keys = kv.keys;
  args.values = kv.values;
  args.e4m3 = kv.e4m3;
  args.rows = step.counts.rows;
  args.heads = context_.config.num_heads;
  args.kv_heads = context_.config.num_kv_heads;
  args.half_dim = context_.config.head_dim / 2;
  if (context_.config.qk_norm) {
    const LayerPlacement& at = context_.layout.layers[static_cast<size_t>(layer)];
    args.query_norm = context_.Tensor(at.q_norm.offset);
    args.key_norm = context_.Tensor(at.k_norm.offset);
    args.norm_epsilon = context_.config.rms_norm_eps;
    args.norm_offset = context_.config.norm_weight_offset;
  }
  args.keep_keys = step.counts.prefills > 0 && whole_prefill_;
  return CudaStatus(RopeAppend(args, stream), "rotate and store");
}

absl::Status LayerAttention::DecodeFused(int32_t layer, bool append, const Queries& queries,
                                         const PackedStep& step, cudaStream_t stream) {
  const StagingLayout& at = step.layout;
  const ForwardPlaces& places = context_.places;
  FusedDecode decode;
  decode.cache = &cache_;
  decode.map = &cache_map_;
  decode.layer = layer;
  decode.sequences = step.counts.decodes;
  decode.max_sequences = context_.options.max_sequences;
  decode.multiprocessors = context_.options.multiprocessors;
  decode.qkv = queries.query;
  if (append) decode.rotations = context_.At<float2>(places.rotations);
  decode.kv_slots = context_.Staged<int64_t>(at.kv_slots);
  decode.indices = context_.Staged<int32_t>(at.ints);
  decode.indptr = context_.Staged<int32_t>(at.decode_blocks);
  decode.last_block_len = context_.Staged<int32_t>(at.decode_last);
  decode.output = queries.output;
  decode.scale = queries.scale;
  decode.partials = context_.At<void>(places.fused_partials);
  decode.arrivals = context_.At<int32_t>(places.arrivals);
  decode.overlap = context_.options.overlap_launches;
  return CudaStatus(LaunchFusedDecode(decode, stream), "decode attention");
}

absl::Status LayerAttention::Decode(int32_t layer, PagedKv kv, const Queries& queries,
                                    const PackedStep& step, cudaStream_t stream) {
  const StagingLayout& at = step.layout;
  const ForwardPlaces& places = context_.places;
  kv.sequences = step.counts.decodes;
  kv.indptr = context_.Staged<int32_t>(at.decode_blocks);
  kv.last_block_len = context_.Staged<int32_t>(at.decode_last);
  DecodeWork work;
  work.tiles = step.split ? step.counts.decode_tiles : step.counts.decodes;
  work.tile_sequence = context_.Staged<int32_t>(at.tile_sequence);
  work.tile_chunk = context_.Staged<int32_t>(at.tile_chunk);
  work.first_tile = context_.Staged<int32_t>(at.first_tile);
  work.chunk_tokens = context_.Staged<int32_t>(at.chunk_tokens);
  work.valid_tiles = context_.Staged<bool>(at.valid_tiles);
  if (step.split) {
    work.partial_output = context_.At<void>(places.partial_output);
    work.partial_lse = context_.At<float>(places.partial_lse);
  }
  work.counting = context_.At<int32_t>(places.counting);
  work.zeros = context_.At<int32_t>(places.zeros);
  if (step.kernel == DecodeKernel::kMasked) work.window = WindowOf(layer);
  const bool overlap = context_.options.hopper && context_.options.overlap_launches;
  return AttentionStatus(DecodeAttention(step.kernel, queries, kv, work, overlap, stream),
                         "decode attention");
}

absl::Status LayerAttention::Prefill(int32_t layer, PagedKv kv, Queries queries,
                                     const PackedStep& step, const PrefillShape& prefill,
                                     cudaStream_t stream) {
  PrefillShape shape = prefill;
  shape.window = step.window_free ? 0 : WindowOf(layer);
  const bool windowed = shape.window > 0;
  kv.sequences = step.counts.prefills;
  kv.indptr = context_.Staged<int32_t>(step.layout.prefill_blocks);
  kv.last_block_len = context_.Staged<int32_t>(step.layout.prefill_last);
  const int64_t decodes = step.counts.decodes;
  queries.query = static_cast<uint16_t*>(queries.query) + decodes * context_.qkv_size();
  queries.output = static_cast<uint16_t*>(queries.output) + decodes * context_.attention_size();
  if (!windowed && whole_prefill_) {
    return AttentionStatus(RunWholePrefill(prefill_plans_[windowed], shape, queries,
                                           BuffersOfPrefill(nullptr, windowed), stream),
                           "prefill attention");
  }
  return AttentionStatus(RunPrefill(prefill_plans_[windowed], shape, queries, kv,
                                    context_.Staged<int32_t>(step.layout.prefill_rows),
                                    BuffersOfPrefill(nullptr, windowed), stream),
                         "prefill attention");
}

absl::Status LayerAttention::Run(int32_t layer, const PackedStep& step, const PrefillShape& prefill,
                                 cudaStream_t stream) {
  Queries queries;
  queries.query = context_.At<void>(context_.places.wide);
  queries.query_stride = context_.qkv_size();
  queries.output = context_.At<void>(context_.places.attention);
  queries.heads = context_.config.num_heads;
  queries.scale = context_.config.AttentionScale();
  queries.soft_cap = context_.config.attention_softcap;
  const bool fused = FusedDecodes(step);
  if (fused && step.counts.prefills == 0 && !context_.config.qk_norm) {
    return DecodeFused(layer, true, queries, step, stream);
  }
  const PagedKv kv = KvOf(layer, step);
  absl::Status status = RotateAndStore(layer, kv, step, stream);
  if (status.ok() && step.counts.decodes > 0) {
    status = fused ? DecodeFused(layer, false, queries, step, stream)
                   : Decode(layer, kv, queries, step, stream);
  }
  if (status.ok() && step.counts.prefills > 0) {
    status = Prefill(layer, kv, queries, step, prefill, stream);
  }
  if (status.ok() && step.sampled_chunk >= 0) {
    status = SampleHeads(layer, kv, queries, step, stream);
  }
  return status;
}

absl::Status LayerAttention::SampleHeads(int32_t layer, const PagedKv& kv, const Queries& queries,
                                         const PackedStep& step, cudaStream_t stream) {
  const ModelConfig& config = context_.config;
  const auto chunk = static_cast<size_t>(step.sampled_chunk);
  HeadSampleArgs args;
  args.query = static_cast<const uint16_t*>(queries.query) +
               int64_t{step.last_rows[chunk]} * queries.query_stride;
  args.keys = kv.keys;
  args.values = kv.values;
  args.e4m3 = kv.e4m3;
  args.page_stride = kv.page_stride;
  args.blocks = kv.indices + step.first_blocks[chunk];
  args.block_tokens = kv.block_tokens;
  args.tokens = step.sampled_tokens;
  args.far_begin = kFarKeyTile;
  args.far_end = FarKeysEnd(step.sampled_tokens - 1, context_.options.sampled_recent_tokens);
  args.kv_heads = kv.kv_heads;
  args.group = queries.heads / kv.kv_heads;
  args.head_dim = kv.head_dim;
  args.scale = queries.scale;
  args.soft_cap = queries.soft_cap;
  auto* results = context_.At<float>(context_.places.head_sample);
  args.shares = results + int64_t{layer} * kv.kv_heads;
  args.effects = args.shares + int64_t{config.num_layers} * kv.kv_heads;
  return CudaStatus(cuda::SampleHeads(args, stream), "sample heads");
}

}  // namespace palimpsest::cuda
