#include "router/core/placement.h"

#include <tuple>

namespace palimpsest::router {

size_t LeastOutstanding::Choose(const PlacementRequest&,
                                absl::Span<const PlacementCandidate> candidates) const {
  const auto cost = [](const PlacementCandidate& c) {
    return std::make_tuple(c.outstanding - (c.had_last_turn ? kForgiven : 0), !c.had_last_turn,
                           c.load.waiting_sequences,
                           -(c.load.kv_blocks_free + c.load.kv_blocks_cached), c.last_chosen,
                           c.worker);
  };
  size_t best = 0;
  for (size_t i = 1; i < candidates.size(); ++i) {
    if (cost(candidates[i]) < cost(candidates[best])) best = i;
  }
  return best;
}

}  // namespace palimpsest::router
