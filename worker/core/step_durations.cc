#include "worker/core/step_durations.h"

#include <algorithm>

#include "worker/core/attention_span.h"
#include "worker/core/check.h"

namespace palimpsest {
namespace {

// Of the newest sample.
constexpr double kWeight = 1.0 / 32;
// Of the squares of tokens and positions, relative.
constexpr double kLeastSpread = 1e-3;

}  // namespace

// The first samples weigh as in a plain mean, so that no start value shows.
void StepDurations::Average::Add(double sample) {
  weight = weight * (1 - kWeight) + kWeight;
  value += (sample - value) * kWeight / weight;
}

void StepDurations::Submitted(const StepPlan& plan, absl::Time now) {
  Step step{.submitted = now};
  for (const SequenceChunk& chunk : plan.chunks) {
    step.prefill |= chunk.tokens.size() > 1 || chunk.sampling == nullptr;
    step.tokens += chunk.tokens.size();
    step.positions +=
        TokensSeen(chunk.first_position, static_cast<int32_t>(chunk.tokens.size()), window_);
  }
  steps_.push_back(step);
}

void StepDurations::Ended(const StepTimes& times, absl::Time now) {
  PALIMPSEST_CHECK(!steps_.empty());
  const Step step = steps_.front();
  steps_.pop_front();
  // A step that was submitted behind another began when that one ended.
  const absl::Duration whole = times.device > absl::ZeroDuration()
                                   ? times.device
                                   : now - std::max(step.submitted, last_end_);
  last_end_ = now;
  stall_ += times.rotation_stall;
  const absl::Duration busy = std::max(whole - times.rotation_stall, absl::ZeroDuration());
  const double seconds = absl::ToDoubleSeconds(busy);
  (step.prefill ? prefill_ : decode_).Add(seconds);
  if (step.prefill) AddPrefill(static_cast<double>(step.tokens), step.positions, seconds);
  share_.Add(step.prefill ? 1 : 0);
}

void StepDurations::AddPrefill(double tokens, double positions, double seconds) {
  prompt_token_.Add(seconds / tokens);
  const auto add = [](double& sum, double product) { sum = sum * (1 - kWeight) + product; };
  add(products_.nn, tokens * tokens);
  add(products_.np, tokens * positions);
  add(products_.pp, positions * positions);
  add(products_.nt, tokens * seconds);
  add(products_.pt, positions * seconds);
}

StepDurations::PrefillFit StepDurations::prefill_fit() const {
  const Products& p = products_;
  if (p.nn == 0) return {};
  const double determinant = p.nn * p.pp - p.np * p.np;
  // Of steps that are all alike the share of positions is not known.
  if (determinant > kLeastSpread * p.nn * p.pp) {
    const double token = (p.nt * p.pp - p.pt * p.np) / determinant;
    const double position = (p.pt * p.nn - p.nt * p.np) / determinant;
    if (token >= 0 && position >= 0) return {token, position};
    if (token < 0) return {0, p.pt / p.pp};
  }
  return {p.nt / p.nn, 0};
}

void StepDurations::Failed(absl::Time now) {
  PALIMPSEST_CHECK(!steps_.empty());
  steps_.pop_front();
  last_end_ = now;
}

}  // namespace palimpsest
