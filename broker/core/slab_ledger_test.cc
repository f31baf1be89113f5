#include "broker/core/slab_ledger.h"

#include <map>
#include <random>
#include <set>
#include <utility>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

const SessionId kSession{(1ull << 32) | 1};
const TenantId kTenant{0};
const SlabLedger::Grantee kHolder{kSession, kTenant, SlabRole::kKv};

TEST(SlabLedger, OnlyListedTransitionsAreLegal) {
  using S = SlabState;
  const std::set<std::pair<S, S>> legal = {
      {S::kFree, S::kGranted},         {S::kFree, S::kLost},
      {S::kGranted, S::kGranted},      {S::kRevoking, S::kGranted},
      {S::kGranted, S::kRevoking},     {S::kGranted, S::kQuiesced},
      {S::kGranted, S::kQuarantined},  {S::kRevoking, S::kQuiesced},
      {S::kRevoking, S::kQuarantined}, {S::kLost, S::kGranted},
      {S::kLost, S::kQuiesced},        {S::kLost, S::kQuarantined},
      {S::kQuarantined, S::kQuiesced}, {S::kQuiesced, S::kScrubbed},
      {S::kQuiesced, S::kGranted},     {S::kScrubbed, S::kFree},
  };
  for (int from = 0; from < kSlabStates; ++from) {
    for (int to = 0; to < kSlabStates; ++to) {
      const auto a = static_cast<S>(from), b = static_cast<S>(to);
      EXPECT_EQ(IsLegalTransition(a, b), legal.contains({a, b}))
          << SlabStateName(a) << " to " << SlabStateName(b);
    }
  }
}

TEST(SlabLedger, SlabGoesRoundThroughItsLife) {
  SlabLedger ledger(4, 3);
  const SlabId slab = *ledger.FirstFree();
  const Epoch epoch = ledger.NextEpoch();
  EXPECT_EQ(epoch.value() >> 32, 3u);
  ASSERT_TRUE(ledger.Grant(slab, kHolder, epoch, RegionIndex(0)).ok());
  EXPECT_EQ(ledger.CountOf(kSession), 1u);
  ASSERT_TRUE(ledger.BeginRevoke(slab).ok());
  ASSERT_TRUE(ledger.GiveBack(slab).ok());
  EXPECT_EQ(ledger.CountOf(kSession), 0u);
  EXPECT_EQ(ledger.record(slab).last_tenant, kTenant);
  ASSERT_TRUE(ledger.CheckConsistency().ok());
  ASSERT_TRUE(ledger.Clean(slab).ok());
  EXPECT_EQ(ledger.record(slab).last_tenant, std::nullopt);
  ASSERT_TRUE(ledger.Free(slab).ok());
  EXPECT_EQ(ledger.Count(SlabState::kFree), 4u);
  EXPECT_EQ(ledger.record(slab).epoch, epoch);
  EXPECT_GT(ledger.NextEpoch(), epoch);
  EXPECT_TRUE(ledger.CheckConsistency().ok());
}

TEST(SlabLedger, IllegalMovesChangeNothing) {
  SlabLedger ledger(2, 1);
  const SlabId slab(0);
  EXPECT_EQ(ledger.GiveBack(slab).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ledger.Clean(slab).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ledger.Readopt(slab).code(), absl::StatusCode::kFailedPrecondition);
  ASSERT_TRUE(ledger.Grant(slab, kHolder, ledger.NextEpoch(), RegionIndex(0)).ok());
  EXPECT_EQ(ledger.Grant(slab, kHolder, ledger.NextEpoch(), RegionIndex(0)).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ledger.Free(slab).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ledger.BeginRevoke(SlabId(2)).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(ledger.record(slab).state, SlabState::kGranted);
  EXPECT_TRUE(ledger.CheckConsistency().ok());
}

TEST(SlabLedger, UncleanedSlabGoesOnlyToItsLastTenant) {
  SlabLedger ledger(1, 1);
  const SlabId slab(0);
  ASSERT_TRUE(ledger.Grant(slab, kHolder, ledger.NextEpoch(), RegionIndex(0)).ok());
  ASSERT_TRUE(ledger.GiveBack(slab).ok());
  const SlabLedger::Grantee other{SessionId(9), TenantId(1), SlabRole::kKv};
  EXPECT_EQ(ledger.GrantUncleaned(slab, other, ledger.NextEpoch(), RegionIndex(0)).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ledger.Grant(slab, other, ledger.NextEpoch(), RegionIndex(0)).code(),
            absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(ledger.GrantUncleaned(slab, kHolder, ledger.NextEpoch(), RegionIndex(0)).ok());
}

TEST(SlabLedger, MovesKeepSessionAndEpoch) {
  SlabLedger ledger(2, 1);
  const SlabId slab(0);
  const Epoch epoch = ledger.NextEpoch();
  const SlabLedger::Grantee holder{kSession, kTenant, SlabRole::kParameter};
  EXPECT_FALSE(ledger.Move(slab, SlabRole::kSlot, RegionIndex(1)).ok());
  ASSERT_TRUE(ledger.Grant(slab, holder, epoch, RegionIndex(7)).ok());
  ASSERT_TRUE(ledger.Move(slab, SlabRole::kSlot, RegionIndex(1)).ok());
  EXPECT_EQ(ledger.record(slab).role, SlabRole::kSlot);
  EXPECT_EQ(ledger.record(slab).region_index, RegionIndex(1));
  EXPECT_EQ(ledger.record(slab).owner, kSession);
  EXPECT_EQ(ledger.record(slab).epoch, epoch);
  EXPECT_FALSE(ledger.Move(slab, SlabRole::kKv, RegionIndex(0)).ok());
  ASSERT_TRUE(ledger.Move(slab, SlabRole::kParameter, RegionIndex(3)).ok());
  ASSERT_TRUE(ledger.BeginRevoke(slab).ok());
  EXPECT_FALSE(ledger.Move(slab, SlabRole::kSlot, RegionIndex(0)).ok());
  ASSERT_TRUE(ledger.Readopt(slab).ok());
  EXPECT_EQ(ledger.record(slab).state, SlabState::kGranted);
  ASSERT_TRUE(ledger.Grant(SlabId(1), kHolder, ledger.NextEpoch(), RegionIndex(0)).ok());
  EXPECT_FALSE(ledger.Move(SlabId(1), SlabRole::kSlot, RegionIndex(0)).ok());
  EXPECT_TRUE(ledger.CheckConsistency().ok());
}

// One call with random arguments, what the contract says about it, and what the ledger did.
struct Attempt {
  bool legal = false;
  SlabRecord next;  // if legal
  bool done = false;
};

Attempt Try(SlabLedger& ledger, SlabId slab, uint32_t call, const SlabLedger::Grantee& to,
            RegionIndex place) {
  const SlabRecord is = ledger.record(slab);
  const auto in = [&is](const std::set<SlabState>& states) { return states.contains(is.state); };
  const auto given = [&](SlabState state, Epoch epoch) {
    return SlabRecord{state, to.role, to.session, epoch, place, to.tenant};
  };
  const auto moves = [](SlabRole r) { return r == SlabRole::kParameter || r == SlabRole::kSlot; };
  using S = SlabState;
  Attempt attempt{.next = is};
  const Epoch epoch = ledger.NextEpoch();
  switch (call) {
    case 0:
      attempt = {in({S::kFree}) && to.role != SlabRole::kNone, given(S::kGranted, epoch),
                 ledger.Grant(slab, to, epoch, place).ok()};
      break;
    case 1:
      attempt = {in({S::kQuiesced}) && is.last_tenant == to.tenant && to.role != SlabRole::kNone,
                 given(S::kGranted, epoch), ledger.GrantUncleaned(slab, to, epoch, place).ok()};
      break;
    case 2:
      attempt = {in({S::kFree}) && to.role != SlabRole::kNone, given(S::kLost, epoch),
                 ledger.Adopt(slab, to, epoch, place).ok()};
      break;
    case 3:
      attempt.legal = in({S::kGranted});
      attempt.next.state = S::kRevoking;
      attempt.done = ledger.BeginRevoke(slab).ok();
      break;
    case 4:
      attempt.legal = in({S::kLost, S::kRevoking});
      attempt.next.state = S::kGranted;
      attempt.done = ledger.Readopt(slab).ok();
      break;
    case 5:
    case 6:
      attempt.legal = in({S::kGranted}) && moves(is.role) && moves(to.role);
      attempt.next.role = to.role;
      attempt.next.region_index = place;
      attempt.done = ledger.Move(slab, to.role, place).ok();
      break;
    case 7:
      attempt = {in({S::kGranted, S::kRevoking, S::kLost, S::kQuarantined}),
                 {S::kQuiesced, SlabRole::kNone, std::nullopt, is.epoch, {}, is.last_tenant},
                 ledger.GiveBack(slab).ok()};
      break;
    case 8:
      attempt.legal = in({S::kGranted, S::kRevoking, S::kLost});
      attempt.next.state = S::kQuarantined;
      attempt.done = ledger.Quarantine(slab).ok();
      break;
    default:
      attempt.legal = in({S::kQuiesced});
      attempt.next.state = S::kFree;
      attempt.next.last_tenant.reset();
      attempt.done = ledger.Clean(slab).ok() && ledger.Free(slab).ok();
  }
  return attempt;
}

TEST(SlabLedger, DoesWhatTheContractSaysUnderRandomCalls) {
  std::mt19937 random(1);
  const auto below = [&random](uint32_t n) { return static_cast<uint32_t>(random() % n); };
  SlabLedger ledger(12, 1);
  std::map<uint32_t, int> accepted;
  for (int step = 0; step < 20000; ++step) {
    const SlabId slab(below(ledger.pool_slabs()));
    const SlabRecord before = ledger.record(slab);
    const uint32_t call = below(10);
    const SlabLedger::Grantee to{SessionId(1 + below(3)), TenantId(below(2)),
                                 static_cast<SlabRole>(below(kSlabRoles))};
    const Attempt attempt = Try(ledger, slab, call, to, RegionIndex(below(9)));
    ASSERT_EQ(attempt.done, attempt.legal) << "step " << step << ", call " << call;
    const SlabRecord& expected = attempt.legal ? attempt.next : before;
    const SlabRecord& has = ledger.record(slab);
    ASSERT_TRUE(has.state == expected.state && has.role == expected.role &&
                has.owner == expected.owner && has.epoch == expected.epoch &&
                has.region_index == expected.region_index &&
                has.last_tenant == expected.last_tenant)
        << "step " << step << ", call " << call;
    ASSERT_TRUE(ledger.CheckConsistency().ok()) << "step " << step;
    accepted[call] += attempt.done ? 1 : 0;
  }
  for (uint32_t call = 0; call < 10; ++call) EXPECT_GT(accepted[call], 50) << "call " << call;
}

}  // namespace
}  // namespace palimpsest
