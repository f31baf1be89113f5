// Tiers of a replay: what comes from where, what it costs, and what is fetched ahead.
#include "tools/replay/tiered_replay.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tools/replay/replay_report.h"

namespace palimpsest::replay {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBlockTokens = 10;

struct Turn {
  double time = 0;
  std::string path;  // a letter a block
  cache::Ending ending = cache::Ending::kUnknown;
};

Trace MakeTrace(const std::vector<Turn>& turns) {
  TraceBuilder builder(kBlockTokens);
  for (const Turn& turn : turns) {
    TraceRequest request;
    request.arrival = absl::Seconds(turn.time);
    request.input_tokens = static_cast<int64_t>(turn.path.size()) * kBlockTokens;
    request.ending = turn.ending;
    EXPECT_TRUE(
        builder.Add(request, 0, std::vector<uint64_t>(turn.path.begin(), turn.path.end())).ok());
  }
  return builder.Build();
}

// A block of 10 tokens of a byte each; a second to compute a token, from the lower tiers a tenth
// of a second and half a second a block.
constexpr char kTiers[] = R"(
first_token: 1s
recompute: {per_token: 1s}
tiers:
  - {name: T0, blocks: 3}
  - {name: T1, blocks: 3, bytes_per_second: 100}
  - {name: T3, blocks: 100, latency: 1s, bytes_per_second: 20, prefetch: 10}
)";

TierCosts Costs(const std::string& yaml = kTiers) {
  auto costs = ParseTierCosts(yaml, "tiers.yaml");
  EXPECT_TRUE(costs.ok()) << costs.status();
  return *std::move(costs);
}

TieredResult ReplayOf(const Trace& trace, const TierCosts& costs, absl::string_view policy = "lru",
                      Hints hints = Hints::kNone) {
  auto result = ReplayTiers(trace, **FindReplayPolicy(policy), {.hints = hints}, costs, Bytes(1));
  EXPECT_TRUE(result.ok()) << result.status();
  return *std::move(result);
}

TEST(TierCosts, ReadsYaml) {
  const TierCosts costs = Costs(
      "recompute: {per_token: 2ms, per_token_and_position: 1ms}\n"
      "tiers: [{name: A, blocks: 7}, {name: B, blocks: 5, latency: 3ms, bytes_per_second: 1e6}]\n");
  EXPECT_EQ(costs.blocks(), 12);
  EXPECT_EQ(costs.Recompute(10, 20), absl::Milliseconds(10 * 2 + 10 * 15));
  EXPECT_EQ(costs.tiers[0].Load(Bytes(1000)), absl::ZeroDuration());
  EXPECT_EQ(costs.tiers[1].Load(Bytes(1000)), absl::Milliseconds(4));
  EXPECT_EQ(costs.tiers[1].Store(Bytes(1000)), absl::Milliseconds(1));
}

TEST(TierCosts, SaysWhatIsWrong) {
  const auto none = ParseTierCosts("recompute: {per_token: 1ms}\n", "some.yaml");
  EXPECT_THAT(none.status().message(), HasSubstr("expected at least one tier"));
  const auto wrong = ParseTierCosts(
      "recompute: {per_token: -1s}\ntiers: [{name: A, blocks: 0}, {name: B, blocks: 1}]\n",
      "some.yaml");
  EXPECT_THAT(wrong.status().message(), HasSubstr("per_token"));
  EXPECT_THAT(wrong.status().message(), HasSubstr("blocks"));
  EXPECT_THAT(wrong.status().message(), HasSubstr("bytes_per_second"));
}

TEST(ReplayTiers, WhatATierEvictsComesBackFromTheOneBelow) {
  const Trace trace = MakeTrace({{0, "abc"}, {10, "xyz"}, {20, "uvw"}, {30, "abc"}});
  const TieredResult result = ReplayOf(trace, Costs());
  // T1 has had a, b, c, then gave them to T3 for x, y, z.
  EXPECT_EQ(result.tiers[0].hits, 0);
  EXPECT_EQ(result.tiers[1].hits, 0);
  EXPECT_EQ(result.tiers[2].hits, 3);
  EXPECT_EQ(result.tiers[1].stored, 9);
  EXPECT_EQ(result.tiers[2].stored, 6) << "a, b, c and x, y, z; u, v, w are in T1";
  EXPECT_EQ(result.loaded, (std::vector<int64_t>{0, 0, 3}));
  // One loads 30 bytes, and computes its last token.
  EXPECT_EQ(result.recomputed.p50, absl::Seconds(31));
  EXPECT_EQ(result.first_token.p50, absl::Seconds(31));
  EXPECT_EQ(result.saved, absl::Seconds(31 - (1 + 2.5 + 1)));
}

TEST(ReplayTiers, WhatATierHoldsIsKnownToThoseBelowHoweverShortTheHistory) {
  const Trace trace = MakeTrace({{0, "abc"}, {10, "xyz"}, {20, "uvw"}, {30, "abc"}});
  const auto result =
      ReplayTiers(trace, **FindReplayPolicy("lru"), {.history = 3}, Costs(), Bytes(1));
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->tiers[1].stored, 9);
  EXPECT_EQ(result->tiers[2].hits, 3);
}

TEST(ReplayTiers, ABlockThatATierHasIsNotStoredTwice) {
  const Trace trace = MakeTrace({{0, "abc"}, {10, "xyz"}, {20, "abc"}, {30, "xyz"}, {40, "abc"}});
  TierCosts costs = Costs();
  costs.tiers.erase(costs.tiers.begin() + 1);
  const TieredResult result = ReplayOf(trace, costs);
  EXPECT_EQ(result.tiers[1].stored, 6);
  EXPECT_EQ(result.tiers[1].hits, 9);
}

TEST(ReplayTiers, NeverSlowerThanComputing) {
  const Trace trace = MakeTrace({{0, "abc"}, {10, "xyz"}, {20, "abc"}});
  TierCosts costs = Costs();
  costs.tiers[1].bytes_per_second = 0.01;
  const TieredResult slow = ReplayOf(trace, costs);
  EXPECT_EQ(slow.tiers[1].hits, 3);
  EXPECT_EQ(slow.loaded[1], 0);
  EXPECT_EQ(slow.saved, absl::ZeroDuration());
  EXPECT_EQ(slow.first_token, slow.recomputed);
}

TEST(ReplayTiers, PrefetchesForExpectedTransitionsAreOfUse) {
  // A conversation whose tools take 60 s, between others that push it out of T0 and T1.
  std::vector<Turn> turns;
  for (int i = 0; i < 60; ++i) {
    turns.push_back({100.0 * i, "abc", cache::Ending::kToolCall});
    for (int j = 0; j < 4; ++j) {
      turns.push_back(
          {100.0 * i + 10 + j, std::string{static_cast<char>(1 + (i * 4 + j) % 90)} + "12"});
    }
    turns.push_back({100.0 * i + 60, "abc", cache::Ending::kEndOfTurn});
  }
  const Trace trace = MakeTrace(turns);
  const TieredResult with = ReplayOf(trace, Costs());
  TierCosts costs = Costs();
  costs.tiers[2].prefetch_bytes_per_second = 0;
  const TieredResult without = ReplayOf(trace, costs);
  EXPECT_EQ(without.all_prefetches, prefetch::PrefetchCounts{});
  const auto& transitions = with.prefetches[static_cast<size_t>(prefetch::Trigger::kTransition)];
  EXPECT_GT(transitions.used, 60);
  EXPECT_GT(transitions.Precision(), 0.8);
  EXPECT_GT(with.saved, without.saved);
  EXPECT_EQ(with.tiers[1].prefetched, with.all_prefetches.fetched);
}

TEST(ReplayTiers, AnnouncedRequestsFindTheirBlocksAbove) {
  const Trace trace = MakeTrace({{0, "abc"}, {10, "xyz"}, {20, "uvw"}, {100, "abc"}});
  TierCosts costs = Costs();
  costs.announce = absl::Seconds(4);
  const TieredResult result = ReplayOf(trace, costs);
  const auto& announced = result.prefetches[static_cast<size_t>(prefetch::Trigger::kAnnounced)];
  EXPECT_EQ(announced.used, 3) << "a second of latency and three of transfer";
  EXPECT_EQ(result.tiers[1].hits, 3);
  costs.announce = absl::Seconds(3);
  EXPECT_EQ(ReplayOf(trace, costs).tiers[1].hits, 2) << "the third would be late";
}

TEST(ReplayTiers, BlocksBehindThoseThatWereUsedAreFetched) {
  const Trace trace =
      MakeTrace({{0, "abcde"}, {10, "uvw"}, {20, "xyz"}, {30, "rst"}, {40, "ab"}, {50, "abcde"}});
  TierCosts costs = Costs();
  costs.tiers[0].blocks = costs.tiers[1].blocks = 5;
  const TieredResult result = ReplayOf(trace, costs);
  const auto& next = result.prefetches[static_cast<size_t>(prefetch::Trigger::kNextBlocks)];
  EXPECT_EQ(next.fetched, 5) << "a and b as well: what T1 keeps is whole paths";
  EXPECT_EQ(next.wasted, 0);
  EXPECT_EQ(result.tiers[1].hits, 3) << "c, d and e at last";
}

TEST(ReplayTiers, PredictedReusePlacesByWorth) {
  // Half of the conversations come back after a tool call, the others never.
  std::mt19937 random(4);
  std::vector<Turn> turns;
  for (int i = 0; i < 400; ++i) {
    const std::string path = {static_cast<char>(random() % 250), static_cast<char>(i % 250),
                              static_cast<char>(i / 250 + 1)};
    const bool returns = i % 2 == 0;
    turns.push_back(
        {10.0 * i, path, returns ? cache::Ending::kToolCall : cache::Ending::kEndOfTurn});
    if (returns) turns.push_back({10.0 * i + 200, path, cache::Ending::kEndOfTurn});
  }
  const Trace trace = MakeTrace(turns);
  TierCosts costs = Costs();
  costs.tiers[2].blocks = 60;
  const TieredResult result = ReplayOf(trace, costs, "predictive");
  EXPECT_LT(result.tiers[2].stored, ReplayOf(trace, costs, "lru").tiers[2].stored);
  EXPECT_GE(result.all.hit_blocks, ReplayOf(trace, costs, "lru").all.hit_blocks);
  EXPECT_EQ(result, ReplayOf(trace, costs, "predictive")) << "deterministic";
}

TEST(ReplayTiersProperty, TiersHaveNoMoreHitsThanTheInfiniteCacheAndTimesAddUp) {
  std::mt19937 random(8);
  std::vector<Turn> turns;
  for (int i = 0; i < 250; ++i) {
    std::string path;
    if (i > 0 && random() % 3 > 0) path = turns[random() % turns.size()].path.substr(0, 5);
    while (path.size() < 6 && (path.empty() || random() % 4 > 0)) {
      path += static_cast<char>('a' + random() % 9);
    }
    turns.push_back({i * 3.0, path, static_cast<cache::Ending>(random() % 3)});
  }
  const Trace trace = MakeTrace(turns);
  const ReplayResult infinite = Replay(trace, **FindReplayPolicy("infinite"), {.blocks = 1});
  TierCosts costs = Costs();
  costs.tiers[0].blocks = 8;
  costs.tiers[1].blocks = 20;
  costs.announce = absl::Seconds(2);
  for (const std::string& policy : ReplayPolicies()) {
    if (policy == "belady" || policy == "infinite") {
      EXPECT_FALSE(ReplayTiers(trace, **FindReplayPolicy(policy), {}, costs, Bytes(1)).ok());
      continue;
    }
    for (const Hints hints : {Hints::kNone, Hints::kLastTurnAndIdle}) {
      const TieredResult result = ReplayOf(trace, costs, policy, hints);
      EXPECT_LE(result.all.hit_blocks, infinite.all.hit_blocks);
      EXPECT_GE(result.saved, absl::ZeroDuration());
      EXPECT_LE(result.first_token.mean, result.recomputed.mean);
      int64_t hits = 0;
      for (size_t i = 0; i < result.tiers.size(); ++i) {
        const TierCounts& tier = result.tiers[i];
        hits += tier.hits;
        EXPECT_LE(result.loaded[i], tier.hits);
        EXPECT_LE(tier.wasted, tier.evicted);
        EXPECT_LE(tier.prefetched, tier.stored);
        EXPECT_LE(tier.stored - tier.evicted, static_cast<int64_t>(costs.tiers[i].blocks));
      }
      EXPECT_EQ(hits, result.all.hit_blocks);
      EXPECT_EQ(result, ReplayOf(trace, costs, policy, hints)) << policy;
    }
  }
}

TEST(HintsFromTheFuture, TellsWhoGoesOnAndWhen) {
  const Trace trace = MakeTrace({{0, "abcd"}, {5, "xyz"}, {8, "abcde"}, {9, "a"}});
  const auto idle = HintsFromTheFuture(trace, Hints::kLastTurnAndIdle);
  EXPECT_EQ(idle[0], (ClientHint{.expected_idle = absl::Seconds(8)}));
  EXPECT_EQ(idle[1], (ClientHint{.last_turn = true}));
  EXPECT_EQ(idle[2], (ClientHint{.last_turn = true})) << "a is used again, but not what follows";
  EXPECT_EQ(HintsFromTheFuture(trace, Hints::kLastTurn)[0], ClientHint{});
  EXPECT_EQ(HintsFromTheFuture(trace, Hints::kNone)[1], ClientHint{});
}

TEST(ReplayReport, HasTiersCalibrationAndPrefetches) {
  const Trace trace = MakeTrace({{0, "abc"}, {10, "xyz"}, {20, "uvw"}, {30, "abc"}});
  const TraceSource source{.file = "some.jsonl", .format = "mooncake", .starts_file = ""};
  const auto report =
      MakeReplayReport(source, trace, "predictive", {.blocks = 6}, Bytes(1), Costs());
  ASSERT_TRUE(report.ok()) << report.status();
  const nlohmann::json json = ReplayJson(*report);
  EXPECT_EQ(json["calibration"]["bins"].size(), reuse::Calibration::kBinEnds.size());
  EXPECT_GE(json["calibration"]["brier"].get<double>(), 0);
  const nlohmann::json& tiers = json["tiers"];
  EXPECT_EQ(tiers["by_tier"][2]["name"], "T3");
  EXPECT_EQ(tiers["lru"]["by_tier"][2]["hit_blocks"], 3);
  EXPECT_EQ(tiers["lru"]["bytes_moved"], 10 * (9 + 6 + 3));
  EXPECT_DOUBLE_EQ(tiers["recompute_ttft_seconds"]["p50"], 31);
  EXPECT_DOUBLE_EQ(tiers["lru"]["seconds_saved"], 26.5);
  EXPECT_EQ(tiers["prefetch"]["by_trigger"]["announced"]["fetched_blocks"], 0);
  EXPECT_THAT(ReplayTable(*report), HasSubstr("lru, first tier alone"));
  EXPECT_FALSE(MakeReplayReport(source, trace, "belady", {.blocks = 6}, Bytes(1), Costs()).ok());
}

}  // namespace
}  // namespace palimpsest::replay
