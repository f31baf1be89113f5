#include "broker/core/next_use.h"

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

class Tenant {
 public:
  // Active for a second after having been idle for so long.
  void Idle(double seconds) {
    now_ += absl::Seconds(seconds);
    use_.Observe(true, now_);
    now_ += absl::Seconds(1);
    use_.Observe(false, now_);
  }
  double ExpectedAfter(double idle) const {
    return absl::ToDoubleSeconds(use_.Expected(now_ + absl::Seconds(idle)));
  }
  NextUse& use() { return use_; }
  absl::Time now() const { return now_; }

 private:
  NextUse use_;
  absl::Time now_ = absl::UnixEpoch();
};

TEST(NextUseTest, WithoutHistoryWhatIsAssumed) {
  NextUse use;
  EXPECT_EQ(use.Expected(absl::UnixEpoch()), NextUse::kPriorIdle);
  use.Observe(false, absl::UnixEpoch());
  EXPECT_EQ(use.Expected(absl::UnixEpoch() + absl::Seconds(20)), absl::Seconds(40));
  // Idle for longer than assumed: as long again.
  EXPECT_EQ(use.Expected(absl::UnixEpoch() + absl::Seconds(100)), absl::Seconds(100));
}

TEST(NextUseTest, ZeroWhileActive) {
  NextUse use;
  use.Observe(true, absl::UnixEpoch());
  EXPECT_EQ(use.Expected(absl::UnixEpoch() + absl::Hours(1)), absl::ZeroDuration());
}

TEST(NextUseTest, TurnsThatGoRoundAreExpectedWhenTheyAreDue) {
  Tenant tenant;
  for (int i = 0; i < 40; ++i) tenant.Idle(10);
  EXPECT_NEAR(tenant.ExpectedAfter(0), 10, 3);
  EXPECT_NEAR(tenant.ExpectedAfter(8), 2, 3);
  // The one used last is needed last.
  EXPECT_GT(tenant.ExpectedAfter(1), tenant.ExpectedAfter(6));
}

TEST(NextUseTest, BurstyTrafficMakesLongIdlenessLonger) {
  Tenant tenant;
  for (int i = 0; i < 4; ++i) {
    for (int j = 0; j < 6; ++j) tenant.Idle(1);
    tenant.Idle(600);
  }
  for (int j = 0; j < 6; ++j) tenant.Idle(1);
  EXPECT_LT(tenant.ExpectedAfter(0), tenant.ExpectedAfter(5));
  EXPECT_GT(tenant.ExpectedAfter(5), 300);
}

TEST(NextUseTest, GapsWithinABusyPeriodLeaveNoTrace) {
  Tenant quiet;
  Tenant chatty;
  for (int i = 0; i < 10; ++i) {
    quiet.Idle(30);
    chatty.Idle(30);
    for (int j = 0; j < 50; ++j) chatty.Idle(0.2);
  }
  EXPECT_DOUBLE_EQ(quiet.ExpectedAfter(5), chatty.ExpectedAfter(5));
}

TEST(NextUseTest, OldHabitsAreForgotten) {
  Tenant tenant;
  for (int i = 0; i < 100; ++i) tenant.Idle(300);
  for (int i = 0; i < 100; ++i) tenant.Idle(5);
  EXPECT_LT(tenant.ExpectedAfter(0), 10);
}

TEST(NextUseTest, RepeatedObservationsChangeNothing) {
  Tenant once;
  Tenant often;
  once.Idle(10);
  often.Idle(10);
  for (int i = 0; i < 5; ++i) often.use().Observe(false, often.now() + absl::Seconds(i));
  EXPECT_DOUBLE_EQ(once.ExpectedAfter(7), often.ExpectedAfter(7));
}

TEST(NextUseProperty, NeverNegativeAndAlwaysFinite) {
  Tenant tenant;
  uint32_t state = 1;
  for (int i = 0; i < 2000; ++i) {
    state = state * 1664525 + 1013904223;
    tenant.Idle((state >> 8) % 1000 * 0.05);
    const double expected = tenant.ExpectedAfter((state >> 16) % 500 * 0.5);
    ASSERT_GT(expected, 0.0);
    ASSERT_LT(expected, 1000.0);
  }
}

}  // namespace
}  // namespace palimpsest
