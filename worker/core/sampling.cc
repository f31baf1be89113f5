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

constexpr size_t kSumChunk = 1024;

// Sum of up to kSumChunk weights, in an order that vectorises.
double SumChunk(const float* weights, size_t size) {
  constexpr size_t kLanes = 8;
  std::array<double, kLanes> lanes = {};
  size_t i = 0;
  for (; i + kLanes <= size; i += kLanes) {
    for (size_t lane = 0; lane < kLanes; ++lane) lanes[lane] += weights[i + lane];
  }
  double sum = 0;
  for (double lane : lanes) sum += lane;
  for (; i < size; ++i) sum += weights[i];
  return sum;
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
  for (size_t i = 0; i < size; i += kSumChunk) {
    sum += SumChunk(out + i, std::min(kSumChunk, size - i));
  }
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

bool Limits(const SamplingParams& params, size_t vocabulary) {
  return params.top_k > 0 && static_cast<size_t>(params.top_k) < vocabulary;
}

// Cuts `candidates` down to the smallest set of the most likely ones that has `mass`. Only those
// whose weights lie between the same two powers of two as the last one kept are sorted.
void KeepNucleus(double mass, const std::vector<float>& weights,
                 std::vector<Candidate>& candidates) {
  const auto exponent = [&](const Candidate& candidate) {
    return std::bit_cast<uint32_t>(weights[candidate.second]) >> 23;
  };
  std::array<double, 256> mass_of_exponent = {};
  for (const Candidate& candidate : candidates) {
    mass_of_exponent[exponent(candidate)] += weights[candidate.second];
  }
  uint32_t last = mass_of_exponent.size() - 1;
  double sum = 0;
  while (last > 0 && sum + mass_of_exponent[last] < mass) sum += mass_of_exponent[last--];
  const auto border = std::partition(candidates.begin(), candidates.end(),
                                     [&](const Candidate& c) { return exponent(c) > last; });
  auto end = std::partition(border, candidates.end(),
                            [&](const Candidate& c) { return exponent(c) == last; });
  std::sort(border, end, Better);
  for (auto it = border; it != end; ++it) {
    sum += weights[it->second];
    if (sum >= mass) end = it + 1;
  }
  candidates.erase(end, candidates.end());
}

// Up to here a heap of the best beats partitioning all.
constexpr int32_t kFewCandidates = 1024;

// Leaves in `scratch.candidates` the tokens that top-k and top-p keep. `total`: sum of all weights.
void KeepMostLikely(const SamplingParams& params, double total, SamplingScratch& scratch) {
  auto& candidates = scratch.candidates;
  const auto& values = scratch.values;
  const auto& weights = scratch.weights;
  const size_t vocabulary = values.size();
  const bool limited = Limits(params, vocabulary);
  // Tokens below this weight cannot reach 1 - top_p together, so the nucleus does without them.
  const double negligible =
      limited ? 0 : (1.0 - params.top_p) * total / static_cast<double>(vocabulary);
  candidates.resize(vocabulary);
  size_t count = 0;
  for (size_t i = 0; i < vocabulary; ++i) {
    candidates[count] = {values[i], static_cast<TokenId>(i)};
    count += weights[i] >= negligible;  // no branch: nobody could predict it
  }
  candidates.resize(count);
  double mass = total;
  if (limited) {
    const auto end = candidates.begin() + params.top_k;
    if (params.top_k <= kFewCandidates) {
      std::partial_sort(candidates.begin(), end, candidates.end(), Better);
    } else {
      std::nth_element(candidates.begin(), end, candidates.end(), Better);
    }
    candidates.erase(end, candidates.end());
    mass = 0;
    for (const Candidate& candidate : candidates) mass += weights[candidate.second];
  }
  if (params.top_p < 1.0f) KeepNucleus(params.top_p * mass, weights, candidates);
}

// The token at which the running sum of all weights, in order of ids, passes `target`.
TokenId DrawFromAll(double target, const std::vector<float>& weights) {
  double sum = 0;
  TokenId chosen = 0;
  for (size_t chunk = 0; chunk < weights.size(); chunk += kSumChunk) {
    const size_t end = std::min(chunk + kSumChunk, weights.size());
    const double after = sum + SumChunk(weights.data() + chunk, end - chunk);
    const bool last = end == weights.size();
    if (after <= target && !last) {
      sum = after;
      continue;
    }
    for (size_t i = chunk; i < end; ++i) {
      if (weights[i] == 0) continue;
      chosen = static_cast<TokenId>(i);
      sum += weights[i];
      if (sum > target) return chosen;
    }
  }
  return chosen;
}

// The same over `candidates`, of which weights below `min_weight` do not count. Sorts them by id,
// so that a filter that drops nothing changes nothing.
TokenId DrawFromCandidates(double uniform, float min_weight, const std::vector<float>& weights,
                           std::vector<Candidate>& candidates) {
  std::sort(candidates.begin(), candidates.end(),
            [](const Candidate& a, const Candidate& b) { return a.second < b.second; });
  double mass = 0;
  for (const Candidate& candidate : candidates) {
    const float weight = weights[candidate.second];
    if (weight >= min_weight) mass += weight;
  }
  double sum = 0;
  TokenId chosen = 0;
  for (const Candidate& candidate : candidates) {
    const float weight = weights[candidate.second];
    if (weight < min_weight || weight == 0) continue;
    chosen = candidate.second;
    sum += weight;
    if (sum > uniform * mass) break;
  }
  return chosen;
}

TokenId Draw(const SamplingRequest& request, double total, SamplingScratch& scratch) {
  const SamplingParams& params = request.params;
  const double uniform = PhiloxUniform(params.seed, static_cast<uint64_t>(request.output_index));
  if (!Limits(params, scratch.weights.size()) && params.top_p >= 1.0f) {
    if (params.min_p == 0) {
      // Below the total even where the product rounds up to it.
      const double target = std::min(uniform * total, std::nextafter(total, 0.0));
      return DrawFromAll(target, scratch.weights);
    }
    scratch.candidates.clear();
    for (size_t i = 0; i < scratch.weights.size(); ++i) {
      if (scratch.weights[i] >= params.min_p) {
        scratch.candidates.emplace_back(scratch.values[i], static_cast<TokenId>(i));
      }
    }
  } else {
    KeepMostLikely(params, total, scratch);
  }
  return DrawFromCandidates(uniform, params.min_p, scratch.weights, scratch.candidates);
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
