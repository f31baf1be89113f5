#include "broker/core/victim_order.h"

#include <algorithm>
#include <cmath>

namespace palimpsest {

absl::string_view VictimPolicyName(VictimPolicy policy) {
  switch (policy) {
    case VictimPolicy::kExpected:
      return "expected";
    case VictimPolicy::kMru:
      return "mru";
    case VictimPolicy::kLru:
      return "lru";
  }
  return "invalid";
}

double VictimScore(const ParameterVictim& victim) {
  // Whatever is reloaded in less than a microsecond costs nothing that could be told apart.
  const double reload = std::max(absl::ToDoubleSeconds(victim.reload), 1e-6);
  return absl::ToDoubleSeconds(victim.next_use) / reload;
}

bool GivesBefore(VictimPolicy policy, const ParameterVictim& a, const ParameterVictim& b) {
  if (a.priority != b.priority) return a.priority < b.priority;
  if (policy == VictimPolicy::kLru) return a.last_active < b.last_active;
  if (policy == VictimPolicy::kExpected) {
    const double a_score = VictimScore(a);
    const double b_score = VictimScore(b);
    if (a_score != b_score) return a_score > b_score;
  }
  return a.last_active > b.last_active;
}

double KvWorth(const CachedKv& kv) {
  const double next_use = absl::ToDoubleSeconds(kv.next_use);
  const double chance =
      next_use <= 0 ? 1.0 : -std::expm1(-absl::ToDoubleSeconds(kCacheHorizon) / next_use);
  return chance * absl::ToDoubleSeconds(kv.saves);
}

bool KvGoesFirst(const CachedKv& kv, absl::Duration reload) {
  return KvWorth(kv) < absl::ToDoubleSeconds(reload);
}

}  // namespace palimpsest
