#include "tools/palctl/remap_view.h"

#include <limits>

#include "gtest/gtest.h"

namespace palimpsest::palctl {
namespace {

v1::GetRemapLogResponse Log() {
  v1::GetRemapLogResponse log;
  v1::RemapDecision& decision = *log.add_decisions();
  decision.set_sequence(7);
  decision.set_decided_at(12.5);
  decision.set_repeats(2);
  decision.set_tenant("alpha");
  decision.set_reason("kv_demand");
  decision.set_wanted_slabs(9);
  decision.set_planned_slabs(8);
  v1::RemapCandidate& idle = *decision.add_candidates();
  idle.set_tenant("beta");
  idle.set_rule("inactive_parameters");
  idle.set_outcome("just_restored");
  idle.set_idle_seconds(std::numeric_limits<double>::infinity());
  idle.set_next_use_seconds(90);
  idle.set_reload_seconds(0.3);
  idle.set_score(300);
  v1::RemapCandidate& running = *decision.add_candidates();
  running.set_tenant("gamma");
  running.set_rule("rotation");
  running.set_outcome("taken");
  running.set_slabs(8);
  running.set_priority(-2);
  v1::RotationInputs& rotation = *running.mutable_rotation();
  rotation.set_layers(32);
  rotation.set_layer_bytes(400 << 20);
  rotation.set_cap_freed(16);
  rotation.set_step_seconds(0.02);
  rotation.set_link_share(0.75);
  rotation.set_copy_seconds(0.0014);
  rotation.set_longest_copy_seconds(0.0016);
  rotation.set_freed_after(2);
  rotation.set_slots_after(1);
  rotation.set_limit("gap");
  v1::RemapTotal& total = *log.add_totals();
  total.set_rule("rotation");
  total.set_outcome("taken");
  total.set_candidates(3);
  total.set_slabs(24);
  return log;
}

TEST(RemapView, ExplainsADecisionWithItsNumbers) {
  EXPECT_EQ(
      RemapExplanation(Log(), absl::UTCTimeZone()),
      "#7  1970-01-01 00:00:12.500  alpha needs 9 slabs (kv demand): 8 planned, the same 3 times\n"
      "  RULE                 TENANT  PRIORITY   IDLE  NEXT USE  RELOAD  SCORE  SLABS  OUTCOME\n"
      "  inactive parameters  beta           0  never      90 s  300 ms    300      0  just "
      "restored\n"
      "  rotation             gamma         -2    now       now                     8  taken\n"
      "  gamma rotates:\n"
      "    of 32 layers none freed, now 2 freed in 1 slot (cap 16): a layer of 400 MiB takes 1.4 "
      "ms over 75 % of the link, may take 1.6 ms in a step of 20 ms; bound by gap\n");
}

TEST(RemapView, SaysThatThereIsNothing) {
  EXPECT_EQ(RemapExplanation({}, absl::UTCTimeZone()),
            "no decisions: memory was taken from nobody so far\n");
  v1::GetRemapLogResponse log = Log();
  log.mutable_decisions(0)->clear_candidates();
  EXPECT_NE(RemapExplanation(log, absl::UTCTimeZone()).find("nobody has anything"),
            std::string::npos);
}

TEST(RemapView, TotalsByRuleAndOutcome) {
  EXPECT_EQ(RemapTotalsTable(Log()),
            "RULE      OUTCOME  TIMES  SLABS\n"
            "rotation  taken        3     24\n");
}

TEST(RemapView, JsonHasEveryFieldAndNoInfinities) {
  const nlohmann::json log = RemapJson(Log());
  const nlohmann::json& decision = log["decisions"][0];
  EXPECT_EQ(decision["sequence"], 7);
  EXPECT_EQ(decision["reason"], "kv_demand");
  EXPECT_TRUE(decision["candidates"][0]["idle_seconds"].is_null());
  EXPECT_FALSE(decision["candidates"][0].contains("rotation"));
  EXPECT_EQ(decision["candidates"][1]["rotation"]["freed_after"], 2);
  EXPECT_EQ(decision["candidates"][1]["rotation"]["limit"], "gap");
  EXPECT_EQ(log["totals"][0]["slabs"], 24);
}

}  // namespace
}  // namespace palimpsest::palctl
