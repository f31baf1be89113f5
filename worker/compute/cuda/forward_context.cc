#include "worker/compute/cuda/forward_context.h"

#include <vector_types.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/cuda/status.h"
#include "worker/compute/cuda/fused_decode.h"
#include "worker/compute/cuda/sampler.h"

namespace palimpsest::cuda {

Bytes LargestMatrix(const ModelConfig& config) {
  const int64_t hidden =
      std::max<int64_t>(
          {config.vocab_size, int64_t{2} * config.intermediate_size, QkvSize(config)}) *
      config.hidden_size;
  int64_t of_heads = int64_t{config.value_dim()} * config.hidden_size;
  if (config.latent.has_value()) {
    const LatentAttention& latent = *config.latent;
    of_heads = std::max({of_heads, int64_t{latent.kv_lora_rank} * config.head_dim,
                         int64_t{latent.kv_lora_rank} * latent.v_head_dim,
                         int64_t{latent.q_lora_rank} * config.head_dim});
  }
  return Bytes(std::max(hidden, of_heads * config.num_heads) * 2);
}

int32_t QkvSize(const ModelConfig& config) {
  const int32_t queries = config.num_heads * config.head_dim;
  if (!config.latent.has_value()) return queries + 2 * config.num_kv_heads * config.head_dim;
  const LatentAttention& latent = *config.latent;
  return (latent.q_lora_rank > 0 ? latent.q_lora_rank : queries) + latent.cache_width();
}

absl::Status AttentionStatus(const AttentionError& error, const char* what) {
  if (error.message != nullptr) return absl::InternalError(absl::StrCat(what, ": ", error.message));
  return CudaStatus(error.code, what);
}

ResultLayout ResultLayout::For(int32_t samples) {
  const size_t column = static_cast<size_t>(samples) * 4;
  ResultLayout layout;
  layout.tokens = sizeof(uint64_t);
  layout.logprobs = layout.tokens + column;
  layout.top_tokens = layout.tokens + 2 * column;
  layout.top_logprobs = layout.tokens + (2 + kMaxTop) * column;
  layout.bytes = layout.tokens + (2 + 2 * kMaxTop) * column;
  return layout;
}

ForwardPlaces ForwardPlaces::For(const ModelConfig& config, const ForwardOptions& options,
                                 int32_t tiles) {
  const auto rows = static_cast<size_t>(options.max_rows);
  const auto samples = static_cast<size_t>(options.max_sequences);
  const auto heads = static_cast<size_t>(config.num_heads);
  const size_t attention = heads * config.value_dim();
  const auto qkv = static_cast<size_t>(QkvSize(config));
  const bool latent = config.latent.has_value();
  const size_t query_rank = latent ? config.latent->q_lora_rank : 0;
  const size_t queries = query_rank > 0 ? heads * config.head_dim : 0;
  const size_t rank = latent ? config.latent->kv_lora_rank : 0;
  size_t end = 0;
  const auto place = [&end](size_t bytes) {
    const size_t offset = end;
    end = (end + bytes + 255) / 256 * 256;
    return offset;
  };
  ForwardPlaces p = {};
  p.staging = place(options.staging_bytes);
  p.waiting = place(sizeof(uint64_t));
  p.input_tokens = place(rows * 4);
  p.rotations = place(rows * (config.rotary_dim() / 2) * sizeof(float2));
  p.frequencies = place(static_cast<size_t>(config.rotary_dim() / 2) * 4);
  p.counting = place((samples + 1) * 4);
  p.zeros = place(static_cast<size_t>(tiles) * 4);
  p.arrivals = place(samples * static_cast<size_t>(config.num_kv_heads) * 4);
  p.results = place(ResultLayout::For(options.max_sequences).bytes);
  // Shares, then effects.
  p.head_sample = place(latent ? 0
                               : static_cast<size_t>(config.num_layers) *
                                     static_cast<size_t>(config.num_kv_heads) * 2 * 4);
  const auto partial_rows = static_cast<size_t>(options.latent_partial_rows);
  p.partial_output = place(latent ? partial_rows * rank * 2 : tiles * attention * 2);
  p.partial_lse = place(latent ? partial_rows * 4 : tiles * heads * 4);
  p.fused_partials =
      place(latent ? 0 : FusedDecodePartialBytes(config.head_dim, options.multiprocessors));
  p.prefill_ints = place(latent ? 0 : kPrefillIntBytes);
  p.prefill_floats = place(latent ? 0 : kPrefillFloatBytes);
  p.gemm = place(kGemmWorkspaceBytes);
  p.residual = place(rows * config.hidden_size * 2);
  p.normalized =
      place(2 * std::max({rows * config.hidden_size, samples * attention, rows * query_rank}));
  const size_t absorbed = heads * rank;
  p.wide =
      place(rows * 2 *
            std::max(qkv + queries + absorbed + attention, size_t{3} * config.intermediate_size));
  p.queries = query_rank > 0 ? p.wide + rows * qkv * 2 : p.wide;
  p.absorbed = p.wide + rows * (qkv + queries) * 2;
  p.attention = p.absorbed + rows * absorbed * 2;
  p.activated = p.wide + rows * 2 * config.intermediate_size * 2;
  // Results of attention and MLP that are normed before they join the residual stream.
  p.branch = place(config.post_norms ? rows * config.hidden_size * 2 : 0);
  p.compact = place(samples * config.hidden_size * 2);
  p.sampled_hidden = place(samples * config.hidden_size * 2);
  p.logits = place(samples * config.vocab_size * 4);
  p.logit_parts =
      config.ranks > 1 ? place(samples * config.head_rows() * config.ranks * 4) : p.logits;
  p.end = end;
  return p;
}

}  // namespace palimpsest::cuda
