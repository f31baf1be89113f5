#include "worker/core/load_choice.h"

#include <algorithm>
#include <cmath>

#include "worker/core/attention_span.h"

namespace palimpsest {
namespace {

// A wait that takes so many times longer than expected is given up.
constexpr double kMostOverdue = 2;
constexpr double kLongestWait = 30;

// With so many blocks more, of which those that the window sees are copied.
double Saving(const LoadCosts& costs, const LoadOffer& offer, int32_t blocks, double wait) {
  const int32_t copied = offer.window == 0 ? blocks : std::min(blocks, offer.window);
  return ComputeSeconds(costs, offer.first, blocks * offer.block_tokens) -
         (copied + offer.queued) * costs.block_seconds - wait;
}

}  // namespace

double ComputeSeconds(const LoadCosts& costs, int32_t first, int32_t count) {
  return count * costs.token_seconds +
         TokensSeen(first, count, costs.window_tokens) * costs.position_seconds;
}

bool WorthAsking(const LoadCosts& costs, int32_t first, int32_t tokens) {
  const double compute = ComputeSeconds(costs, first, tokens);
  return compute == 0 || compute > costs.answer_seconds;
}

LoadChoice ChooseLoad(const LoadCosts& costs, const LoadOffer& offer) {
  if (ComputeSeconds(costs, offer.first, 1) == 0) return {.load = offer.ready};
  LoadChoice choice;
  int32_t blocks = offer.skipped + offer.ready;
  const double ready = offer.ready > 0 ? Saving(costs, offer, blocks, 0) : 0;
  if (ready > 0) choice.load = offer.ready;
  const double at_once = std::max(0.0, ready);
  double best = at_once;
  double wait = 0;
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
