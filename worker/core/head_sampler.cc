#include "worker/core/head_sampler.h"

#include <vector>

#include "worker/core/far_keys.h"

namespace palimpsest {

std::optional<int32_t> HeadSampler::Choose(const StepPlan& plan) {
  if (sampling_.every == 0 || ++steps_ % sampling_.every != 0) return std::nullopt;
  std::vector<int32_t> candidates;
  for (size_t c = 0; c < plan.chunks.size(); ++c) {
    const SequenceChunk& chunk = plan.chunks[c];
    const int32_t last = chunk.first_position + static_cast<int32_t>(chunk.tokens.size()) - 1;
    if (FarKeysEnd(last, sampling_.recent_tokens) > kFarKeyTile) {
      candidates.push_back(static_cast<int32_t>(c));
    }
  }
  if (candidates.empty()) return std::nullopt;
  return candidates[static_cast<size_t>(samples_++) % candidates.size()];
}

}  // namespace palimpsest
