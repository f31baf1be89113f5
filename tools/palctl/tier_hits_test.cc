#include "tools/palctl/tier_hits.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace palimpsest::palctl {
namespace {

using Json = nlohmann::ordered_json;
using ::testing::HasSubstr;

// Of two tenants; numbers grow with `factor`.
NodeCounters Counters(uint64_t factor, bool tiers = true) {
  NodeCounters counters;
  for (const uint64_t prompt : {600, 1000}) {
    v1::WorkerStats& stats = counters.workers.emplace_back();
    stats.set_prompt_tokens_total(factor * prompt);
    stats.set_cached_tokens_total(factor * 160);
  }
  if (!tiers) return counters;
  for (const char* name : {"dram", "nvme"}) {
    v1::TierMemory& tier = *counters.broker.add_tiers();
    tier.set_tier(name);
    tier.set_used_bytes(factor * 7);
    for (int i = 0; i < 2; ++i) {
      v1::TenantTier& tenant = *tier.add_tenants();
      tenant.set_hit_blocks(factor * (tier.tier() == "dram" ? 20 : 5));
      tenant.set_promoted_blocks(factor);
      tenant.add_refusals()->set_blocks(factor);
      tenant.add_refusals()->set_blocks(2 * factor);
    }
  }
  return counters;
}

TEST(TierHitsJson, SharesAreOfThePromptsBetweenTheTwoMoments) {
  const Json hits = TierHitsJson(Counters(1), Counters(3));
  EXPECT_EQ(hits["prompt_tokens"], 3200);
  EXPECT_DOUBLE_EQ(hits["t0"], 0.2);
  ASSERT_EQ(hits["tiers"].size(), 2u);
  EXPECT_EQ(hits["tiers"][0]["tier"], "dram");
  EXPECT_DOUBLE_EQ(hits["tiers"][0]["hits"], 0.4);
  EXPECT_DOUBLE_EQ(hits["tiers"][1]["hits"], 0.1);
  EXPECT_EQ(hits["tiers"][1]["promoted"], 4);
  EXPECT_EQ(hits["tiers"][1]["refused"], 12);
  EXPECT_EQ(hits["tiers"][1]["used_bytes"], 21);
  EXPECT_DOUBLE_EQ(hits["computed"], 0.3);
}

TEST(TierHitsJson, WithoutTiersOrRequestsThereIsNothingToShare) {
  const Json none = TierHitsJson(Counters(2, false), Counters(2, false));
  EXPECT_EQ(none["prompt_tokens"], 0);
  EXPECT_EQ(none["t0"], 0);
  EXPECT_TRUE(none["tiers"].empty());
  // Tiers that were not there before.
  EXPECT_EQ(TierHitsJson(Counters(0, false), Counters(1))["tiers"][0]["hit"], 40);
}

TEST(TierHitsTable, HasAColumnForEachTierOfAnyPoint) {
  const Json with = {{"run", "r"},
                     {"system", "all"},
                     {"rate", 2},
                     {"preemptions", 9},
                     {"hits", TierHitsJson(Counters(0), Counters(1))}};
  const Json without = {{"run", "r"},
                        {"system", "t0"},
                        {"rate", 2},
                        {"hits", TierHitsJson(Counters(0, false), Counters(1, false))}};
  const std::string table = TierHitsTable(Json::array({without, with}));
  EXPECT_THAT(table, HasSubstr("DRAM"));
  EXPECT_THAT(table, HasSubstr("40.0%"));
  EXPECT_THAT(table, HasSubstr("80.0%"));
  EXPECT_EQ(TierHitsTable(Json::array({{{"run", "r"}}})), "");
}

}  // namespace
}  // namespace palimpsest::palctl
