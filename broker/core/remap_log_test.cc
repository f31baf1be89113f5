#include "broker/core/remap_log.h"

#include <set>
#include <string>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr TenantId kA(0);
constexpr TenantId kB(1);

RemapDecision Decision(TenantId requester, int second, RemapOutcome outcome, uint32_t slabs = 0) {
  RemapDecision decision;
  decision.at = absl::FromUnixSeconds(second);
  decision.requester = requester;
  decision.reason = MoveReason::kKvDemand;
  decision.wanted = 4;
  decision.planned = slabs;
  decision.candidates.push_back(
      {.tenant = kB, .rule = RemapRule::kInactiveParameters, .outcome = outcome, .slabs = slabs});
  return decision;
}

TEST(RemapLogTest, KeepsTheLastOnesAndCountsAll) {
  RemapLog log;
  const int many = 3 * static_cast<int>(RemapLog::kKept);
  for (int i = 0; i < many; ++i) log.Add(Decision(kA, i, RemapOutcome::kTaken, 2));
  EXPECT_EQ(log.decisions().size(), RemapLog::kKept);
  EXPECT_EQ(log.decisions().back().sequence, static_cast<uint64_t>(many));
  EXPECT_EQ(log.decisions().front().sequence, static_cast<uint64_t>(many) - RemapLog::kKept + 1);
  const RemapLog::Total& taken = log.total(RemapRule::kInactiveParameters, RemapOutcome::kTaken);
  EXPECT_EQ(taken.candidates, static_cast<uint64_t>(many));
  EXPECT_EQ(taken.slabs, 2u * static_cast<uint64_t>(many));
  EXPECT_EQ(log.total(RemapRule::kRotation, RemapOutcome::kTaken).candidates, 0u);
}

TEST(RemapLogTest, ADemandThatFindsNothingIsOneDecisionUntilSomethingChanges) {
  RemapLog log;
  log.Add(Decision(kA, 1, RemapOutcome::kActive));
  log.Add(Decision(kB, 2, RemapOutcome::kActive));
  log.Add(Decision(kA, 3, RemapOutcome::kActive));
  ASSERT_EQ(log.decisions().size(), 2u);
  EXPECT_EQ(log.decisions()[0].repeats, 1u);
  EXPECT_EQ(log.decisions()[0].at, absl::FromUnixSeconds(3));
  log.Add(Decision(kA, 4, RemapOutcome::kJustRestored));
  EXPECT_EQ(log.decisions().size(), 3u);
  // What was said before that is not the last word any more.
  log.Add(Decision(kA, 5, RemapOutcome::kActive));
  EXPECT_EQ(log.decisions().size(), 4u);
  EXPECT_EQ(log.total(RemapRule::kInactiveParameters, RemapOutcome::kActive).candidates, 3u);
}

TEST(RemapLogTest, WhatMovesSlabsIsNeverARepetition) {
  RemapLog log;
  log.Add(Decision(kA, 1, RemapOutcome::kTaken, 2));
  log.Add(Decision(kA, 2, RemapOutcome::kTaken, 2));
  EXPECT_EQ(log.decisions().size(), 2u);
}

TEST(RemapLogTest, NamesAreDifferent) {
  std::set<std::string> rules, outcomes;
  for (size_t i = 0; i < kRemapRules; ++i) {
    rules.insert(std::string(RemapRuleName(static_cast<RemapRule>(i))));
  }
  for (size_t i = 0; i < kRemapOutcomes; ++i) {
    outcomes.insert(std::string(RemapOutcomeName(static_cast<RemapOutcome>(i))));
  }
  EXPECT_EQ(rules.size(), kRemapRules);
  EXPECT_EQ(outcomes.size(), kRemapOutcomes);
  EXPECT_FALSE(rules.contains("invalid"));
  EXPECT_FALSE(outcomes.contains("invalid"));
}

}  // namespace
}  // namespace palimpsest
