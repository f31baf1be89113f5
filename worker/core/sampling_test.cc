#include "worker/core/sampling.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/core/philox.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;

constexpr float kInfinity = std::numeric_limits<float>::infinity();

std::vector<float> RandomLogits(int size, uint64_t seed, float spread = 3.0f) {
  std::mt19937_64 random(seed);
  std::normal_distribution<float> normal(0.0f, spread);
  std::vector<float> logits(size);
  for (float& logit : logits) logit = normal(random);
  return logits;
}

TokenId SampleOne(const std::vector<float>& logits, const SamplingParams& params, int64_t index = 0,
                  absl::Span<const TokenId> history = {}) {
  SamplingScratch scratch;
  return Sample(logits, {params, history, index}, scratch).token;
}

// Reference: the distribution after all filters, computed in double by the definition.
std::vector<double> Distribution(std::vector<float> logits, const SamplingParams& params,
                                 absl::Span<const TokenId> history = {}) {
  std::vector<bool> seen(logits.size());
  for (TokenId token : history) {
    if (seen[token]) continue;
    seen[token] = true;
    logits[token] = logits[token] > 0 ? logits[token] / params.repetition_penalty
                                      : logits[token] * params.repetition_penalty;
  }
  std::vector<TokenId> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](TokenId a, TokenId b) { return logits[a] > logits[b]; });
  std::vector<double> p(logits.size());
  for (size_t i = 0; i < p.size(); ++i) {
    p[i] = std::exp((static_cast<double>(logits[i]) - logits[order[0]]) / params.temperature);
  }
  const auto normalize = [&] {
    const double sum = std::accumulate(p.begin(), p.end(), 0.0);
    for (double& value : p) value /= sum;
  };
  normalize();
  if (params.top_k > 0) {
    for (size_t rank = params.top_k; rank < order.size(); ++rank) p[order[rank]] = 0;
    normalize();
  }
  double sum = 0;
  for (TokenId token : order) {
    if (sum >= params.top_p) p[token] = 0;
    sum += p[token];
  }
  normalize();
  const double best = *std::max_element(p.begin(), p.end());
  for (double& value : p) {
    if (value < params.min_p * best) value = 0;
  }
  normalize();
  return p;
}

// Pearson's statistic of draws against `expected`, in standard deviations from its mean.
double ChiSquareDeviation(const std::vector<double>& expected, const std::vector<int>& counts,
                          int draws) {
  double statistic = 0;
  int cells = 0;
  double rest_expected = 0;
  int rest_count = 0;
  const auto add = [&](double mean, int count) {
    statistic += (count - mean) * (count - mean) / mean;
    ++cells;
  };
  for (size_t i = 0; i < expected.size(); ++i) {
    if (expected[i] == 0) {
      EXPECT_EQ(counts[i], 0) << "token " << i << " should have been filtered out";
    } else if (expected[i] * draws >= 10) {
      add(expected[i] * draws, counts[i]);
    } else {
      rest_expected += expected[i] * draws;
      rest_count += counts[i];
    }
  }
  if (rest_expected >= 5) add(rest_expected, rest_count);
  const int freedom = std::max(1, cells - 1);
  return (statistic - freedom) / std::sqrt(2.0 * freedom);
}

void ExpectDistribution(const std::vector<float>& logits, SamplingParams params,
                        absl::Span<const TokenId> history = {}) {
  constexpr int kDraws = 20000;
  std::vector<int> counts(logits.size());
  SamplingScratch scratch;
  for (int i = 0; i < kDraws; ++i) {
    // Half of the draws walk along one stream, half across streams.
    params.seed = i % 2 ? 7 : 1000 + i;
    ++counts[Sample(logits, {params, history, i % 2 ? i : 0}, scratch).token];
  }
  EXPECT_LT(ChiSquareDeviation(Distribution(logits, params, history), counts, kDraws), 4.0);
}

TEST(Philox, KnownAnswers) {
  EXPECT_THAT(Philox4x32({0, 0, 0, 0}, 0),
              ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  EXPECT_THAT(Philox4x32({0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}, 0xffffffffffffffff),
              ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(Philox4x32({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, 0x299f31d0a4093822),
              ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

TEST(Sample, GreedyTakesSmallestIdAmongEquals) {
  SamplingParams params;
  params.temperature = 0;
  EXPECT_EQ(SampleOne({1, 5, 2, 5, 5}, params), 1);
  EXPECT_EQ(SampleOne({-kInfinity, -kInfinity}, params), 0);
  std::vector<float> wide(1003, -1.0f);
  wide[1001] = wide[1002] = 2;
  EXPECT_EQ(SampleOne(wide, params), 1001);
}

TEST(Sample, NanNeverWins) {
  SamplingParams params;
  const std::vector<float> logits = {std::nanf(""), 1, std::nanf(""), 0.5f};
  for (int i = 0; i < 200; ++i) {
    params.temperature = i % 3;
    const TokenId token = SampleOne(logits, params, i);
    EXPECT_TRUE(token == 1 || token == 3) << token;
  }
}

TEST(Sample, InfiniteLogitsAreCertain) {
  SamplingParams params;
  params.logprobs = 1;
  SamplingScratch scratch;
  for (int i = 0; i < 50; ++i) {
    const auto sampled =
        Sample(std::vector<float>{0, kInfinity, -kInfinity}, {params, {}, i}, scratch);
    EXPECT_EQ(sampled.token, 1);
    EXPECT_FLOAT_EQ(sampled.logprob, 0);
  }
}

TEST(Sample, TinyTemperatureIsGreedy) {
  SamplingParams params;
  params.temperature = std::numeric_limits<float>::denorm_min();
  for (int i = 0; i < 50; ++i) EXPECT_EQ(SampleOne({1, 1.001f, 0}, params, i), 1);
}

TEST(Sample, TopKOfOneIsGreedy) {
  SamplingParams params, greedy;
  params.top_k = 1;
  greedy.temperature = 0;
  for (int i = 0; i < 300; ++i) {
    const auto logits = RandomLogits(257, i);
    params.seed = i;
    EXPECT_EQ(SampleOne(logits, params), SampleOne(logits, greedy));
  }
}

TEST(Sample, FiltersThatDropNothingChangeNothing) {
  for (int i = 0; i < 300; ++i) {
    const auto logits = RandomLogits(500, i);
    SamplingParams plain;
    plain.seed = i;
    SamplingParams all = plain;
    all.top_k = 500;
    SamplingParams nucleus = plain;
    nucleus.top_p = std::nextafter(1.0f, 0.0f);
    EXPECT_EQ(SampleOne(logits, plain), SampleOne(logits, all));
    EXPECT_EQ(SampleOne(logits, plain), SampleOne(logits, nucleus));
  }
}

TEST(Sample, StricterFiltersKeepSubsets) {
  const auto logits = RandomLogits(60, 5);
  const auto support = [&](const SamplingParams& params) {
    std::vector<bool> seen(logits.size());
    SamplingScratch scratch;
    for (int i = 0; i < 3000; ++i) seen[Sample(logits, {params, {}, i}, scratch).token] = true;
    return seen;
  };
  const auto expect_nested = [](const std::vector<bool>& inner, const std::vector<double>& outer) {
    for (size_t i = 0; i < inner.size(); ++i) EXPECT_TRUE(!inner[i] || outer[i] > 0) << i;
  };
  for (int k : {2, 5, 20}) {
    SamplingParams narrow, wide;
    narrow.top_k = k;
    wide.top_k = k + 5;
    expect_nested(support(narrow), Distribution(logits, wide));
  }
  for (float p : {0.1f, 0.5f, 0.9f}) {
    SamplingParams narrow, wide;
    narrow.top_p = p;
    wide.top_p = p + 0.05f;
    expect_nested(support(narrow), Distribution(logits, wide));
    narrow = wide = SamplingParams();
    narrow.min_p = p;
    wide.min_p = p / 2;
    expect_nested(support(narrow), Distribution(logits, wide));
  }
}

TEST(Sample, LargeNucleusIsExact) {
  for (int round = 0; round < 12; ++round) {
    const auto logits = RandomLogits(3000, 40 + round, 0.5f + 0.5f * (round % 4));
    SamplingParams params;
    params.top_p = 0.2f + 0.15f * (round % 6);
    if (round % 3 == 0) params.top_k = 1500;
    const auto expected = Distribution(logits, params);
    SamplingScratch scratch;
    std::vector<bool> seen(logits.size());
    for (int i = 0; i < 4000; ++i) {
      const TokenId token = Sample(logits, {params, {}, i}, scratch).token;
      seen[token] = true;
      ASSERT_GT(expected[token], 0) << "token " << token << " is outside the nucleus";
    }
    // Most of the mass must have been reached.
    double reached = 0;
    for (size_t i = 0; i < seen.size(); ++i) reached += seen[i] ? expected[i] : 0;
    EXPECT_GT(reached, 0.5);
  }
}

TEST(Sample, MatchesDistribution) {
  const auto logits = RandomLogits(97, 11);
  ExpectDistribution(logits, {});
  for (float temperature : {0.3f, 0.8f, 2.5f}) {
    SamplingParams params;
    params.temperature = temperature;
    ExpectDistribution(logits, params);
    params.top_k = 12;
    ExpectDistribution(logits, params);
    params.top_p = 0.85f;
    ExpectDistribution(logits, params);
    params.top_k = 0;
    ExpectDistribution(logits, params);
    params.min_p = 0.07f;
    ExpectDistribution(logits, params);
  }
}

TEST(Sample, PenaltyAppliesOncePerDistinctToken) {
  const auto logits = RandomLogits(40, 3);
  std::vector<TokenId> history = {1, 2, 3, 3, 3, 17, 25, 25, 39};
  SamplingParams params;
  params.repetition_penalty = 1.7f;
  ExpectDistribution(logits, params, history);
  params.repetition_penalty = 0.6f;
  params.top_p = 0.9f;
  ExpectDistribution(logits, params, history);
}

TEST(Sample, StreamsAreIndependentOfScratchAndEachOther) {
  const auto logits = RandomLogits(1000, 9);
  SamplingParams params;
  params.seed = 42;
  std::vector<TokenId> alone;
  for (int i = 0; i < 100; ++i) alone.push_back(SampleOne(logits, params, i));
  SamplingScratch shared;
  SamplingParams other;
  other.top_k = 3;
  for (int i = 99; i >= 0; --i) {
    Sample(RandomLogits(77, i), {other, {}, i}, shared);
    EXPECT_EQ(Sample(logits, {params, {}, i}, shared).token, alone[i]);
  }
  params.seed = 43;
  int equal = 0;
  for (int i = 0; i < 100; ++i) equal += SampleOne(logits, params, i) == alone[i];
  EXPECT_LT(equal, 50);
}

TEST(Sample, LogprobsAreOfTheRawLogits) {
  for (int round = 0; round < 20; ++round) {
    const auto logits = RandomLogits(313, 100 + round, 6.0f);
    double sum = 0;
    for (float logit : logits) sum += std::exp(static_cast<double>(logit));
    SamplingParams params;
    params.logprobs = 5;
    params.temperature = 0.7f;
    params.top_k = 10;
    params.repetition_penalty = 1.3f;
    const std::vector<TokenId> history = {4, 5, 6};
    SamplingScratch scratch;
    const auto sampled = Sample(logits, {params, history, round}, scratch);
    EXPECT_NEAR(sampled.logprob, logits[sampled.token] - std::log(sum), 2e-6 * 20);
    ASSERT_EQ(sampled.top.size(), 5);
    auto sorted = logits;
    std::sort(sorted.rbegin(), sorted.rend());
    for (int i = 0; i < 5; ++i) {
      EXPECT_EQ(logits[sampled.top[i].first], sorted[i]);
      EXPECT_NEAR(sampled.top[i].second, sorted[i] - std::log(sum), 2e-6 * 20);
    }
  }
}

TEST(Sample, LogprobsOnlyOnRequestAndTopInOrderOfIds) {
  SamplingScratch scratch;
  EXPECT_TRUE(Sample(std::vector<float>{1, 1}, {}, scratch).top.empty());
  SamplingParams params;
  params.logprobs = 20;
  const auto sampled = Sample(std::vector<float>{1, 1, 1}, {params, {}, 0}, scratch);
  ASSERT_EQ(sampled.top.size(), 3);
  for (int i = 0; i < 3; ++i) {
    EXPECT_EQ(sampled.top[i].first, i);
    EXPECT_NEAR(sampled.top[i].second, -std::log(3.0), 1e-6);
  }
}

TEST(Sample, LogprobsOfImpossibleLogitsAreFinite) {
  SamplingParams params;
  params.logprobs = 0;
  SamplingScratch scratch;
  const auto sampled = Sample(std::vector<float>(8, -kInfinity), {params, {}, 0}, scratch);
  EXPECT_EQ(sampled.token, 0);
  EXPECT_TRUE(std::isfinite(sampled.logprob));
}

}  // namespace
}  // namespace palimpsest
