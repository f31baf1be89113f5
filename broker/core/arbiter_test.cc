// One test for each rule of the arbiter, with cooperative workers unless the rule is about others.
#include "broker/core/arbiter.h"

#include <algorithm>

#include "broker/core/simulated_node.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

SimulatedTenant Tenant(const std::string& name, int32_t priority, uint32_t floor,
                       uint32_t quota = 100, bool pinned = false) {
  // Five stages of four slabs.
  return {{.name = name,
           .priority = priority,
           .pinned = pinned,
           .floor_slabs = floor,
           .quota_slabs = quota,
           .sequence_slabs = 2},
          EvenStages(5, 4)};
}

ArbiterOptions Options(uint32_t pool) { return ArbiterOptions{.pool_slabs = pool}; }

class ArbiterTest : public testing::Test {
 protected:
  void Start(ArbiterOptions options, std::vector<SimulatedTenant> tenants) {
    node_ = std::make_unique<SimulatedNode>(options, std::move(tenants));
  }
  void TearDown() override {
    node_->CheckInvariants();
    for (const std::string& problem : node_->problems()) ADD_FAILURE() << problem;
    if (HasFailure()) ADD_FAILURE() << node_->log();
  }
  SimulatedNode& node() { return *node_; }
  SimulatedWorker& worker(uint32_t tenant) { return *node_->WorkerOf(tenant); }
  uint32_t kv(uint32_t tenant) { return worker(tenant).Count(SlabRole::kKv); }
  uint32_t parameters(uint32_t tenant) { return worker(tenant).Count(SlabRole::kParameter); }
  TenantSnapshot status(uint32_t tenant) { return node_->arbiter().Snapshot().tenants[tenant]; }

  // Attached, all parameters, `kv` slabs of KV in use; active or not; past its residence.
  void Bring(uint32_t tenant, uint32_t kv_slabs, bool active) {
    ASSERT_TRUE(node_->Attach(tenant).ok());
    node_->Activate(worker(tenant));
    node_->SetKvTarget(worker(tenant), kv_slabs, kv_slabs);
    node_->Settle();
    node_->Report(worker(tenant), active, kv(tenant), 0);
    node_->Advance(absl::Seconds(3));
  }

  std::unique_ptr<SimulatedNode> node_;
};

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

TEST_F(ArbiterTest, MissedRevokeDeadlineKillsAndQuarantines) {
  Start(Options(24), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  Bring(0, 0, /*active=*/false);
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(1));
  node().Advance(absl::Seconds(10));
  EXPECT_TRUE(worker(0).killed);
  EXPECT_EQ(status(0).quarantined_slabs, 20u);
  EXPECT_EQ(parameters(1), 4u) << "the four that were free";
  EXPECT_EQ(node().Attach(0).status().code(), absl::StatusCode::kUnavailable);
  node().ProcessGone(worker(0).session);
  EXPECT_EQ(parameters(1), 4u);
  node().Settle();
  EXPECT_EQ(parameters(1), 20u);
  EXPECT_TRUE(node().Attach(0).ok());
}

TEST_F(ArbiterTest, ParametersOfASilentWorkerGiveWayAlthoughItSaidItWasActive) {
  Start(Options(44), {Tenant("a", 0, 22), Tenant("b", 0, 22)});
  Bring(0, 2, /*active=*/true);
  Bring(1, 2, /*active=*/true);
  worker(0).hung = true;
  node().SetKvTarget(worker(1), 10, 10);
  EXPECT_EQ(worker(1).pressures, 1);
  node().Advance(absl::Milliseconds(1900));
  EXPECT_TRUE(worker(0).revokes.empty()) << "its last report is younger than three seconds";
  node().Advance(absl::Milliseconds(1200));
  ASSERT_EQ(worker(0).revokes.size(), 1u);
  node().Advance(absl::Seconds(10));
  EXPECT_TRUE(worker(0).killed);
  EXPECT_EQ(status(0).quarantined_slabs, 22u);
  node().Settle();
  EXPECT_EQ(kv(1), 10u);
}

TEST_F(ArbiterTest, KvOfASilentWorkerGivesWayEvenBelowItsFloor) {
  Start(Options(64), {Tenant("a", 0, 30, 100, /*pinned=*/true), Tenant("b", 0, 0)});
  Bring(0, 4, /*active=*/true);
  Bring(1, 20, /*active=*/true);
  worker(0).hung = true;
  node().SetKvTarget(worker(1), 22, 22);
  node().Advance(absl::Seconds(4));
  ASSERT_EQ(worker(0).revokes.size(), 1u);
  EXPECT_EQ(worker(0).revokes.front().kv_slabs, 2u);
  node().Advance(absl::Seconds(10));
  node().Settle();
  EXPECT_EQ(kv(1), 22u);
}

TEST_F(ArbiterTest, ASilentWorkerKeepsWhatNobodyNeedsAndCountsAgainOnceItReports) {
  Start(Options(44), {Tenant("a", 0, 22), Tenant("b", 0, 22)});
  Bring(0, 2, /*active=*/true);
  Bring(1, 2, /*active=*/true);
  worker(0).hung = true;
  node().Advance(absl::Minutes(2));
  EXPECT_TRUE(worker(0).revokes.empty());
  worker(0).hung = false;
  node().Advance(absl::Seconds(1));
  node().SetKvTarget(worker(1), 10, 10);
  node().Advance(absl::Minutes(2));
  EXPECT_TRUE(worker(0).revokes.empty());
  EXPECT_EQ(parameters(0), 20u);
}

TEST_F(ArbiterTest, UnmappedGrantCostsTheWorkerItsLife) {
  Start(Options(24), {Tenant("a", 0, 0)});
  ASSERT_TRUE(node().Attach(0).ok());
  node().Activate(worker(0));
  node().Advance(absl::Seconds(60));
  EXPECT_TRUE(worker(0).killed);
}

TEST_F(ArbiterTest, AnswersAgainstTheProtocolAreFatal) {
  enum Lie { kForeign, kTwice, kWrongRole, kTooFew, kAnsweredTwice, kNeverAsked, kPartOfStages };
  for (const Lie lie :
       {kForeign, kTwice, kWrongRole, kTooFew, kAnsweredTwice, kNeverAsked, kPartOfStages}) {
    Start(Options(64), {Tenant("a", 0, 0), Tenant("b", 1, 0)});
    Bring(0, 20, /*active=*/lie != kPartOfStages);
    Bring(1, 4, /*active=*/true);
    node().SetKvTarget(worker(1), 8, 8);
    ASSERT_FALSE(worker(0).revokes.empty());
    SimulatedWorker& liar = worker(0);
    const SendRevoke revoke = liar.revokes.front();
    std::vector<SlabId> slabs = liar.Slabs(SlabRole::kKv);
    slabs.resize(revoke.kv_slabs);
    switch (lie) {
      case kForeign:
        slabs.back() = worker(1).Slabs(SlabRole::kKv).front();
        break;
      case kTwice:
        slabs.back() = slabs.front();
        break;
      case kWrongRole:
        slabs.back() = liar.Slabs(SlabRole::kParameter).front();
        break;
      case kTooFew:
      case kPartOfStages:
        slabs.clear();
        break;
      case kAnsweredTwice:
        node().AnswerRevoke(liar);
        break;
      case kNeverAsked:
        break;
    }
    const RevokeId id = lie == kNeverAsked ? RevokeId(revoke.revoke.value() + 1000) : revoke.revoke;
    node().arbiter().OnRevokeDone(liar.session, id, slabs, node().now());
    node().Advance(absl::Milliseconds(1));
    EXPECT_TRUE(worker(0).killed) << "lie " << lie;
    EXPECT_FALSE(worker(1).killed);
    node().Settle();
    EXPECT_EQ(kv(1), 8u);
    EXPECT_TRUE(node().problems().empty()) << node().problems().front();
  }
}

TEST_F(ArbiterTest, ReleaseThatCrossesARevokeIsNoLie) {
  Start(Options(40), {Tenant("a", 0, 0), Tenant("b", 1, 0)});
  Bring(0, 20, /*active=*/true);
  ASSERT_TRUE(node().Attach(1).ok());
  node().SetKvTarget(worker(1), 18, 18);
  node().ReleaseKv(worker(0), 10);
  node().Settle();
  EXPECT_FALSE(worker(0).killed);
  EXPECT_EQ(kv(1), 18u);
}

TEST_F(ArbiterTest, LostConnectionHasAGracePeriod) {
  Start(Options(40), {Tenant("a", 0, 0)});
  Bring(0, 5, /*active=*/true);
  node().LoseConnection(worker(0));
  node().Advance(absl::Seconds(29));
  EXPECT_FALSE(worker(0).killed);
  ASSERT_TRUE(node().Reattach(worker(0)).ok());
  node().Advance(absl::Seconds(60));
  EXPECT_FALSE(worker(0).killed);
  EXPECT_EQ(kv(0), 5u);
  node().LoseConnection(worker(0));
  node().Advance(absl::Seconds(30));
  EXPECT_TRUE(worker(0).killed);
}

TEST_F(ArbiterTest, RevokeUnderWayIsSentAgainAfterReattachment) {
  Start(Options(40), {Tenant("a", 0, 0), Tenant("b", 1, 0)});
  Bring(0, 20, /*active=*/true);
  ASSERT_TRUE(node().Attach(1).ok());
  node().SetKvTarget(worker(1), 8, 8);
  const RevokeId revoke = worker(0).revokes.front().revoke;
  node().LoseConnection(worker(0));
  ASSERT_TRUE(node().Reattach(worker(0)).ok());
  ASSERT_EQ(worker(0).revokes.size(), 1u);
  EXPECT_EQ(worker(0).revokes.front().revoke, revoke);
  node().Settle();
  EXPECT_EQ(kv(1), 8u);
}

TEST_F(ArbiterTest, DetachedWorkerMustExit) {
  Start(Options(40), {Tenant("a", 0, 0)});
  Bring(0, 5, /*active=*/true);
  node().Detach(worker(0));
  EXPECT_EQ(status(0).quarantined_slabs, 25u);
  node().Advance(absl::Seconds(30));
  EXPECT_TRUE(worker(0).killed);
  node().Settle();
  EXPECT_EQ(node().arbiter().Snapshot().free_slabs, 40u);
}

TEST_F(ArbiterTest, RestartedBrokerGetsItsSlabsBack) {
  Start(Options(80), {Tenant("stays", 0, 0), Tenant("dies", 0, 0), Tenant("away", 0, 0)});
  Bring(0, 5, /*active=*/true);
  Bring(1, 4, /*active=*/true);
  Bring(2, 3, /*active=*/true);
  const SessionId dead = worker(1).session;
  node().RestartBroker();
  EXPECT_EQ(node().arbiter().Snapshot().lost_slabs, 72u);
  EXPECT_EQ(node().arbiter().Snapshot().free_slabs, 8u);
  ASSERT_TRUE(node().Reattach(worker(0)).ok());
  EXPECT_EQ(status(0).parameter_slabs, 20u);
  EXPECT_EQ(status(0).kv_slabs, 5u);
  node().ProcessGone(dead);
  node().Settle();
  EXPECT_EQ(node().arbiter().Snapshot().free_slabs, 32u);
  node().Advance(absl::Seconds(30));
  EXPECT_TRUE(worker(2).killed);
  EXPECT_EQ(status(2).quarantined_slabs, 23u);
  // Epochs are kept, so that a second restart still knows them.
  node().Settle();
  node().RestartBroker();
  EXPECT_TRUE(node().Reattach(worker(0)).ok());
}

TEST_F(ArbiterTest, FalseClaimAtReattachmentIsRefusedAndFatal) {
  Start(Options(40), {Tenant("a", 0, 0)});
  Bring(0, 5, /*active=*/true);
  node().RestartBroker();
  worker(0).held.begin()->second.epoch = Epoch(12345);
  EXPECT_EQ(node().Reattach(worker(0)).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(worker(0).killed);
  EXPECT_EQ(status(0).quarantined_slabs, 25u);
}

TEST_F(ArbiterTest, BadJournalIsRefusedWhole) {
  Start(Options(40), {Tenant("a", 0, 0)});
  ArbiterOptions options = Options(40);
  options.generation = 2;
  const HeldSlab good{SlabId(1), Epoch((1ull << 32) | 5), SlabRole::kKv, RegionIndex(0)};
  HeldSlab outside = good, future = good;
  outside.slab = SlabId(40);
  future.epoch = Epoch((2ull << 32) | 5);
  for (const std::vector<HeldSlab>& slabs :
       {std::vector<HeldSlab>{good, good}, std::vector<HeldSlab>{good, outside},
        std::vector<HeldSlab>{future}}) {
    Arbiter arbiter(options);
    ASSERT_TRUE(arbiter.AddTenant({.name = "a", .quota_slabs = 40}).ok());
    const JournalSession session{SessionId((1ull << 32) | 1), TenantId(0), slabs};
    EXPECT_EQ(arbiter.AdoptFromJournal({session}, node().now()).code(),
              absl::StatusCode::kInvalidArgument);
    EXPECT_EQ(arbiter.Snapshot().free_slabs, 40u);
  }
}

TEST_F(ArbiterTest, BadStagesAreRefused) {
  Start(Options(40), {Tenant("a", 0, 0, /*quota=*/30)});
  const std::vector<std::vector<ParameterStage>> bad = {
      {}, {{1, 4}}, {{0, 4}, {5, 4}}, {{0, 4}, {3, 4}}, {{0, 0}}, {{0, 31}}, {{0, 0xffffffff}}};
  for (const auto& stages : bad) {
    EXPECT_FALSE(node().arbiter().OnAttach(TenantId(0), stages, node().now()).ok());
  }
  EXPECT_FALSE(node().arbiter().OnAttach(TenantId(7), EvenStages(1, 1), node().now()).ok());
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

TEST_F(ArbiterTest, APartOfWhatWasNotAskedForCostsTheWorkerItsLife) {
  Start(Options(30), {Tenant("a", 0, 0), Tenant("b", 1, 0)});
  Bring(0, 8, false);
  node().SetKvTarget(worker(0), 0, 0);
  node().Report(worker(0), false, 0, 8);
  ASSERT_TRUE(node().Attach(1).ok());
  node().Report(worker(1), true, 0, 0);
  node().SetKvTarget(worker(1), 8, 8);
  const SlabId parameter = worker(0).Slabs(SlabRole::kParameter)[0];
  node().arbiter().OnRevokePart(worker(0).session, worker(0).revokes[0].revoke, {parameter},
                                node().now());
  node().Advance(absl::Milliseconds(1));
  EXPECT_TRUE(worker(0).killed);
}

SimulatedTenant WithWorkspace(SimulatedTenant tenant, uint32_t slabs) {
  tenant.config.workspace_slabs = slabs;
  return tenant;
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

TEST_F(ArbiterTest, WorkspaceIsNeverGivenBackAndReturnsWithItsProcess) {
  Start(Options(30), {WithWorkspace(Tenant("a", 0, 0), 3)});
  Bring(0, 2, true);
  const SlabId workspace = worker(0).Slabs(SlabRole::kWorkspace)[0];
  node().arbiter().OnReleaseKv(worker(0).session, {workspace}, node().now());
  node().Advance(absl::Milliseconds(1));
  EXPECT_TRUE(worker(0).killed);
  node().ProcessGone(worker(0).session);
  ASSERT_TRUE(node().Attach(0).ok());
  node().Settle();
  EXPECT_EQ(worker(0).Count(SlabRole::kWorkspace), 3u);
}

TEST_F(ArbiterTest, WorkspaceSurvivesTheBroker) {
  Start(Options(30), {WithWorkspace(Tenant("a", 0, 0), 3)});
  Bring(0, 2, true);
  node().RestartBroker();
  ASSERT_TRUE(node().Reattach(worker(0)).ok());
  node().Settle();
  EXPECT_EQ(worker(0).Count(SlabRole::kWorkspace), 3u);
  EXPECT_EQ(status(0).workspace_slabs, 3u);
  EXPECT_TRUE(worker(0).grants.empty());
}

TEST_F(ArbiterTest, ImageAndWorkspaceMustFitTheQuota) {
  Start(Options(30), {WithWorkspace(Tenant("a", 0, 0, /*quota=*/22), 3)});
  EXPECT_TRUE(absl::IsFailedPrecondition(node().Attach(0).status()));
}

}  // namespace
}  // namespace palimpsest
