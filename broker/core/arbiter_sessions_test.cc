// Workers that are late, silent, gone or lie, and brokers that start again.
#include "broker/core/arbiter_fixture.h"

namespace palimpsest {
namespace {

using ArbiterSessionsTest = ArbiterTest;

TEST_F(ArbiterSessionsTest, MissedRevokeDeadlineKillsAndQuarantines) {
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

TEST_F(ArbiterSessionsTest, ParametersOfASilentWorkerGiveWayAlthoughItSaidItWasActive) {
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

TEST_F(ArbiterSessionsTest, KvOfASilentWorkerGivesWayEvenBelowItsFloor) {
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

TEST_F(ArbiterSessionsTest, ASilentWorkerKeepsWhatNobodyNeedsAndCountsAgainOnceItReports) {
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

TEST_F(ArbiterSessionsTest, UnmappedGrantCostsTheWorkerItsLife) {
  Start(Options(24), {Tenant("a", 0, 0)});
  ASSERT_TRUE(node().Attach(0).ok());
  node().Activate(worker(0));
  node().Advance(absl::Seconds(60));
  EXPECT_TRUE(worker(0).killed);
}

TEST_F(ArbiterSessionsTest, AnswersAgainstTheProtocolAreFatal) {
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

TEST_F(ArbiterSessionsTest, APartOfWhatWasNotAskedForCostsTheWorkerItsLife) {
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

TEST_F(ArbiterSessionsTest, ReleaseThatCrossesARevokeIsNoLie) {
  Start(Options(40), {Tenant("a", 0, 0), Tenant("b", 1, 0)});
  Bring(0, 20, /*active=*/true);
  ASSERT_TRUE(node().Attach(1).ok());
  node().SetKvTarget(worker(1), 18, 18);
  node().ReleaseKv(worker(0), 10);
  node().Settle();
  EXPECT_FALSE(worker(0).killed);
  EXPECT_EQ(kv(1), 18u);
}

TEST_F(ArbiterSessionsTest, LostConnectionHasAGracePeriod) {
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

TEST_F(ArbiterSessionsTest, RevokeUnderWayIsSentAgainAfterReattachment) {
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

TEST_F(ArbiterSessionsTest, DetachedWorkerMustExit) {
  Start(Options(40), {Tenant("a", 0, 0)});
  Bring(0, 5, /*active=*/true);
  node().Detach(worker(0));
  EXPECT_EQ(status(0).quarantined_slabs, 25u);
  node().Advance(absl::Seconds(30));
  EXPECT_TRUE(worker(0).killed);
  node().Settle();
  EXPECT_EQ(node().arbiter().Snapshot().free_slabs, 40u);
}

TEST_F(ArbiterSessionsTest, RestartedBrokerGetsItsSlabsBack) {
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

TEST_F(ArbiterSessionsTest, WorkspaceSurvivesTheBroker) {
  Start(Options(30), {WithWorkspace(Tenant("a", 0, 0), 3)});
  Bring(0, 2, true);
  node().RestartBroker();
  ASSERT_TRUE(node().Reattach(worker(0)).ok());
  node().Settle();
  EXPECT_EQ(worker(0).Count(SlabRole::kWorkspace), 3u);
  EXPECT_EQ(status(0).workspace_slabs, 3u);
  EXPECT_TRUE(worker(0).grants.empty());
}

TEST_F(ArbiterSessionsTest, WorkspaceIsNeverGivenBackAndReturnsWithItsProcess) {
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

TEST_F(ArbiterSessionsTest, FalseClaimAtReattachmentIsRefusedAndFatal) {
  Start(Options(40), {Tenant("a", 0, 0)});
  Bring(0, 5, /*active=*/true);
  node().RestartBroker();
  worker(0).held.begin()->second.epoch = Epoch(12345);
  EXPECT_EQ(node().Reattach(worker(0)).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(worker(0).killed);
  EXPECT_EQ(status(0).quarantined_slabs, 25u);
}

TEST_F(ArbiterSessionsTest, WhatCameBackInPartsAndWasGrantedAgainIsNotAskedBack) {
  Start(Options(24), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  Bring(0, 0, /*active=*/false);
  ASSERT_TRUE(node().Attach(1).ok());
  node().SetKvTarget(worker(1), 8, 8);
  ASSERT_EQ(worker(0).revokes.size(), 1u);
  node().AnswerRevokePart(worker(0), 4);
  node().ProcessGone(worker(1).session);
  node().Clean(node().cleaning());
  // The parts were all of it, but the answer's end has not come.
  node().Activate(worker(0));
  while (!worker(0).grants.empty()) node().MapGrant(worker(0));
  ASSERT_EQ(parameters(0), 20u);
  node().LoseConnection(worker(0));
  ASSERT_TRUE(node().Reattach(worker(0)).ok());
  node().CheckInvariants();
  EXPECT_TRUE(worker(0).revokes.empty());
  EXPECT_EQ(status(0).parameter_slabs, 20u);
}

TEST_F(ArbiterSessionsTest, BadJournalIsRefusedWhole) {
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

TEST_F(ArbiterSessionsTest, BadStagesAreRefused) {
  Start(Options(40), {Tenant("a", 0, 0, /*quota=*/30)});
  const std::vector<std::vector<ParameterStage>> bad = {
      {}, {{1, 4}}, {{0, 4}, {5, 4}}, {{0, 4}, {3, 4}}, {{0, 0}}, {{0, 31}}, {{0, 0xffffffff}}};
  for (const auto& stages : bad) {
    EXPECT_FALSE(node().arbiter().OnAttach(TenantId(0), stages, node().now()).ok());
  }
  EXPECT_FALSE(node().arbiter().OnAttach(TenantId(7), EvenStages(1, 1), node().now()).ok());
}

}  // namespace
}  // namespace palimpsest
