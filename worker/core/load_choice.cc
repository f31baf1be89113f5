#include "worker/core/load_choice.h"

#include <algorithm>
#include <cmath>

namespace palimpsest {
namespace {

// A wait that takes so many times longer than expected is given up.
constexpr double kMostOverdue = 2;
constexpr double kLongestWait = 30;

double Saving(const LoadCosts& costs, const LoadOffer& offer, int32_t blocks, double wait) {
  return ComputeSeconds(costs, offer.first, blocks * offer.block_tokens) -
         (blocks + offer.queued) * costs.block_seconds - wait;
}

}  // namespace

double ComputeSeconds(const LoadCosts& costs, int32_t first, int32_t count) {
  const double mean_position = first + (count - 1) / 2.0;
  return count * (costs.token_seconds + mean_position * costs.position_seconds);
}

bool WorthAsking(const LoadCosts& costs, int32_t first, int32_t tokens) {
  const double compute = ComputeSeconds(costs, first, tokens);
  return compute == 0 || compute > costs.answer_seconds;
}

LoadChoice ChooseLoad(const LoadCosts& costs, const LoadOffer& offer) {
  if (ComputeSeconds(costs, offer.first, 1) == 0) return {.load = offer.ready};
  LoadChoice choice;
  const double ready = offer.ready > 0 ? Saving(costs, offer, offer.ready, 0) : 0;
  if (ready > 0) choice.load = offer.ready;
  const double at_once = std::max(0.0, ready);
  double best = at_once;
  double wait = 0;
  int32_t blocks = offer.ready;
  for (const LowerBlocks& lower : offer.lower) {
    blocks += lower.blocks;
    if (!std::isfinite(lower.expected_seconds)) break;
    wait = std::max(wait, lower.expected_seconds);
    // The store is asked once more.
    const double saving = Saving(costs, offer, blocks, wait + costs.answer_seconds);
    if (saving <= best) continue;
    best = saving;
    // With all of the saving spent on it, waiting would be as good as not to wait.
    const double seconds = std::min(
        {wait + saving - at_once, kMostOverdue * (wait + costs.answer_seconds), kLongestWait});
    choice.load = offer.ready;
    choice.patience = absl::Seconds(seconds);
  }
  return choice;
}

}  // namespace palimpsest
