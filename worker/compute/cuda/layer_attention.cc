#include "worker/compute/cuda/layer_attention.h"

#include <cmath>
#include <numeric>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "worker/compute/cpu/rope.h"
#include "worker/compute/cuda/kernels.h"

namespace palimpsest::cuda {
namespace {

absl::Status AttentionStatus(const AttentionError& error, const char* what) {
  if (error.message != nullptr) return absl::InternalError(absl::StrCat(what, ": ", error.message));
  return CudaStatus(error.code, what);
}

}  // namespace

absl::Status LayerAttention::UploadConstants(cudaStream_t stream) {
  const ForwardPlaces& places = context_.places;
  const std::vector<float> frequencies = RopeFrequencies(context_.config);
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
      "clear tile numbers"));
  status.Update(CudaStatus(cudaStreamSynchronize(stream), "copy the constants"));
  return status;
}

PrefillBuffers LayerAttention::BuffersOfPrefill(void* pinned) const {
  return {pinned, context_.At<void>(context_.places.prefill_ints), kPrefillIntBytes,
          context_.At<void>(context_.places.prefill_floats), kPrefillFloatBytes};
}

absl::Status LayerAttention::Plan(const PackedStep& step, const PrefillShape& prefill, void* pinned,
                                  cudaStream_t stream) {
  const bool hopper = context_.options.hopper && step.window_free;
  return AttentionStatus(
      PlanPrefill(prefill, hopper, BuffersOfPrefill(pinned), prefill_plan_, stream),
      "plan of the prefill attention");
}

PagedKv LayerAttention::KvOf(int32_t layer, const PackedStep& step) const {
  const ModelConfig& config = context_.config;
  const int32_t block_tokens = context_.options.block_tokens;
  const int64_t token_elements = int64_t{config.num_kv_heads} * config.head_dim;
  auto* keys = reinterpret_cast<uint16_t*>(context_.memory.kv) +
               int64_t{2} * layer * block_tokens * token_elements;
  PagedKv kv;
  kv.keys = keys;
  kv.values = keys + block_tokens * token_elements;
  kv.page_stride = context_.memory.kv_block_bytes.count() / 2;
  kv.block_tokens = block_tokens;
  kv.kv_heads = config.num_kv_heads;
  kv.head_dim = config.head_dim;
  kv.indices = context_.Staged<int32_t>(step.layout.ints);
  return kv;
}

absl::Status LayerAttention::RotateAndStore(const PagedKv& kv, const PackedStep& step,
                                            cudaStream_t stream) {
  RopeAppendArgs args;
  args.qkv = context_.At<void>(context_.places.wide);
  args.rotations = context_.At<float2>(context_.places.rotations);
  args.kv_slots = context_.Staged<int64_t>(step.layout.kv_slots);
  args.keys = kv.keys;
  args.values = kv.values;
  args.rows = step.counts.rows;
  args.heads = context_.config.num_heads;
  args.kv_heads = context_.config.num_kv_heads;
  args.half_dim = context_.config.head_dim / 2;
  return CudaStatus(RopeAppend(args, stream), "rotate and store");
}

absl::Status LayerAttention::Decode(PagedKv kv, const Queries& queries, const PackedStep& step,
                                    cudaStream_t stream) {
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
  const DecodeKernel kernel =
      step.tensor_cores ? DecodeKernel::kTensorCores : DecodeKernel::kCudaCores;
  const bool overlap = context_.options.hopper && context_.options.overlap_launches;
  return AttentionStatus(DecodeAttention(kernel, queries, kv, work, overlap, stream),
                         "decode attention");
}

absl::Status LayerAttention::Prefill(PagedKv kv, Queries queries, const PackedStep& step,
                                     const PrefillShape& prefill, cudaStream_t stream) {
  kv.sequences = step.counts.prefills;
  kv.indptr = context_.Staged<int32_t>(step.layout.prefill_blocks);
  kv.last_block_len = context_.Staged<int32_t>(step.layout.prefill_last);
  const int64_t decodes = step.counts.decodes;
  queries.query = static_cast<uint16_t*>(queries.query) + decodes * context_.qkv_size();
  queries.output = static_cast<uint16_t*>(queries.output) + decodes * context_.attention_size();
  return AttentionStatus(RunPrefill(prefill_plan_, prefill, queries, kv,
                                    context_.Staged<int32_t>(step.layout.prefill_rows),
                                    BuffersOfPrefill(nullptr), stream),
                         "prefill attention");
}

absl::Status LayerAttention::Run(int32_t layer, const PackedStep& step, const PrefillShape& prefill,
                                 cudaStream_t stream) {
  const PagedKv kv = KvOf(layer, step);
  absl::Status status = RotateAndStore(kv, step, stream);
  Queries queries;
  queries.query = context_.At<void>(context_.places.wide);
  queries.query_stride = context_.qkv_size();
  queries.output = context_.At<void>(context_.places.attention);
  queries.heads = context_.config.num_heads;
  queries.scale = 1.0f / std::sqrt(static_cast<float>(context_.config.head_dim));
  if (status.ok() && step.counts.decodes > 0) status = Decode(kv, queries, step, stream);
  if (status.ok() && step.counts.prefills > 0) status = Prefill(kv, queries, step, prefill, stream);
  return status;
}

}  // namespace palimpsest::cuda
