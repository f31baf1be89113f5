// What rotating layers, restores and blocks do to each other on the link. Workers take 20 ms for a
// step of ten stages.
#include "broker/core/arbiter_fixture.h"

namespace palimpsest {
namespace {

class ArbiterLinkTest : public ArbiterTest {
 protected:
  static constexpr uint32_t kImage = 20;
  // With this one a copy of a layer, two slabs, takes a quarter of the time that it may take.
  static constexpr double kLink = 1e10;

  static SimulatedTenant Rotating(const std::string& name) {
    return {{.name = name, .quota_slabs = 100, .sequence_slabs = 2}, RotatingStages(10, 2)};
  }

  int32_t freed(uint32_t tenant) { return status(tenant).rotation.freed(); }
  double limit(uint32_t tenant) { return worker(tenant).link_limit; }

  // Tenant 0 lets three layers rotate; there are `more` slabs beside its own and its KV's.
  void StartRotating(uint32_t more = 0) {
    ArbiterOptions options = Options(kImage + 4 + more);
    options.rotation.enabled = true;
    options.slab_bytes = MiB(2);
    Start(options, {Rotating("a"), Rotating("b"), Rotating("c")});
    node().set_image_bytes_per_second(kLink);
    Bring(0, 4, true);
  }
  void Rotate(uint32_t kv_slabs) {
    node().SetKvTarget(worker(0), kv_slabs, kv_slabs);
    node().Settle();
    ASSERT_GT(freed(0), 0);
  }
};

TEST_F(ArbiterLinkTest, NobodyIsHeldBackWhileNothingRotates) {
  StartRotating(2 * kImage);
  Bring(1, 0, true);
  ASSERT_TRUE(node().Attach(2).ok());
  node().Activate(worker(2));
  for (uint32_t tenant : {0u, 1u, 2u}) EXPECT_EQ(limit(tenant), 0.0);
}

TEST_F(ArbiterLinkTest, RestoresGetWhatRotationsLeaveUntilNothingRotatesAnyMore) {
  StartRotating();
  Rotate(9);
  EXPECT_GT(limit(0), 0.0);
  EXPECT_LT(limit(0), kLink);
  // A worker that comes is told at once, and gets the same as long as it is alone.
  ASSERT_TRUE(node().Attach(1).ok());
  EXPECT_DOUBLE_EQ(limit(1), limit(0));
  const double alone = limit(1);
  ASSERT_TRUE(node().Attach(2).ok());
  EXPECT_DOUBLE_EQ(limit(2), alone);

  // Another connection knows of no limit.
  node().LoseConnection(worker(2));
  ASSERT_TRUE(node().Reattach(worker(2)).ok());
  EXPECT_GT(limit(2), 0.0);

  node().SetKvTarget(worker(0), 2, 2);
  node().Report(worker(0), true, 2, 7);
  node().Settle();
  node().Advance(absl::Seconds(2));
  node().Settle();
  node().Advance(absl::Seconds(3));
  node().Settle();
  ASSERT_EQ(freed(0), 0);
  for (uint32_t tenant : {0u, 1u, 2u}) EXPECT_EQ(limit(tenant), 0.0);
}

TEST_F(ArbiterLinkTest, ThoseThatRestoreShareTheRest) {
  StartRotating();
  Rotate(9);
  node().Report(worker(0), true, 9, 0);
  ASSERT_TRUE(node().Attach(1).ok());
  const double alone = limit(1);
  // Blocks of another worker take their part.
  node().Report(worker(1), true, 0, 0);
  for (int second = 0; second < 20; ++second) {
    worker(1).load->block_bytes += 1'000'000'000;
    node().Advance(absl::Seconds(1));
  }
  EXPECT_NEAR(limit(1), alone, alone * 0.1);
  EXPECT_NEAR(limit(0), alone / 2, alone * 0.1);
}

TEST_F(ArbiterLinkTest, WhatBlocksTakeIsNotPlannedWith) {
  StartRotating();
  Rotate(9);
  const auto share = [this] {
    return node().arbiter().remap_log().decisions().back().candidates.back().rotation->link_share;
  };
  const double before = share();
  node().Report(worker(0), true, 9, 0);
  for (int second = 0; second < 20; ++second) {
    worker(0).load->block_bytes += 2'000'000'000;
    node().Advance(absl::Seconds(1));
  }
  node().SetKvTarget(worker(0), 11, 11);
  node().Settle();
  EXPECT_NEAR(share(), before - 0.2, 0.01);
}

TEST_F(ArbiterLinkTest, RotationsFromAnotherGpuLeaveTheHostsLinkToOthers) {
  StartRotating();
  Rotate(9);
  ASSERT_TRUE(node().Attach(1).ok());
  EXPECT_GT(limit(1), 0.0);
  node().Report(worker(0), true, 9, 0);
  worker(0).load->image_on_peer = true;
  node().Advance(absl::Seconds(1));
  EXPECT_EQ(limit(1), 0.0);
  // Its own share of that link is whole: what is missing does not come over it.
  node().SetKvTarget(worker(0), 11, 11);
  node().Settle();
  const auto& candidates = node().arbiter().remap_log().decisions().back().candidates;
  EXPECT_EQ(candidates.back().rotation->link_share, 1.0);
}

TEST_F(ArbiterLinkTest, RestoresEndWithinTheirDeadlinesOnASlowLink) {
  StartRotating();
  Rotate(9);
  // The worker measures anew, and finds its steps as fast as they were.
  node().set_image_bytes_per_second(1e6);
  node().Report(worker(0), true, 9, 0);
  ASSERT_TRUE(node().Attach(1).ok());
  const double image = static_cast<double>((MiB(2) * kImage).count());
  EXPECT_GE(limit(1) * absl::ToDoubleSeconds(node().options().grant_deadline), 2 * image);
}

}  // namespace
}  // namespace palimpsest
