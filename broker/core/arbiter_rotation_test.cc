// Rotating layers, situation by situation. Workers take 20 ms for a step of ten stages and copy a
// layer of two slabs in 84 us, unless a test says otherwise.
#include <algorithm>

#include "broker/core/arbiter_fixture.h"

namespace palimpsest {
namespace {

class ArbiterRotationTest : public ArbiterTest {
 protected:
  static constexpr uint32_t kImage = 20;

  // Ten stages of two slabs; eight of them are layers.
  static SimulatedTenant Rotating(const std::string& name, int32_t priority = 0,
                                  uint32_t floor = 0) {
    return {{.name = name,
             .priority = priority,
             .floor_slabs = floor,
             .quota_slabs = 100,
             .sequence_slabs = 2},
            RotatingStages(10, 2)};
  }

  static ArbiterOptions Enabled(uint32_t pool) {
    ArbiterOptions options = Options(pool);
    options.rotation.enabled = true;
    return options;
  }

  int32_t freed(uint32_t tenant) { return status(tenant).rotation.freed(); }
  uint32_t slots(uint32_t tenant) { return worker(tenant).Count(SlabRole::kSlot); }
  void Want(uint32_t tenant, uint32_t kv_slabs) {
    node().SetKvTarget(worker(tenant), kv_slabs, kv_slabs);
  }
  // One tenant with four slabs of KV in a full pool, which wants `kv_slabs`; nothing has moved yet.
  void StartFull(uint32_t kv_slabs, ArbiterOptions options = Enabled(kImage + 4)) {
    Start(options, {Rotating("a")});
    node().set_image_bytes_per_second(50e9);
    Bring(0, 4, true);
    Want(0, kv_slabs);
  }
};

TEST_F(ArbiterRotationTest, DemandOfAnActiveTenantIsMetByItsOwnLayers) {
  StartFull(9);
  node().Settle();
  // Five slabs more: three layers, in the memory of one more as their slot.
  EXPECT_EQ(kv(0), 9u);
  EXPECT_EQ(freed(0), 3);
  EXPECT_EQ(status(0).rotation, EvenRotation(1, 8, 3, 1));
  EXPECT_EQ(slots(0), 2u);
  EXPECT_EQ(parameters(0), kImage - 8);
  EXPECT_EQ(status(0).parameter_slabs, kImage - 8);
  EXPECT_EQ(status(0).slot_slabs, 2u);
  // It is whole all the same.
  node().Activate(worker(0));
  EXPECT_FALSE(status(0).activation_waiting);
}

TEST_F(ArbiterRotationTest, AQuotaCoversMoreKvWhenLayersAreFreed) {
  SimulatedTenant tenant = Rotating("a");
  tenant.config.quota_slabs = kImage + 4;
  Start(Enabled(kImage + 20), {tenant});
  Bring(0, 4, true);
  Want(0, 9);
  node().Settle();
  EXPECT_EQ(kv(0), 9u);
  EXPECT_EQ(freed(0), 3);
  // All of it comes back within the quota, too.
  Want(0, 2);
  node().Report(worker(0), true, 2, 7);
  node().Settle();
  node().Advance(absl::Seconds(2));
  node().Settle();
  node().Advance(absl::Seconds(3));
  node().Settle();
  EXPECT_EQ(freed(0), 0);
  EXPECT_EQ(parameters(0), kImage);
}

TEST_F(ArbiterRotationTest, NothingRotatesUnlessEnabled) {
  StartFull(9, Options(kImage + 4));
  node().Settle();
  EXPECT_EQ(kv(0), 4u);
  EXPECT_EQ(worker(0).pressures, 1);
}

TEST_F(ArbiterRotationTest, NothingRotatesForAWorkerThatCannot) {
  SimulatedTenant tenant = Rotating("a");
  tenant.stages = EvenStages(10, 2);
  Start(Enabled(kImage + 4), {tenant});
  Bring(0, 4, true);
  Want(0, 9);
  node().Settle();
  EXPECT_EQ(kv(0), 4u);
}

TEST_F(ArbiterRotationTest, CopiesThatCannotBeHiddenAreNotMade) {
  Start(Enabled(kImage + 4), {Rotating("a")});
  node().set_image_bytes_per_second(1e9);  // 4 ms for a layer, of 20 ms in all
  Bring(0, 4, true);
  Want(0, 9);
  node().Settle();
  EXPECT_EQ(freed(0), 1);
  EXPECT_EQ(kv(0), 6u);
  EXPECT_EQ(worker(0).pressures, 1);
}

TEST_F(ArbiterRotationTest, TheCapHolds) {
  ArbiterOptions options = Enabled(kImage + 4);
  options.rotation.cap = 0.25;
  StartFull(20, options);
  node().Settle();
  EXPECT_EQ(freed(0), 2);
  EXPECT_EQ(kv(0), 8u);
}

TEST_F(ArbiterRotationTest, SlotsAreAsConfigured) {
  ArbiterOptions options = Enabled(kImage + 4);
  options.rotation.slots = SlotPreference::kTwo;
  StartFull(8, options);
  node().Settle();
  EXPECT_EQ(status(0).rotation, EvenRotation(1, 8, 2, 2));
  EXPECT_EQ(slots(0), 4u);
}

TEST_F(ArbiterRotationTest, LayersComeBackWhenDemandFalls) {
  StartFull(10);
  node().Settle();
  ASSERT_EQ(freed(0), 3);
  Want(0, 2);
  node().Report(worker(0), true, 2, 8);
  node().Settle();
  EXPECT_EQ(freed(0), 3) << "the demand may rise again";
  node().Advance(absl::Seconds(2));
  node().Settle();
  EXPECT_EQ(freed(0), 0);
  EXPECT_EQ(parameters(0), kImage);
  EXPECT_EQ(slots(0), 0u);
  // Fresh parameters stay for a while.
  Want(0, 10);
  node().Settle();
  EXPECT_EQ(freed(0), 0);
  node().Advance(absl::Seconds(2));
  node().Settle();
  EXPECT_EQ(freed(0), 3);
}

TEST_F(ArbiterRotationTest, LayersComeBackBeforeBlocksAreKept) {
  Start(Enabled(2 * kImage + 8), {Rotating("a"), Rotating("b")});
  Bring(0, 4, true);
  Bring(1, 4, true);
  Want(0, 10);
  node().Settle();
  ASSERT_EQ(freed(0) + freed(1), 3);
  // Nobody needs all that KV any more, but what it holds would save far more than the time of a
  // copy. Demand would have taken it before any layer.
  node().set_cached_slab(absl::Seconds(1));
  Want(0, 2);
  Want(1, 2);
  node().Report(worker(0), true, 2, 8);
  node().Report(worker(1), true, 2, 2);
  for (int i = 0; i < 4; ++i) {
    node().Advance(absl::Seconds(2));
    node().Settle();
  }
  EXPECT_EQ(freed(0) + freed(1), 0);
  EXPECT_EQ(parameters(0), kImage);
  EXPECT_EQ(parameters(1), kImage);
  // No more of it went than that.
  EXPECT_EQ(kv(0) + kv(1), 8u);
}

TEST_F(ArbiterRotationTest, WhatKvMayAskForSoonIsNotBrokenIntoForLayers) {
  Start(Enabled(2 * kImage + 10), {Rotating("a"), Rotating("b")});
  Bring(0, 4, true);
  Bring(1, 4, true);
  Want(0, 12);
  node().Settle();
  ASSERT_EQ(freed(0) + freed(1), 3);
  // Stretched by a quarter that is 13 slabs, one more than there are. So of what the other one has
  // to spare three slabs bring one layer back, and the fourth would not bring another.
  Want(0, 10);
  node().Report(worker(0), true, 12, 0);
  Want(1, 0);
  node().Report(worker(1), true, 0, 4);
  for (int i = 0; i < 4; ++i) {
    node().Advance(absl::Seconds(2));
    node().Settle();
  }
  EXPECT_EQ(freed(0) + freed(1), 2);
  EXPECT_EQ(kv(0), 12u);
  EXPECT_EQ(kv(1), 1u);
}

TEST_F(ArbiterRotationTest, LayersStayAwayIfReversionIsOff) {
  ArbiterOptions options = Enabled(kImage + 4);
  options.rotation.reversion = false;
  StartFull(10, options);
  node().Settle();
  Want(0, 2);
  node().Report(worker(0), true, 2, 8);
  node().Advance(absl::Seconds(10));
  node().Settle();
  EXPECT_EQ(freed(0), 3);
}

TEST_F(ArbiterRotationTest, LayersComeBackWhenCopiesAreNotHiddenAnyMore) {
  StartFull(10, Enabled(kImage + 30));
  node().Settle();
  EXPECT_EQ(freed(0), 0);
  Want(0, 36);
  node().Settle();
  ASSERT_EQ(freed(0), 3);
  node().set_image_bytes_per_second(1e8);
  node().Report(worker(0), true, 30, 6);
  Want(0, 34);
  node().Settle();
  node().Advance(absl::Seconds(5));
  node().Settle();
  EXPECT_EQ(freed(0), 3) << "there is nothing to bring them back with";
  Want(0, 26);
  node().Advance(absl::Seconds(3));
  node().Settle();
  EXPECT_LT(freed(0), 3);
}

TEST_F(ArbiterRotationTest, AnotherActiveTenantGivesLayersByPriority) {
  Start(Enabled(2 * kImage + 8), {Rotating("low", 0), Rotating("high", 1)});
  Bring(0, 4, true);
  Bring(1, 4, true);
  node().Report(worker(0), true, 4, 0);
  Want(1, 8);
  node().Settle();
  EXPECT_EQ(freed(0), 2);
  EXPECT_EQ(freed(1), 0);
  EXPECT_EQ(kv(1), 8u);
  // Nobody gives layers to a tenant of lower priority.
  Want(0, 12);
  node().Settle();
  EXPECT_EQ(freed(0), 4);
  EXPECT_EQ(freed(1), 0);
  EXPECT_EQ(kv(0), 8u);
}

TEST_F(ArbiterRotationTest, AFloorIsNotGivenToOthers) {
  Start(Enabled(2 * kImage + 8), {Rotating("floored", 0, kImage + 4), Rotating("other", 0)});
  Bring(0, 4, true);
  Bring(1, 4, true);
  node().Report(worker(0), true, 4, 0);
  Want(1, 10);
  node().Settle();
  EXPECT_EQ(freed(0), 0);
  EXPECT_EQ(freed(1), 3);
  EXPECT_EQ(kv(1), 10u);
}

// ArbiterFuzz shows that it is honoured all the same.
TEST_F(ArbiterRotationTest, LayersRotateBelowADefaultFloor) {
  SimulatedTenant floored = Rotating("floored", 0, kImage + 4);
  floored.config.floor_by_default = true;
  Start(Enabled(2 * kImage + 8), {floored, Rotating("other")});
  Bring(0, 4, true);
  Bring(1, 4, true);
  node().Report(worker(0), true, 4, 0);
  Want(1, 16);
  node().Settle();
  EXPECT_GT(freed(0), 0);
  EXPECT_EQ(kv(0), 4u);
  EXPECT_EQ(kv(1), 16u);
}

TEST_F(ArbiterRotationTest, AFloorTakesParametersWhereLayersAreNotEnough) {
  Start(Enabled(kImage + 4), {Rotating("effort"), Rotating("floored", 0, kImage + 4)});
  Bring(0, 4, true);
  ASSERT_TRUE(node().Attach(1).ok());
  // Four layers and all KV would give 12 slabs of 20.
  node().Activate(worker(1));
  node().Settle();
  EXPECT_EQ(parameters(1), kImage);
  EXPECT_EQ(freed(0), 0) << "nothing is left that could rotate";
}

TEST_F(ArbiterRotationTest, AnActivationIsServedFromLayersOfOthers) {
  Start(Enabled(2 * kImage), {Rotating("a"), Rotating("b")});
  Bring(0, 16, true);
  ASSERT_TRUE(node().Attach(1).ok());
  // 4 slabs are free; 16 are KV in use.
  node().Activate(worker(1));
  node().Settle();
  EXPECT_TRUE(status(1).activation_waiting) << "eight slabs are all that four layers give";
  EXPECT_EQ(freed(0), 0) << "half of it helps nobody";
  Want(0, 4);
  node().Report(worker(0), true, 4, 12);
  node().Settle();
  EXPECT_EQ(parameters(1), kImage);
  EXPECT_GT(freed(0), 0);
}

TEST_F(ArbiterRotationTest, AnInactiveTenantGivesEverythingAndComesBackWhole) {
  Start(Enabled(kImage + 10), {Rotating("a"), Rotating("b")});
  Bring(0, 14, true);
  node().Settle();
  ASSERT_EQ(freed(0), 2);
  Want(0, 0);
  node().ReleaseKv(worker(0), 14);
  node().Report(worker(0), false, 0, 0);
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(1));
  // The slots first, then whole stages.
  ASSERT_EQ(worker(0).rotations.size(), 1u);
  EXPECT_TRUE(worker(0).rotations.front().rotation.none());
  EXPECT_TRUE(worker(0).revokes.empty());
  node().FinishRotation(worker(0));
  ASSERT_EQ(worker(0).revokes.size(), 1u);
  node().Settle();
  EXPECT_EQ(parameters(1), kImage);
  node().Report(worker(1), false, 0, 0);
  node().Advance(absl::Seconds(3));
  node().Report(worker(0), true, 0, 0);
  node().Activate(worker(0));
  node().Settle();
  EXPECT_EQ(parameters(0), kImage);
  EXPECT_EQ(freed(0), 0);
}

TEST_F(ArbiterRotationTest, AWorkerThatDoesNotRotateInTimeIsKilled) {
  StartFull(9);
  ASSERT_EQ(worker(0).rotations.size(), 1u);
  EXPECT_EQ(status(0).parameter_slabs, kImage - 8);
  EXPECT_TRUE(status(0).rotation_in_flight);
  node().Advance(node().options().revoke_deadline);
  EXPECT_TRUE(worker(0).killed);
}

TEST_F(ArbiterRotationTest, OneRotationIsUnderWayAtATime) {
  StartFull(7);
  ASSERT_EQ(worker(0).rotations.size(), 1u);
  Want(0, 12);
  EXPECT_EQ(worker(0).rotations.size(), 1u);
  node().Settle();
  EXPECT_EQ(kv(0), 12u);
  EXPECT_EQ(freed(0), 4);
}

// A connection breaks or the broker restarts before, or after, a SetRotation was carried out.
class InterruptedRotation : public ArbiterRotationTest,
                            public testing::WithParamInterface<std::tuple<bool, bool>> {
 protected:
  void Interrupt() {
    const auto [carried_out, restart] = GetParam();
    ASSERT_EQ(worker(0).rotations.size(), 1u);
    if (carried_out) {
      node().FinishRotationAndLoseConnection(worker(0));
    } else {
      node().LoseConnection(worker(0));
    }
    if (restart) node().RestartBroker();
    ASSERT_TRUE(node().Reattach(worker(0)).ok());
    node().CheckInvariants();
    node().Clean(node().cleaning());
    node().Report(worker(0), true, kv(0), 0);
  }
};

TEST_P(InterruptedRotation, IsBegunAnewOrDone) {
  StartFull(9);
  Interrupt();
  EXPECT_EQ(freed(0), std::get<0>(GetParam()) ? 3 : 0);
  Want(0, 9);
  node().Advance(absl::Seconds(3));
  node().Settle();
  EXPECT_EQ(freed(0), 3);
  EXPECT_EQ(kv(0), 9u);
}

TEST_P(InterruptedRotation, OnTheWayBackLosesNoSpareSlab) {
  StartFull(10);
  node().Settle();
  Want(0, 2);
  node().Report(worker(0), true, 2, 8);
  node().Advance(absl::Seconds(2));
  for (int i = 0; i < 10 && worker(0).rotations.empty(); ++i) {
    if (!worker(0).revokes.empty()) node().AnswerRevoke(worker(0));
    node().Clean(node().cleaning());
    if (!worker(0).grants.empty()) node().MapGrant(worker(0));
  }
  Interrupt();
  Want(0, 2);
  node().Settle();
  EXPECT_EQ(freed(0), 0);
  EXPECT_EQ(slots(0), 0u);
  EXPECT_EQ(parameters(0), kImage);
}

TEST_P(InterruptedRotation, OfATenantThatGivesEverythingIsVoid) {
  Start(Enabled(kImage + 10), {Rotating("a"), Rotating("b")});
  Bring(0, 14, true);
  node().Settle();
  ASSERT_EQ(freed(0), 2);
  node().ReleaseKv(worker(0), 14);
  Want(0, 0);
  node().Report(worker(0), false, 0, 0);
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(1));
  Interrupt();
  EXPECT_TRUE(worker(0).revokes.empty());
  node().Advance(absl::Seconds(3));
  node().Report(worker(0), false, 0, 0);
  if (!worker(1).connected) {
    ASSERT_TRUE(node().Reattach(worker(1)).ok());
  }
  node().Activate(worker(1));
  node().Settle();
  // What came back to the other tenant meanwhile stays for a while.
  node().Advance(absl::Seconds(3));
  node().Settle();
  EXPECT_EQ(parameters(1), kImage);
}

INSTANTIATE_TEST_SUITE_P(CarriedOutAndRestart, InterruptedRotation,
                         testing::Combine(testing::Bool(), testing::Bool()));

TEST_F(ArbiterRotationTest, SpareSlabsThatCameBackInPartAreUsedOrGivenBack) {
  StartFull(10);
  node().Settle();
  ASSERT_EQ(freed(0), 3);
  Want(0, 2);
  node().Report(worker(0), true, 2, 8);
  node().Advance(absl::Seconds(2));
  node().AnswerRevoke(worker(0));
  node().Clean(node().cleaning());
  ASSERT_EQ(worker(0).grants.size(), 1u);
  ASSERT_EQ(worker(0).grants.front().role, SlabRole::kSlot);
  // Of six slabs the worker got three before the connection broke.
  SendGrant& grant = worker(0).grants.front();
  grant.slabs.erase(grant.slabs.begin(), grant.slabs.begin() + 3);
  node().LoseConnection(worker(0));
  ASSERT_TRUE(node().Reattach(worker(0)).ok());
  ASSERT_EQ(worker(0).rotations.size(), 1u);
  EXPECT_EQ(worker(0).rotations.front().rotation.freed(), 2);
  node().FinishRotation(worker(0));
  EXPECT_EQ(slots(0), 2u);
}

TEST_F(ArbiterRotationTest, ClaimsThatContradictTheRotationAreRefused) {
  StartFull(9);
  node().Settle();
  node().LoseConnection(worker(0));
  worker(0).rotation.stages.back() += 1;
  EXPECT_EQ(node().Reattach(worker(0)).code(), absl::StatusCode::kPermissionDenied);
  EXPECT_TRUE(worker(0).killed);
  worker(0).rotation.stages.back() -= 1;
}

TEST_F(ArbiterRotationTest, RotationsOfADisabledBrokerComeBack) {
  StartFull(9);
  node().Settle();
  ASSERT_EQ(freed(0), 3);
  node().set_rotation({.enabled = false});
  node().RestartBroker();
  ASSERT_TRUE(node().Reattach(worker(0)).ok());
  node().Report(worker(0), true, 2, 7);
  Want(0, 2);
  node().Settle();
  node().Advance(absl::Seconds(3));
  node().Settle();
  EXPECT_EQ(freed(0), 0);
  EXPECT_EQ(parameters(0), kImage);
}

}  // namespace
}  // namespace palimpsest
