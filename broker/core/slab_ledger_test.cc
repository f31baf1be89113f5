#include "broker/core/slab_ledger.h"

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

}  // namespace
}  // namespace palimpsest
