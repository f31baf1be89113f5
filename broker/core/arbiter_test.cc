// Who gets slabs and who gives them: one test for each rule, with workers that cooperate.
#include "broker/core/arbiter.h"

#include <algorithm>

#include "broker/core/arbiter_fixture.h"

namespace palimpsest {
namespace {

TEST_F(ArbiterTest, ActivationTakesFreeSlabsInStageOrder) {
  Start(Options(30), {Tenant("a", 0, 22)});
  ASSERT_TRUE(node().Attach(0).ok());
  node().Activate(worker(0));
  ASSERT_EQ(worker(0).grants.size(), 1u);
  const SendGrant& grant = worker(0).grants.front();
  ASSERT_EQ(grant.slabs.size(), 20u);
  for (uint32_t i = 0; i < 20; ++i) EXPECT_EQ(grant.slabs[i].region_index, RegionIndex(i));
  EXPECT_EQ(grant.reason, MoveReason::kActivation);
}

TEST_F(ArbiterTest, ActivationReservesItsWholeSetAndIsDeliveredAsSlabsCome) {
  Start(Options(30), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  Bring(0, 0, /*active=*/false);
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(1));
  // Ten were free; the last three stages of `a` cover the other ten.
  EXPECT_EQ(parameters(1), 10u);
  ASSERT_EQ(worker(0).revokes.size(), 1u);
  EXPECT_EQ(worker(0).revokes.front().region_indexes.size(), 12u);
  EXPECT_EQ(worker(0).revokes.front().region_indexes.front(), RegionIndex(16));
  node().AnswerRevoke(worker(0));
  EXPECT_EQ(parameters(1), 10u) << "granted before it was cleaned";
  node().Clean(6);
  EXPECT_EQ(parameters(1), 16u);
  node().Settle();
  EXPECT_EQ(parameters(1), 20u);
  EXPECT_EQ(parameters(0), 8u);
}

TEST_F(ArbiterTest, TwoActivationsInAPoolForOneDoNotDeadlock) {
  Start(Options(24), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  ASSERT_TRUE(node().Attach(0).ok());
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(0));
  node().Activate(worker(1));
  EXPECT_EQ(parameters(0), 20u);
  EXPECT_EQ(parameters(1), 0u) << "holds part of a model while it waits";
  node().Settle();
  node().Report(worker(0), /*active=*/true, 0, 0);
  node().Advance(absl::Seconds(5));
  EXPECT_EQ(parameters(1), 0u);
  node().Report(worker(0), /*active=*/false, 0, 0);
  node().Settle();
  EXPECT_EQ(parameters(1), 20u);
}

TEST_F(ArbiterTest, ActivationPastItsDeadlineIsRefusedWithAHint) {
  Start(Options(24), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  Bring(0, 0, /*active=*/true);
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(1));
  node().Advance(absl::Seconds(19));
  EXPECT_EQ(worker(1).refusals, 0);
  node().Advance(absl::Seconds(1));
  EXPECT_EQ(worker(1).refusals, 1);
  EXPECT_FALSE(status(1).activation_waiting);
}

TEST_F(ArbiterTest, FullQueueRefusesAtOnce) {
  ArbiterOptions options = Options(24);
  options.max_waiting_activations = 1;
  Start(options, {Tenant("a", 0, 0), Tenant("b", 0, 0), Tenant("c", 0, 0)});
  Bring(0, 0, /*active=*/true);
  ASSERT_TRUE(node().Attach(1).ok());
  ASSERT_TRUE(node().Attach(2).ok());
  node().Activate(worker(1));
  node().Activate(worker(2));
  EXPECT_EQ(worker(1).refusals, 0);
  EXPECT_EQ(worker(2).refusals, 1);
}

TEST_F(ArbiterTest, QueueGoesByPriorityThenAge) {
  Start(Options(24), {Tenant("a", 0, 0), Tenant("b", 0, 0), Tenant("c", 1, 0)});
  Bring(0, 0, /*active=*/true);
  ASSERT_TRUE(node().Attach(1).ok());
  ASSERT_TRUE(node().Attach(2).ok());
  node().Activate(worker(1));
  node().Activate(worker(2));
  node().ProcessGone(worker(0).session);
  node().Settle();
  EXPECT_EQ(parameters(2), 20u);
  EXPECT_EQ(parameters(1), 0u);
}

TEST_F(ArbiterTest, EagerUsesOnlyFreeSlabs) {
  Start(Options(30), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  Bring(0, 0, /*active=*/false);
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(1), ActivateReason::kEager);
  EXPECT_EQ(worker(1).refusals, 1);
  EXPECT_TRUE(worker(0).revokes.empty());
  EXPECT_EQ(parameters(1), 0u);
  node().ProcessGone(worker(0).session);
  node().Settle();
  node().Activate(worker(1), ActivateReason::kEager);
  EXPECT_EQ(parameters(1), 20u);
}

TEST_F(ArbiterTest, SurplusKvGoesBeforeParameters) {
  Start(Options(60), {Tenant("a", 0, 0), Tenant("b", 0, 0), Tenant("c", 0, 0)});
  Bring(0, 0, /*active=*/false);
  Bring(1, 20, /*active=*/true);
  node().SetKvTarget(worker(1), 10, 8);
  node().Report(worker(1), /*active=*/true, 8, 12);
  ASSERT_TRUE(node().Attach(2).ok());
  node().SetKvTarget(worker(2), 9, 9);
  ASSERT_EQ(worker(1).revokes.size(), 1u);
  EXPECT_EQ(worker(1).revokes.front().kv_slabs, 9u);
  EXPECT_TRUE(worker(0).revokes.empty());
  // One more of the surplus, then whole stages of parameters.
  node().SetKvTarget(worker(2), 13, 13);
  EXPECT_EQ(worker(1).revokes.back().kv_slabs, 1u);
  ASSERT_EQ(worker(0).revokes.size(), 1u);
  EXPECT_EQ(worker(0).revokes.front().region_indexes.size(), 4u);
  node().Settle();
  EXPECT_EQ(kv(2), 13u);
}

TEST_F(ArbiterTest, KvInUseIsNoSurplus) {
  Start(Options(40), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  Bring(0, 20, /*active=*/true);
  node().SetKvTarget(worker(0), 5, 5);
  node().Report(worker(0), /*active=*/true, 18, 2);
  ASSERT_TRUE(node().Attach(1).ok());
  node().SetKvTarget(worker(1), 10, 10);
  ASSERT_EQ(worker(0).revokes.size(), 1u);
  EXPECT_EQ(worker(0).revokes.front().kv_slabs, 2u);
  EXPECT_EQ(worker(1).pressures, 1);
}

TEST_F(ArbiterTest, VictimsGoByPriorityThenMostRecentUse) {
  Start(Options(80),
        {Tenant("high", 1, 0), Tenant("old", 0, 0), Tenant("recent", 0, 0), Tenant("taker", 0, 0)});
  Bring(1, 0, /*active=*/false);
  Bring(2, 0, /*active=*/false);
  Bring(0, 0, /*active=*/false);
  ASSERT_TRUE(node().Attach(3).ok());
  node().SetKvTarget(worker(3), 60, 60);
  EXPECT_EQ(kv(3), 20u);
  node().Settle();
  EXPECT_EQ(parameters(0), 20u);
  EXPECT_EQ(parameters(1), 0u);
  EXPECT_EQ(parameters(2), 0u);
  // The order of the revokes: the most recently used of the lowest priority first.
  const std::string& log = node().log();
  const auto at = [&log](SessionId session) {
    return log.find("revoke " + session.ToString() + " parameter");
  };
  EXPECT_LT(at(worker(2).session), at(worker(1).session));
}

TEST_F(ArbiterTest, PinnedAndActiveParametersStay) {
  Start(Options(40), {Tenant("pinned", 0, 22, 100, /*pinned=*/true), Tenant("active", 0, 0),
                      Tenant("taker", 5, 0)});
  Bring(0, 0, /*active=*/false);
  Bring(1, 0, /*active=*/true);
  ASSERT_TRUE(node().Attach(2).ok());
  node().Activate(worker(2));
  node().Advance(absl::Seconds(10));
  EXPECT_TRUE(worker(0).revokes.empty());
  EXPECT_TRUE(worker(1).revokes.empty());
}

TEST_F(ArbiterTest, RestoredParametersAreIrrevocableForFiveRestoreTimes) {
  Start(Options(24), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  ASSERT_TRUE(node().Attach(0).ok());
  node().Activate(worker(0));
  node().Advance(absl::Seconds(1));
  node().MapGrant(worker(0), /*restore=*/absl::Seconds(1));
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(1));
  node().Advance(absl::Milliseconds(4999));
  EXPECT_TRUE(worker(0).revokes.empty());
  node().Advance(absl::Milliseconds(1));
  EXPECT_EQ(worker(0).revokes.size(), 1u);
}

TEST_F(ArbiterTest, RestoreTimeLongerThanTheGrantBuysNoResidence) {
  Start(Options(24), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  ASSERT_TRUE(node().Attach(0).ok());
  node().Activate(worker(0));
  node().MapGrant(worker(0), /*restore=*/absl::Hours(100));
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(1));
  node().Advance(absl::Seconds(2));
  EXPECT_EQ(worker(0).revokes.size(), 1u);
}

TEST_F(ArbiterTest, FloorIsGrantedOnDemandFromKvInUse) {
  Start(Options(60), {Tenant("a", 5, 24), Tenant("b", 0, 24)});
  Bring(0, 40, /*active=*/true);
  EXPECT_EQ(kv(0), 40u);
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(1));
  node().Settle();
  EXPECT_EQ(parameters(1), 20u);
  EXPECT_EQ(kv(0), 20u);
  node().SetKvTarget(worker(1), 10, 10);
  node().Settle();
  EXPECT_EQ(kv(1), 4u) << "up to its floor of 24 and no further";
  EXPECT_EQ(kv(0), 16u);
}

TEST_F(ArbiterTest, ReserveOfAnInactiveTenantTakesNothingFromOthers) {
  Start(Options(50), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  Bring(0, 0, /*active=*/false);
  Bring(1, 0, /*active=*/false);
  node().SetKvTarget(worker(1), 20, 0);
  node().Settle();
  node().Advance(absl::Hours(1));
  EXPECT_EQ(kv(1), 10u);
  EXPECT_EQ(parameters(0), 20u);
  node().Report(worker(1), /*active=*/true, 10, 0);
  node().Settle();
  EXPECT_EQ(kv(1), 20u);
  EXPECT_LT(parameters(0), 20u);
}

TEST_F(ArbiterTest, HigherPriorityTakesKvInUseDownToTheFloor) {
  Start(Options(60), {Tenant("low", 0, 25), Tenant("high", 1, 0)});
  Bring(0, 40, /*active=*/true);
  ASSERT_TRUE(node().Attach(1).ok());
  node().SetKvTarget(worker(1), 80, 80);
  node().Settle();
  EXPECT_EQ(kv(0), 5u);
  EXPECT_EQ(kv(1), 35u);
  EXPECT_EQ(worker(1).pressures, 1);
}

TEST_F(ArbiterTest, EqualPriorityTakesNoKvInUse) {
  Start(Options(60), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  Bring(0, 40, /*active=*/true);
  ASSERT_TRUE(node().Attach(1).ok());
  node().SetKvTarget(worker(1), 8, 8);
  EXPECT_TRUE(worker(0).revokes.empty());
  EXPECT_EQ(worker(1).pressures, 1);
  node().SetKvTarget(worker(1), 8, 8);
  EXPECT_EQ(worker(1).pressures, 1) << "once for each target";
  node().SetKvTarget(worker(1), 9, 8);
  EXPECT_EQ(worker(1).pressures, 2);
}

TEST_F(ArbiterTest, QuotaKeepsRoomForTheParameters) {
  Start(Options(60), {Tenant("a", 0, 0, /*quota=*/30)});
  ASSERT_TRUE(node().Attach(0).ok());
  node().SetKvTarget(worker(0), 50, 50);
  node().Settle();
  EXPECT_EQ(kv(0), 10u);
  EXPECT_EQ(worker(0).pressures, 1);
  node().Activate(worker(0));
  node().Settle();
  EXPECT_EQ(parameters(0), 20u);
}

TEST_F(ArbiterTest, PrefetchSparesRecentlyActiveTenantsAndGoesInSteps) {
  ArbiterOptions options = Options(44);
  options.kv_step_slabs = 4;
  Start(options, {Tenant("idle", 0, 0), Tenant("taker", 0, 0)});
  Bring(0, 0, /*active=*/true);
  Bring(1, 4, /*active=*/true);
  node().Report(worker(0), /*active=*/false, 0, 0);
  node().SetKvTarget(worker(1), 14, 4);
  EXPECT_TRUE(worker(0).revokes.empty());
  EXPECT_EQ(worker(1).pressures, 1);
  node().Advance(absl::Seconds(5));
  ASSERT_EQ(worker(0).revokes.size(), 1u);
  EXPECT_EQ(worker(0).revokes.front().region_indexes.size(), 4u);
  node().Settle();
  EXPECT_EQ(kv(1), 14u);
  EXPECT_EQ(parameters(0), 8u);
}

TEST_F(ArbiterTest, NeededKvTakesParametersWithoutGrace) {
  Start(Options(44), {Tenant("idle", 0, 0), Tenant("taker", 0, 0)});
  Bring(0, 0, /*active=*/true);
  Bring(1, 4, /*active=*/true);
  node().Report(worker(0), /*active=*/false, 0, 0);
  node().SetKvTarget(worker(1), 14, 14);
  node().Settle();
  EXPECT_EQ(kv(1), 14u);
}

TEST_F(ArbiterTest, ParametersComeBackUnaskedAfterDemandFell) {
  Start(Options(44), {Tenant("idle", 0, 0), Tenant("taker", 0, 0)});
  Bring(0, 0, /*active=*/false);
  Bring(1, 24, /*active=*/true);
  ASSERT_EQ(parameters(0), 0u);
  node().SetKvTarget(worker(1), 3, 3);
  node().Report(worker(1), /*active=*/true, 3, 21);
  node().Advance(absl::Milliseconds(1999));
  EXPECT_EQ(parameters(0), 0u);
  node().Advance(absl::Milliseconds(1));
  node().Settle();
  EXPECT_EQ(parameters(0), 20u);
  EXPECT_EQ(kv(1), 4u) << "keeps its target and the hysteresis";
  const auto& transfers = node().transfers();
  EXPECT_TRUE(std::any_of(transfers.begin(), transfers.end(), [](const TransferFinished& t) {
    return t.kind == TransferKind::kRestore && t.reason == MoveReason::kReversion && t.slabs == 20;
  }));
}

// Demand that swings faster than reversion_delay, or within the hysteresis, moves no parameters;
// and demand that stands still moves nothing at all.
TEST_F(ArbiterTest, ReversionDoesNotSwing) {
  Start(Options(60), {Tenant("idle", 0, 0), Tenant("taker", 0, 0)});
  Bring(0, 0, /*active=*/false);
  Bring(1, 32, /*active=*/true);
  ASSERT_EQ(parameters(0), 8u);
  const auto restores = [this] {
    return std::count_if(
        node().transfers().begin(), node().transfers().end(),
        [](const TransferFinished& t) { return t.reason == MoveReason::kReversion; });
  };
  for (int i = 0; i < 200; ++i) {
    const uint32_t target = i % 2 == 0 ? 32 : 10;
    node().SetKvTarget(worker(1), target, std::min(target, 10u));
    node().Report(worker(1), /*active=*/true, 10, kv(1) - 10);
    node().Advance(absl::Milliseconds(1500));
    node().Settle();
  }
  EXPECT_EQ(restores(), 0);
  for (int i = 0; i < 200; ++i) {
    // 32 held, 12 needed by the parameters: 20 * 1.25 = 25 stay, so only 7 would come.
    node().SetKvTarget(worker(1), 20 + static_cast<uint32_t>(i % 5), 10);
    node().Report(worker(1), /*active=*/true, 10, kv(1) - 10);
    node().Advance(absl::Seconds(3));
    node().Settle();
  }
  EXPECT_EQ(restores(), 0);
  node().SetKvTarget(worker(1), 10, 10);
  node().Report(worker(1), /*active=*/true, 10, kv(1) - 10);
  node().Advance(absl::Seconds(3));
  node().Settle();
  EXPECT_EQ(parameters(0), 20u);
  const std::string before = node().log();
  node().Advance(absl::Minutes(10));
  node().Settle();
  EXPECT_EQ(node().log(), before);
}

TEST_F(ArbiterTest, SameTenantMaySkipCleaning) {
  for (const bool skip : {false, true}) {
    ArbiterOptions options = Options(24);
    options.skip_clean_for_same_tenant = skip;
    Start(options, {Tenant("a", 0, 0)});
    ASSERT_TRUE(node().Attach(0).ok());
    node().SetKvTarget(worker(0), 10, 10);
    node().Settle();
    // Fourteen are free; the other six come from its own KV.
    node().Activate(worker(0));
    EXPECT_EQ(parameters(0), 14u);
    ASSERT_EQ(worker(0).revokes.size(), 1u);
    node().AnswerRevoke(worker(0));
    EXPECT_EQ(parameters(0), skip ? 20u : 14u);
    EXPECT_EQ(node().cleaning(), skip ? 0u : 6u);
    node().Settle();
    EXPECT_EQ(parameters(0), 20u);
  }
}

TEST_F(ArbiterTest, AnswersMayComeInParts) {
  Start(Options(30), {Tenant("a", 0, 0), Tenant("b", 1, 0)});
  Bring(0, 8, false);
  node().SetKvTarget(worker(0), 0, 0);
  node().Report(worker(0), false, 0, 8);
  ASSERT_TRUE(node().Attach(1).ok());
  node().Report(worker(1), true, 0, 0);
  node().SetKvTarget(worker(1), 8, 8);  // 2 are free, 6 are taken
  ASSERT_EQ(worker(0).revokes.size(), 1u);
  ASSERT_EQ(worker(0).revokes[0].kv_slabs, 6u);
  node().MapGrant(worker(1));
  node().AnswerRevokePart(worker(0), 4);
  node().Clean(4);
  EXPECT_EQ(kv(1), 6u);  // without waiting for the rest
  EXPECT_EQ(status(0).revokes_in_flight, 1u);
  node().AnswerRevoke(worker(0));
  node().Clean(2);
  EXPECT_EQ(kv(1), 8u);
  EXPECT_EQ(status(0).revokes_in_flight, 0u);
  const auto revoked =
      std::find_if(node().transfers().begin(), node().transfers().end(),
                   [](const TransferFinished& t) { return t.kind == TransferKind::kRevoke; });
  ASSERT_NE(revoked, node().transfers().end());
  EXPECT_EQ(revoked->slabs, 6u);
}

TEST_F(ArbiterTest, WorkspaceComesFirstAndIsKeptForItsTenant) {
  // 20 + 4 slabs for each; the first may take everything but the workspace that is kept for the
  // second, which is not even there.
  Start(Options(40), {WithWorkspace(Tenant("a", 1, 0), 4), WithWorkspace(Tenant("b", 0, 0), 4)});
  ASSERT_TRUE(node().Attach(0).ok());
  ASSERT_EQ(worker(0).grants.size(), 1u);
  EXPECT_EQ(worker(0).grants[0].role, SlabRole::kWorkspace);
  EXPECT_EQ(worker(0).grants[0].slabs.size(), 4u);
  EXPECT_EQ(worker(0).grants[0].reason, MoveReason::kAttach);
  node().Activate(worker(0));
  node().SetKvTarget(worker(0), 100, 100);
  node().Settle();
  EXPECT_EQ(parameters(0), 20u);
  EXPECT_EQ(kv(0), 12u);
  EXPECT_EQ(status(0).workspace_slabs, 4u);
  ASSERT_TRUE(node().Attach(1).ok());
  EXPECT_EQ(worker(1).Count(SlabRole::kWorkspace), 4u);
  EXPECT_EQ(node().arbiter().ledger().Count(SlabState::kFree), 0u);
}

TEST_F(ArbiterTest, ImageAndWorkspaceMustFitTheQuota) {
  Start(Options(30), {WithWorkspace(Tenant("a", 0, 0, /*quota=*/22), 3)});
  EXPECT_TRUE(absl::IsFailedPrecondition(node().Attach(0).status()));
}

}  // namespace
}  // namespace palimpsest
