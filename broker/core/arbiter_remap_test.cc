// Which inactive tenant gives, and what the log of decisions says about it.
#include "broker/core/arbiter_fixture.h"
#include "broker/core/remap_log.h"

namespace palimpsest {
namespace {

class ArbiterRemapTest : public ArbiterTest {
 protected:
  // Active for a second after it was idle for `idle`, and idle from then on.
  void Use(uint32_t tenant, absl::Duration idle) {
    node().Advance(idle);
    node().Report(worker(tenant), /*active=*/true, 0, 0);
    node().Advance(absl::Seconds(1));
    node().Report(worker(tenant), /*active=*/false, 0, 0);
  }

  const RemapDecision& Last() { return node().arbiter().remap_log().decisions().back(); }
  // What came of the tenant by that rule in the last decision.
  const RemapCandidate* Find(uint32_t tenant, RemapRule rule) {
    for (const RemapCandidate& candidate : Last().candidates) {
      if (candidate.tenant == TenantId(tenant) && candidate.rule == rule) return &candidate;
    }
    return nullptr;
  }
};

struct VictimCase {
  VictimPolicy policy;
  bool rare_used_last;
  uint32_t victim;
};

TEST_F(ArbiterRemapTest, VictimsFollowThePolicy) {
  constexpr uint32_t kFrequent = 0, kRare = 1, kRequester = 2;
  const VictimCase cases[] = {
      {VictimPolicy::kExpected, false, kRare}, {VictimPolicy::kExpected, true, kRare},
      {VictimPolicy::kMru, false, kFrequent},  {VictimPolicy::kMru, true, kRare},
      {VictimPolicy::kLru, false, kRare},      {VictimPolicy::kLru, true, kFrequent},
  };
  for (const VictimCase& c : cases) {
    SCOPED_TRACE(std::string(VictimPolicyName(c.policy)) + (c.rare_used_last ? ", rare last" : ""));
    ArbiterOptions options = Options(60);
    options.victims = c.policy;
    Start(options, {Tenant("frequent", 0, 0), Tenant("rare", 0, 0), Tenant("c", 0, 0)});
    Bring(kFrequent, 0, /*active=*/false);
    Bring(kRare, 0, /*active=*/false);
    for (int round = 0; round < 8; ++round) {
      for (int i = 0; i < 20; ++i) Use(kFrequent, absl::Seconds(10));
      Use(kRare, absl::Seconds(1));
    }
    if (!c.rare_used_last) Use(kFrequent, absl::Seconds(1));
    node().Advance(absl::Seconds(1));
    ASSERT_TRUE(node().Attach(kRequester).ok());
    node().SetKvTarget(worker(kRequester), 24, 24);
    EXPECT_EQ(worker(kFrequent).revokes.size(), c.victim == kFrequent ? 1u : 0u);
    EXPECT_EQ(worker(kRare).revokes.size(), c.victim == kRare ? 1u : 0u);
    const RemapCandidate* const taken = Find(c.victim, RemapRule::kInactiveParameters);
    ASSERT_NE(taken, nullptr);
    EXPECT_EQ(taken->outcome, RemapOutcome::kTaken);
    EXPECT_EQ(taken->slabs, 4u);
    const RemapCandidate* const left =
        Find(c.victim == kRare ? kFrequent : kRare, RemapRule::kInactiveParameters);
    ASSERT_NE(left, nullptr);
    EXPECT_EQ(left->outcome, RemapOutcome::kNotNeeded);
    if (c.policy == VictimPolicy::kExpected) {
      EXPECT_GT(taken->score, left->score);
      EXPECT_GT(taken->next_use, left->next_use);
      // 20 slabs of 2 MiB at the assumed rate.
      EXPECT_NEAR(absl::ToDoubleSeconds(taken->reload), 20 * 2097152 / 10e9, 1e-6);
    }
  }
}

TEST_F(ArbiterRemapTest, DearerToReloadStaysLonger) {
  Start(Options(60), {Tenant("a", 0, 0), Tenant("b", 0, 0), Tenant("c", 0, 0)});
  Bring(0, 0, /*active=*/false);
  Bring(1, 0, /*active=*/false);
  SessionLoad slow{.active = false};
  slow.image_bytes_per_second = 1e9;
  node().arbiter().OnReport(worker(0).session, slow, node().now());
  SessionLoad quick{.active = false};
  quick.image_bytes_per_second = 50e9;
  node().arbiter().OnReport(worker(1).session, quick, node().now());
  ASSERT_TRUE(node().Attach(2).ok());
  node().SetKvTarget(worker(2), 24, 24);
  EXPECT_TRUE(worker(0).revokes.empty());
  EXPECT_EQ(worker(1).revokes.size(), 1u);
}

TEST_F(ArbiterRemapTest, CachedKvStaysIfItIsWorthMoreThanReloadingParameters) {
  // What a slab saves, against 0.21 ms for reloading one.
  for (const absl::Duration saves : {absl::Milliseconds(5), absl::Microseconds(50)}) {
    Start(Options(60), {Tenant("idle", 0, 0), Tenant("caches", 0, 0), Tenant("c", 0, 0)});
    Bring(0, 0, /*active=*/false);
    Bring(1, 20, /*active=*/true);
    node().SetKvTarget(worker(1), 8, 8);
    SessionLoad load{.active = true, .kv_slabs_used = 8, .kv_slabs_cached = 10, .kv_slabs_free = 2};
    load.cached_slab = saves;
    node().arbiter().OnReport(worker(1).session, load, node().now());
    ASSERT_TRUE(node().Attach(2).ok());
    node().SetKvTarget(worker(2), 6, 6);
    const bool dear = saves > absl::Milliseconds(1);
    ASSERT_NE(Find(1, RemapRule::kSurplusKv), nullptr);
    EXPECT_EQ(Find(1, RemapRule::kSurplusKv)->slabs, dear ? 2u : 6u);
    EXPECT_EQ(Find(0, RemapRule::kInactiveParameters) != nullptr, dear);
    // Behind the parameters it goes all the same.
    node().SetKvTarget(worker(2), 28, 28);
    EXPECT_EQ(Find(1, RemapRule::kCachedKv) != nullptr, dear);
  }
}

TEST_F(ArbiterRemapTest, TheLogSaysWhoWasLookedAtAndWhyNot) {
  Start(Options(120),
        {Tenant("idle", 0, 0), Tenant("busy", 0, 0), Tenant("pinned", 0, 22, 100, true),
         Tenant("fresh", 0, 0), Tenant("asks", 0, 0)});
  Bring(0, 4, /*active=*/false);
  Bring(1, 0, /*active=*/true);
  Bring(2, 0, /*active=*/false);
  ASSERT_TRUE(node().Attach(3).ok());
  node().Activate(worker(3));
  node().Settle();
  node().Report(worker(3), /*active=*/false, 0, 0);
  node().SetKvTarget(worker(0), 0, 0);
  node().Report(worker(0), /*active=*/false, 0, 4);
  ASSERT_TRUE(node().Attach(4).ok());
  const uint32_t free = node().arbiter().Snapshot().free_slabs;
  node().SetKvTarget(worker(4), free + 10, free + 10);
  EXPECT_EQ(Last().requester, TenantId(4));
  EXPECT_EQ(Last().reason, MoveReason::kKvDemand);
  EXPECT_EQ(Last().wanted, 10u);
  EXPECT_EQ(Last().planned, 12u);
  ASSERT_NE(Find(0, RemapRule::kSurplusKv), nullptr);
  EXPECT_EQ(Find(0, RemapRule::kSurplusKv)->slabs, 4u);
  const std::pair<uint32_t, RemapOutcome> expected[] = {{0, RemapOutcome::kTaken},
                                                        {1, RemapOutcome::kActive},
                                                        {2, RemapOutcome::kPinned},
                                                        {3, RemapOutcome::kJustRestored}};
  for (const auto& [tenant, outcome] : expected) {
    const RemapCandidate* const candidate = Find(tenant, RemapRule::kInactiveParameters);
    ASSERT_NE(candidate, nullptr) << tenant;
    EXPECT_EQ(RemapOutcomeName(candidate->outcome), RemapOutcomeName(outcome)) << tenant;
  }
}

TEST_F(ArbiterRemapTest, AnActivationThatCannotBeCoveredIsOneDecisionWithRepetitions) {
  Start(Options(30), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  Bring(0, 5, /*active=*/true);
  node().SetKvTarget(worker(0), 2, 2);
  node().Report(worker(0), /*active=*/true, 2, 3);
  ASSERT_TRUE(node().Attach(1).ok());
  node().Activate(worker(1));
  node().Advance(absl::Seconds(5));
  uint64_t decisions = 0;
  for (const RemapDecision& decision : node().arbiter().remap_log().decisions()) {
    decisions += decision.requester == TenantId(1) ? 1 : 0;
  }
  EXPECT_EQ(decisions, 1u);
  EXPECT_EQ(Last().planned, 0u);
  EXPECT_GT(Last().repeats, 3u);
  ASSERT_NE(Find(0, RemapRule::kSurplusKv), nullptr);
  EXPECT_EQ(Find(0, RemapRule::kSurplusKv)->outcome, RemapOutcome::kNotEnough);
  EXPECT_EQ(Find(0, RemapRule::kInactiveParameters)->outcome, RemapOutcome::kActive);
}

TEST_F(ArbiterRemapTest, AReversionIsADecisionToo) {
  Start(Options(30), {Tenant("a", 0, 0), Tenant("b", 0, 0)});
  Bring(0, 0, /*active=*/false);
  ASSERT_TRUE(node().Attach(1).ok());
  node().SetKvTarget(worker(1), 14, 14);
  node().Settle();
  node().Report(worker(1), /*active=*/true, 14, 0);
  node().SetKvTarget(worker(1), 2, 2);
  node().Report(worker(1), /*active=*/true, 2, 12);
  node().Advance(absl::Seconds(3));
  EXPECT_EQ(Last().reason, MoveReason::kReversion);
  EXPECT_EQ(Last().requester, TenantId(0));
  ASSERT_NE(Find(0, RemapRule::kReversion), nullptr);
  EXPECT_EQ(Find(0, RemapRule::kReversion)->slabs, 4u);
  node().Settle();
}

}  // namespace
}  // namespace palimpsest
