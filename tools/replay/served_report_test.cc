#include "tools/replay/served_report.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

namespace palimpsest::replay {
namespace {

using ::testing::DoubleEq;
using ::testing::HasSubstr;
using ::testing::Optional;

// Two requests of ten blocks of 10 tokens, of which the second is all in T0 of 20 blocks.
ReplayReport Expected(const std::string& tiers) {
  TraceBuilder builder(10);
  for (const double seconds : {0.0, 1.0}) {
    TraceRequest request;
    request.arrival = absl::Seconds(seconds);
    request.input_tokens = 100;
    EXPECT_TRUE(builder.Add(request, 0, {0, 1, 2, 3, 4, 5, 6, 7, 8, 9}).ok());
  }
  std::optional<TierCosts> costs;
  if (!tiers.empty()) costs = *ParseTierCosts(tiers, "tiers.yaml");
  auto report = MakeReplayReport({.file = "f", .format = "mooncake"}, builder.Build(), "lru",
                                 {.blocks = 20}, Bytes(1), costs);
  EXPECT_TRUE(report.ok()) << report.status();
  return *std::move(report);
}

constexpr char kTiers[] =
    "recompute: {per_token: 1ms}\n"
    "tiers: [{name: T0, blocks: 20}, {name: t1, blocks: 20, bytes_per_second: 100},"
    " {name: nvme, blocks: 20, bytes_per_second: 100}]\n";

load::RequestRecord Answered(uint32_t prompt, uint32_t cached, absl::Duration first) {
  load::RequestRecord record;
  record.tokens = {first};
  record.end = first;
  record.outcome = load::Outcome::kFinished;
  record.prompt_tokens = prompt;
  record.cached_tokens = cached;
  return record;
}

ServedReport Served() {
  ServedReport served{.kv_block_tokens = 4,
                      .tiers = {{.name = "dram", .hit_blocks = 5},
                                {.name = "nvme", .hit_blocks = 3},
                                {.name = "directory", .hit_blocks = 0}}};
  load::RequestRecord failed;
  failed.outcome = load::Outcome::kFailed;
  failed.prompt_tokens = 1000;
  failed.error = "UNAVAILABLE: gone";
  const std::vector<load::RequestRecord> records = {Answered(100, 0, absl::Seconds(1)),
                                                    Answered(100, 72, absl::Seconds(3)), failed};
  CountServed(records, absl::Seconds(5), served);
  return served;
}

TEST(ServedShares, WhatNoLowerTierGaveWasInT0) {
  const std::vector<ServedShare> shares = ServedShares(Expected(kTiers), Served());
  ASSERT_EQ(shares.size(), 4);
  EXPECT_EQ(shares[0].tier, "T0");
  EXPECT_DOUBLE_EQ(shares[0].served, (72 - 20 - 12) / 200.0);
  EXPECT_THAT(shares[0].expected, Optional(DoubleEq(0.5)));
  EXPECT_EQ(shares[1].tier, "T1 dram");
  EXPECT_DOUBLE_EQ(shares[1].served, 20 / 200.0);
  EXPECT_THAT(shares[1].expected, Optional(DoubleEq(0)));
  EXPECT_EQ(shares[2].tier, "T3 nvme");
  EXPECT_DOUBLE_EQ(shares[2].served, 12 / 200.0);
  EXPECT_THAT(shares[2].expected, Optional(DoubleEq(0))) << "by the broker's name";
  EXPECT_EQ(shares[3].tier, "T5 directory");
  EXPECT_EQ(shares[3].expected, std::nullopt);
}

TEST(ServedShares, WithoutTiersT0IsTheCache) {
  ServedReport served = Served();
  served.tiers.clear();
  const std::vector<ServedShare> shares = ServedShares(Expected(""), served);
  ASSERT_EQ(shares.size(), 1);
  EXPECT_DOUBLE_EQ(shares[0].served, 72 / 200.0);
  EXPECT_THAT(shares[0].expected, Optional(DoubleEq(0.5)));
}

TEST(ServedReport, TellsWhatCameAndWhatDidNot) {
  const nlohmann::json json = ServedJson(Expected(kTiers), Served());
  EXPECT_EQ(json["requests"], 3);
  EXPECT_EQ(json["finished"], 2);
  EXPECT_EQ(json["failed"], 1);
  EXPECT_EQ(json["error"], "UNAVAILABLE: gone");
  EXPECT_EQ(json["prompt_tokens"], 200);
  EXPECT_DOUBLE_EQ(json["hit_rate_tokens"], 72 / 200.0);
  EXPECT_DOUBLE_EQ(json["ttft_seconds"]["p50"], 1);
  EXPECT_DOUBLE_EQ(json["ttft_seconds"]["p99"], 3);
  EXPECT_EQ(json["by_tier"][3]["expected"], nullptr);
  const std::string table = ServedTable(Expected(kTiers), Served());
  EXPECT_THAT(table, HasSubstr("3 requests"));
  EXPECT_THAT(table, HasSubstr("36.00"));
  EXPECT_THAT(table, HasSubstr("UNAVAILABLE: gone"));
  EXPECT_THAT(table, HasSubstr("expected of an idle machine"));
}

}  // namespace
}  // namespace palimpsest::replay
