#include "worker/compute/cuda/forward_context.h"

#include <vector_types.h>

#include <algorithm>

#include "worker/compute/cuda/sampler.h"

namespace palimpsest::cuda {

ResultLayout ResultLayout::For(int32_t samples) {
  const size_t column = static_cast<size_t>(samples) * 4;
  ResultLayout layout;
  layout.logprobs = column;
  layout.top_tokens = 2 * column;
  layout.top_logprobs = (2 + kMaxTop) * column;
  layout.bytes = (2 + 2 * kMaxTop) * column;
  return layout;
}

ForwardPlaces ForwardPlaces::For(const ModelConfig& config, const ForwardOptions& options,
                                 int32_t tiles) {
  const auto rows = static_cast<size_t>(options.max_rows);
  const auto samples = static_cast<size_t>(options.max_sequences);
  const size_t attention = static_cast<size_t>(config.num_heads) * config.head_dim;
  const size_t qkv = attention + size_t{2} * config.num_kv_heads * config.head_dim;
  size_t end = 0;
  const auto place = [&end](size_t bytes) {
    const size_t offset = end;
    end = (end + bytes + 255) / 256 * 256;
    return offset;
  };
  ForwardPlaces p = {};
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
  p.wide = place(rows * 2 * std::max(qkv + attention, size_t{3} * config.intermediate_size));
  p.attention = p.wide + rows * qkv * 2;
  p.activated = p.wide + rows * 2 * config.intermediate_size * 2;
  // Results of attention and MLP that are normed before they join the residual stream.
  p.branch = place(config.post_norms ? rows * config.hidden_size * 2 : 0);
  p.compact = place(samples * config.hidden_size * 2);
  p.sampled_hidden = place(samples * config.hidden_size * 2);
  p.logits = place(samples * config.vocab_size * 4);
  p.logit_parts =
      config.ranks > 1 ? place(samples * config.head_rows() * config.ranks * 4) : p.logits;
  // Any matrix can be read from here while the parameters are not there.
  const size_t largest = static_cast<size_t>(config.hidden_size) * 2 *
                         std::max(config.vocab_size, 2 * config.intermediate_size);
  p.end = std::max(end, p.residual + largest);
  return p;
}

}  // namespace palimpsest::cuda
