#include "worker/core/sampling.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cassert>
#include <cmath>
#include <cstddef>
#include <limits>
#include <optional>

#include "worker/core/philox.h"

namespace palimpsest {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();

using Candidate = std::pair<float, TokenId>;

// Larger values first, smaller ids among equals: a total order, so that cuts are reproducible.
bool Better(const Candidate& a, const Candidate& b) {
  return a.first != b.first ? a.first > b.first : a.second < b.second;
}

float Sanitized(float logit) {
  if (std::isnan(logit)) return -kInfinity;
  return std::min(logit, kLargest);
}

// e^x for x <= 0 with a relative error below 3e-7; 0 below -87. Branch-free, so that loops over it
// are vectorised. x = n ln 2 + r with |r| <= ln 2 / 2, e^r by its Taylor polynomial.
inline float ExpOfNegative(float x) {
  const float clamped = x > -87.0f ? x : -87.0f;
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the rounded integer
  const float shifted = clamped * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.0f / 5040;
  p = p * r + 1.0f / 720;
  p = p * r + 1.0f / 120;
  p = p * r + 1.0f / 24;
  p = p * r + 1.0f / 6;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const auto exponent = (std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound)) << 23;
  const float result = std::bit_cast<float>(std::bit_cast<int32_t>(p) + exponent);
  return x > -87.0f ? result : 0.0f;
}

float Largest(absl::Span<const float> values) {
  constexpr size_t kLanes = 16;
  std::array<float, kLanes> lanes;
  lanes.fill(-kInfinity);
  size_t i = 0;
  for (; i + kLanes <= values.size(); i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) {
      const float value = values[i + lane];
      lanes[lane] = value > lanes[lane] ? value : lanes[lane];
    }
  }
  float largest = *std::max_element(lanes.begin(), lanes.end());
  for (; i < values.size(); ++i) largest = std::max(largest, values[i]);
  return largest;
}

// weights[i] = e^((values[i] - largest) / temperature). Returns their sum.
double Exponentiate(absl::Span<const float> values, float largest, float temperature,
                    std::vector<float>& weights) {
  weights.resize(values.size());
  float* const out = weights.data();
  const float* const in = values.data();
  const size_t size = values.size();
  for (size_t i = 0; i < size; ++i) out[i] = ExpOfNegative((in[i] - largest) / temperature);
  double sum = 0;
  for (size_t i = 0; i < size; ++i) sum += out[i];
  return sum;
}

void FillValues(absl::Span<const float> logits, const SamplingRequest& request,
                std::vector<float>& values) {
  values.resize(logits.size());
  std::transform(logits.begin(), logits.end(), values.begin(), Sanitized);
  const float penalty = request.params.repetition_penalty;
  if (penalty == 1.0f) return;
  for (TokenId token : request.history) {
    assert(token >= 0 && static_cast<size_t>(token) < logits.size());
    const float logit = Sanitized(logits[token]);
    values[token] = Sanitized(logit > 0 ? logit / penalty : logit * penalty);
  }
}

// Leaves in `scratch.candidates` the tokens that top-k and top-p keep, in order of value.
void KeepMostLikely(const SamplingParams& params, double total, SamplingScratch& scratch) {
  auto& candidates = scratch.candidates;
  const auto& values = scratch.values;
  const auto& weights = scratch.weights;
  const size_t vocabulary = values.size();
  const bool limited = params.top_k > 0 && static_cast<size_t>(params.top_k) < vocabulary;
  // Tokens below this weight cannot reach 1 - top_p together, so the nucleus does without them.
  const double negligible =
      limited ? 0 : (1.0 - params.top_p) * total / static_cast<double>(vocabulary);
  candidates.clear();
  for (size_t i = 0; i < vocabulary; ++i) {
    if (weights[i] >= negligible) candidates.emplace_back(values[i], static_cast<TokenId>(i));
  }
  if (limited) {
    const auto end = candidates.begin() + params.top_k;
    std::partial_sort(candidates.begin(), end, candidates.end(), Better);
    candidates.erase(end, candidates.end());
  } else {
    std::sort(candidates.begin(), candidates.end(), Better);
  }
  if (params.top_p >= 1.0f) return;
  double mass = 0;
  if (limited) {
    for (const Candidate& candidate : candidates) mass += weights[candidate.second];
  } else {
    mass = total;
  }
  double sum = 0;
  size_t kept = 0;
  while (kept < candidates.size()) {
    sum += weights[candidates[kept++].second];
    if (sum >= params.top_p * mass) break;
  }
  candidates.resize(kept);
}

// Draws from `scratch.weights`, restricted by the filters. Cumulates in order of ids whatever the
// filters are, so that a filter that drops nothing changes nothing.
TokenId Draw(const SamplingRequest& request, double total, SamplingScratch& scratch) {
  const SamplingParams& params = request.params;
  const auto& weights = scratch.weights;
  auto& candidates = scratch.candidates;
  const double uniform = PhiloxUniform(params.seed, static_cast<uint64_t>(request.output_index));
  const bool ranked = (params.top_k > 0 && static_cast<size_t>(params.top_k) < weights.size()) ||
                      params.top_p < 1.0f;
  if (ranked) {
    KeepMostLikely(params, total, scratch);
    std::sort(candidates.begin(), candidates.end(),
              [](const Candidate& a, const Candidate& b) { return a.second < b.second; });
  }
  const size_t count = ranked ? candidates.size() : weights.size();
  const auto token_at = [&](size_t i) {
    return ranked ? candidates[i].second : static_cast<TokenId>(i);
  };
  const auto weight_of = [&](TokenId token) {
    return weights[token] >= params.min_p ? weights[token] : 0.0f;
  };
  double mass = 0;
  for (size_t i = 0; i < count; ++i) mass += weight_of(token_at(i));
  const double target = uniform * mass;
  double sum = 0;
  TokenId chosen = token_at(0);
  for (size_t i = 0; i < count; ++i) {
    const TokenId token = token_at(i);
    const float weight = weight_of(token);
    if (weight == 0) continue;
    chosen = token;
    sum += weight;
    if (sum > target) break;
  }
  return chosen;
}

TokenId Choose(absl::Span<const float> logits, const SamplingRequest& request,
               SamplingScratch& scratch) {
  FillValues(logits, request, scratch.values);
  const auto& values = scratch.values;
  const float largest = Largest(values);
  if (request.params.temperature == 0 || largest == -kInfinity) {
    const auto first = std::find(values.begin(), values.end(), largest);
    return static_cast<TokenId>(first - values.begin());
  }
  const double total = Exponentiate(values, largest, request.params.temperature, scratch.weights);
  return Draw(request, total, scratch);
}

void FillLogprobs(absl::Span<const float> logits, int32_t alternatives, SamplingScratch& scratch,
                  SampledToken& result) {
  auto& values = scratch.values;
  values.resize(logits.size());
  std::transform(logits.begin(), logits.end(), values.begin(), Sanitized);
  const float largest = Largest(values);
  if (largest == -kInfinity) std::fill(values.begin(), values.end(), 0.0f);
  const float base = largest == -kInfinity ? 0.0f : largest;
  const double log_sum = std::log(Exponentiate(values, base, 1.0f, scratch.weights));
  const auto logprob = [&](float value) {
    return static_cast<float>(static_cast<double>(value) - base - log_sum);
  };
  result.logprob = logprob(values[result.token]);
  auto& candidates = scratch.candidates;
  candidates.clear();
  for (size_t i = 0; i < values.size(); ++i) {
    candidates.emplace_back(values[i], static_cast<TokenId>(i));
  }
  const size_t kept = std::min<size_t>(alternatives, candidates.size());
  std::partial_sort(candidates.begin(), candidates.begin() + kept, candidates.end(), Better);
  for (size_t i = 0; i < kept; ++i) {
    result.top.emplace_back(candidates[i].second, logprob(candidates[i].first));
  }
}

}  // namespace

SampledToken Sample(absl::Span<const float> logits, const SamplingRequest& request,
                    SamplingScratch& scratch) {
  assert(!logits.empty());
  SampledToken result;
  result.token = Choose(logits, request, scratch);
  if (request.params.logprobs >= 0) {
    FillLogprobs(logits, request.params.logprobs, scratch, result);
  }
  return result;
}

}  // namespace palimpsest
