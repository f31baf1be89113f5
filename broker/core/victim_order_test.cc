#include "broker/core/victim_order.h"

#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

ParameterVictim Victim(int32_t priority, int last_active, int next_use, int reload) {
  return {.priority = priority,
          .last_active = absl::FromUnixSeconds(last_active),
          .next_use = absl::Seconds(next_use),
          .reload = absl::Seconds(reload)};
}

struct OrderCase {
  std::string rule;
  VictimPolicy policy;
  ParameterVictim first;
  ParameterVictim second;
};

TEST(VictimOrderTest, EachRule) {
  const OrderCase cases[] = {
      {"lower priority first", VictimPolicy::kExpected, Victim(0, 1, 1, 9), Victim(1, 2, 99, 1)},
      {"lower priority first", VictimPolicy::kMru, Victim(0, 1, 1, 9), Victim(1, 2, 99, 1)},
      {"lower priority first", VictimPolicy::kLru, Victim(0, 2, 1, 9), Victim(1, 1, 99, 1)},
      {"needed later", VictimPolicy::kExpected, Victim(0, 1, 20, 1), Victim(0, 2, 10, 1)},
      {"cheaper to reload", VictimPolicy::kExpected, Victim(0, 1, 20, 1), Victim(0, 2, 30, 2)},
      {"equal scores: used last", VictimPolicy::kExpected, Victim(0, 2, 20, 2),
       Victim(0, 1, 10, 1)},
      {"used last", VictimPolicy::kMru, Victim(0, 2, 1, 9), Victim(0, 1, 99, 1)},
      {"used longest ago", VictimPolicy::kLru, Victim(0, 1, 1, 9), Victim(0, 2, 99, 1)},
  };
  for (const OrderCase& c : cases) {
    EXPECT_TRUE(GivesBefore(c.policy, c.first, c.second))
        << VictimPolicyName(c.policy) << ": " << c.rule;
    EXPECT_FALSE(GivesBefore(c.policy, c.second, c.first))
        << VictimPolicyName(c.policy) << ": " << c.rule;
    EXPECT_FALSE(GivesBefore(c.policy, c.first, c.first));
  }
}

TEST(VictimOrderTest, WhoeverIsNeverExpectedGoesFirst) {
  ParameterVictim silent = Victim(0, 1, 0, 5);
  silent.next_use = absl::InfiniteDuration();
  EXPECT_TRUE(GivesBefore(VictimPolicy::kExpected, silent, Victim(0, 2, 1000, 1)));
  ParameterVictim other = silent;
  other.last_active += absl::Seconds(1);
  EXPECT_TRUE(GivesBefore(VictimPolicy::kExpected, other, silent));
}

TEST(CachedKvTest, GoesFirstIfWorthLessThanReloading) {
  const absl::Duration saves = absl::Milliseconds(10);
  // Of a tenant with requests: its worth is what it saves.
  EXPECT_FALSE(
      KvGoesFirst({.next_use = absl::ZeroDuration(), .saves = saves}, absl::Milliseconds(9)));
  EXPECT_TRUE(
      KvGoesFirst({.next_use = absl::ZeroDuration(), .saves = saves}, absl::Milliseconds(11)));
  // A tenant that comes back in ten horizons: a chance of a tenth.
  EXPECT_NEAR(KvWorth({.next_use = 10 * kCacheHorizon, .saves = saves}), 0.01 * 0.0952, 1e-5);
  EXPECT_TRUE(KvGoesFirst({.next_use = 10 * kCacheHorizon, .saves = saves}, absl::Milliseconds(1)));
  EXPECT_EQ(KvWorth({.next_use = absl::InfiniteDuration(), .saves = saves}), 0.0);
  // What it saves is not known: first, as if it were nothing.
  EXPECT_TRUE(KvGoesFirst({}, absl::Milliseconds(1)));
}

}  // namespace
}  // namespace palimpsest
