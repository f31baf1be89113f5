#include "tools/load/latency.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace palimpsest::load {
namespace {

constexpr Objective kObjective = {absl::Seconds(1), absl::Milliseconds(100)};

// Tokens at these milliseconds after `due`, which is at `due` milliseconds.
RequestRecord Record(int due, const std::vector<int>& tokens,
                     Outcome outcome = Outcome::kFinished) {
  RequestRecord record;
  record.due = record.sent = absl::Milliseconds(due);
  for (const int token : tokens) record.tokens.push_back(absl::Milliseconds(due + token));
  record.end = record.tokens.empty() ? record.due : record.tokens.back();
  record.outcome = outcome;
  return record;
}

TEST(Quantile, IsTheNearestRank) {
  EXPECT_EQ(Quantile({}, 0.5), 0);
  EXPECT_EQ(Quantile({7}, 0.01), 7);
  EXPECT_EQ(Quantile({1, 2, 3, 4}, 0.5), 2);
  EXPECT_EQ(Quantile({1, 2, 3, 4}, 0.51), 3);
  EXPECT_EQ(Quantile({1, 2, 3, 4}, 1), 4);
}

// Property: at least the share q of the values is at most the quantile, and of any smaller value
// that is not so.
TEST(Quantile, HoldsItsDefinitionForRandomValues) {
  std::minstd_rand random(11);
  for (int round = 0; round < 500; ++round) {
    std::vector<double> values(1 + random() % 200);
    for (double& value : values) value = static_cast<double>(random() % 50);
    std::sort(values.begin(), values.end());
    for (const double q : {0.01, 0.5, 0.9, 0.99, 1.0}) {
      const double quantile = Quantile(values, q);
      const double n = static_cast<double>(values.size());
      const auto up_to = std::upper_bound(values.begin(), values.end(), quantile) - values.begin();
      const auto below = std::lower_bound(values.begin(), values.end(), quantile) - values.begin();
      EXPECT_GE(static_cast<double>(up_to), q * n - 1e-6);
      EXPECT_LT(static_cast<double>(below), q * n - 1e-9);
    }
  }
}

TEST(IsGood, NeedsBothLimits) {
  EXPECT_TRUE(IsGood(Record(0, {1000, 1100, 1200}), kObjective));
  EXPECT_FALSE(IsGood(Record(0, {1001, 1100}), kObjective));
  EXPECT_FALSE(IsGood(Record(0, {10, 111}), kObjective));
  EXPECT_TRUE(IsGood(Record(0, {10}), kObjective));
}

TEST(IsGood, OneSlowTokenOfAHundredIsAllowed) {
  std::vector<int> tokens = {0};
  for (int i = 0; i < 100; ++i) tokens.push_back(tokens.back() + (i == 50 ? 500 : 10));
  EXPECT_TRUE(IsGood(Record(0, tokens), kObjective));
  tokens.push_back(tokens.back() + 500);
  EXPECT_FALSE(IsGood(Record(0, tokens), kObjective));
}

TEST(IsGood, OnlyFinishedRequestsAre) {
  EXPECT_FALSE(IsGood(Record(0, {10, 20}, Outcome::kUnfinished), kObjective));
  EXPECT_FALSE(IsGood(Record(0, {10, 20}, Outcome::kFailed), kObjective));
  EXPECT_FALSE(IsGood(Record(0, {}), kObjective));
}

TEST(Summarize, LeavesTheWarmUpOut) {
  // One from before it, whose last token comes behind it.
  std::vector<RequestRecord> records = {Record(500, {100, 600}), Record(1000, {300, 350}),
                                        Record(1500, {100, 900})};
  for (RequestRecord& record : records) {
    record.prompt_tokens = 100;
    record.cached_tokens = 30;
  }
  const LoadSummary summary =
      Summarize(records, kObjective, absl::Seconds(2), /*warm_up=*/absl::Seconds(1));
  EXPECT_EQ(summary.requests, 2);
  EXPECT_EQ(summary.prompt_tokens, 200);
  EXPECT_EQ(summary.cached_tokens, 60);
  EXPECT_DOUBLE_EQ(summary.ttft_p99, 0.3);
  EXPECT_DOUBLE_EQ(summary.output_tokens_per_second, 4);
  EXPECT_EQ(summary.digest, Summarize(records, kObjective, absl::Seconds(2)).digest);
}

TEST(Summarize, CountsFromTheScheduledTime) {
  RequestRecord late = Record(1000, {300, 350});
  late.sent = late.due + absl::Milliseconds(200);
  const LoadSummary summary = Summarize({late}, kObjective, absl::Seconds(2));
  EXPECT_DOUBLE_EQ(summary.ttft_p50, 0.3);
  EXPECT_DOUBLE_EQ(summary.tbt_p99, 0.05);
  EXPECT_DOUBLE_EQ(summary.late_max, 0.2);
  EXPECT_EQ(summary.good, 1);
  EXPECT_DOUBLE_EQ(summary.goodput, 0.5);
}

TEST(Summarize, AGivenUpRequestCountsWithWhatItWaited) {
  RequestRecord never = Record(1000, {}, Outcome::kUnfinished);
  never.end = absl::Seconds(9);
  RequestRecord stalled = Record(1000, {100, 200}, Outcome::kUnfinished);
  stalled.end = absl::Seconds(9);
  const LoadSummary summary = Summarize({never, stalled}, kObjective, absl::Seconds(5));
  EXPECT_EQ(summary.unfinished, 2);
  EXPECT_EQ(summary.good, 0);
  EXPECT_DOUBLE_EQ(summary.ttft_p99, 8);
  EXPECT_DOUBLE_EQ(summary.tbt_max, 7.8);
  EXPECT_DOUBLE_EQ(summary.makespan, 9);
}

TEST(Summarize, FailedRequestsStandBesideThePercentiles) {
  RequestRecord failed = Record(0, {}, Outcome::kFailed);
  const LoadSummary summary =
      Summarize({failed, Record(0, {500, 600})}, kObjective, absl::Seconds(1));
  EXPECT_EQ(summary.requests, 2);
  EXPECT_EQ(summary.failed, 1);
  EXPECT_DOUBLE_EQ(summary.ttft_p50, 0.5);
  EXPECT_DOUBLE_EQ(summary.goodput_share, 0.5);
}

TEST(Summarize, TokensBehindTheWindowAreNotItsThroughput) {
  const LoadSummary summary =
      Summarize({Record(0, {500, 1000, 1500, 2500})}, kObjective, absl::Seconds(1));
  EXPECT_EQ(summary.output_tokens, 4);
  EXPECT_DOUBLE_EQ(summary.output_tokens_per_second, 2);
}

TEST(Summarize, PreemptionsAreOfFinishedRequests) {
  RequestRecord preempted = Record(0, {1, 2}), unfinished = Record(0, {1}, Outcome::kUnfinished);
  preempted.preemptions = 3;
  const LoadSummary summary =
      Summarize({preempted, Record(0, {1, 2}), unfinished}, kObjective, absl::Seconds(1));
  EXPECT_EQ(summary.preempted, 1);
  EXPECT_DOUBLE_EQ(summary.preempted_share, 0.5);
}

TEST(Summarize, TheDigestTellsOutputsAndTheirOrder) {
  RequestRecord a = Record(0, {1}), b = Record(0, {1});
  a.digest = AddToDigest(kEmptyDigest, 1);
  b.digest = AddToDigest(kEmptyDigest, 2);
  const auto digest = [](const std::vector<RequestRecord>& records) {
    return Summarize(records, kObjective, absl::Seconds(1)).digest;
  };
  EXPECT_EQ(digest({a, b}), digest({a, b}));
  EXPECT_NE(digest({a, b}), digest({b, a}));
  EXPECT_NE(digest({a}), digest({a, a}));
}

TEST(Summarize, NothingIsZero) {
  const LoadSummary summary = Summarize({}, kObjective, absl::Seconds(1));
  EXPECT_EQ(summary.requests, 0);
  EXPECT_EQ(summary.goodput_share, 0);
  EXPECT_EQ(summary.ttft_p99, 0);
}

}  // namespace
}  // namespace palimpsest::load
