#include "broker/server/remap_log_view.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

class RemapLogViewTest : public ::testing::Test {
 protected:
  void Add(uint32_t requester, uint32_t victim, int second) {
    RemapDecision decision;
    decision.at = absl::UnixEpoch() + absl::Seconds(second);
    decision.requester = TenantId(requester);
    decision.reason = MoveReason::kKvDemand;
    decision.wanted = 9;
    decision.planned = 8;
    RemapCandidate candidate{.tenant = TenantId(victim),
                             .rule = RemapRule::kRotation,
                             .outcome = RemapOutcome::kTaken,
                             .slabs = 8,
                             .priority = -1,
                             .idle = absl::InfiniteDuration(),
                             .next_use = absl::Seconds(4),
                             .reload = absl::Seconds(2),
                             .score = 2};
    candidate.rotation = RotationInputs{.link_share = 0.75, .freed_before = 1, .slots_before = 1};
    candidate.rotation->cost.layers = 32;
    candidate.rotation->cost.step_seconds = 0.02;
    candidate.rotation->choice.freed = 3;
    candidate.rotation->choice.slots = 2;
    candidate.rotation->choice.limit = RotationLimit::kGap;
    decision.candidates.push_back(candidate);
    log_.Add(decision);
  }

  v1::GetRemapLogResponse View(const v1::GetRemapLogRequest& request) const {
    return RemapLogView(
        log_, request,
        [this](TenantId tenant) -> const std::string& { return names_[tenant.value()]; },
        absl::Seconds(1000));
  }

  RemapLog log_;
  const std::vector<std::string> names_ = {"alpha", "beta", "gamma"};
};

TEST_F(RemapLogViewTest, SaysWhatWasDecidedByWhat) {
  Add(0, 1, 5);
  const v1::GetRemapLogResponse view = View({});
  ASSERT_EQ(view.decisions_size(), 1);
  const v1::RemapDecision& decision = view.decisions(0);
  EXPECT_EQ(decision.tenant(), "alpha");
  EXPECT_EQ(decision.reason(), "kv_demand");
  EXPECT_EQ(decision.decided_at(), 1005);
  EXPECT_EQ(decision.wanted_slabs(), 9);
  EXPECT_EQ(decision.planned_slabs(), 8);
  ASSERT_EQ(decision.candidates_size(), 1);
  const v1::RemapCandidate& candidate = decision.candidates(0);
  EXPECT_EQ(candidate.tenant(), "beta");
  EXPECT_EQ(candidate.rule(), "rotation");
  EXPECT_EQ(candidate.outcome(), "taken");
  EXPECT_EQ(candidate.priority(), -1);
  EXPECT_TRUE(std::isinf(candidate.idle_seconds()));
  EXPECT_EQ(candidate.next_use_seconds(), 4);
  EXPECT_EQ(candidate.rotation().freed_before(), 1);
  EXPECT_EQ(candidate.rotation().freed_after(), 3);
  EXPECT_EQ(candidate.rotation().slots_after(), 2);
  EXPECT_EQ(candidate.rotation().link_share(), 0.75);
  EXPECT_EQ(candidate.rotation().limit(), "gap");
  ASSERT_EQ(view.totals_size(), 1);
  EXPECT_EQ(view.totals(0).rule(), "rotation");
  EXPECT_EQ(view.totals(0).outcome(), "taken");
  EXPECT_EQ(view.totals(0).candidates(), 1u);
  EXPECT_EQ(view.totals(0).slabs(), 8u);
}

TEST_F(RemapLogViewTest, NewestDecisionsAboutATenantOldestFirst) {
  for (int i = 0; i < 9; ++i) Add(i % 2 == 0 ? 0 : 2, 1, i);
  v1::GetRemapLogRequest request;
  request.set_tenant("gamma");
  EXPECT_EQ(View(request).decisions_size(), 4);
  request.set_tenant("beta");
  EXPECT_EQ(View(request).decisions_size(), 9);
  request.set_tenant("nobody");
  EXPECT_EQ(View(request).decisions_size(), 0);
  request.set_tenant("gamma");
  request.set_limit(2);
  const v1::GetRemapLogResponse last = View(request);
  ASSERT_EQ(last.decisions_size(), 2);
  EXPECT_EQ(last.decisions(0).sequence(), 6u);
  EXPECT_EQ(last.decisions(1).sequence(), 8u);
  request.set_after_sequence(6);
  EXPECT_EQ(View(request).decisions_size(), 1);
}

}  // namespace
}  // namespace palimpsest
