// Whose memory goes first. Pure functions; the planner (supply_planner.h) gathers the inputs and
// takes in this order.
#ifndef PALIMPSEST_BROKER_CORE_VICTIM_ORDER_H_
#define PALIMPSEST_BROKER_CORE_VICTIM_ORDER_H_

#include <cstdint>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace palimpsest {

// Which of several inactive tenants of one priority gives its parameters first.
enum class VictimPolicy : uint8_t {
  kExpected,  // the longest expected time to next use per time of reloading
  kMru,       // the most recently used: the one needed last when turns go round
  kLru,       // the least recently used
};
// "expected", "mru", "lru".
absl::string_view VictimPolicyName(VictimPolicy policy);

// An inactive tenant with parameters to take.
struct ParameterVictim {
  int32_t priority = 0;
  absl::Time last_active;
  absl::Duration next_use;  // expected (next_use.h)
  absl::Duration reload;    // of the parameters that it would lose
};

// Seconds of absence for each second of reloading: 0 for parameters that are needed at once.
double VictimScore(const ParameterVictim& victim);

// Whether a gives before b: lower priority first, then by policy; equal scores like kMru.
bool GivesBefore(VictimPolicy policy, const ParameterVictim& a, const ParameterVictim& b);

// Cached blocks of a tenant that nobody uses now.
struct CachedKv {
  // When the tenant is used next: nobody else can reuse its blocks.
  absl::Duration next_use;
  // What a slab of them saves when it is: the time to compute it again, times the share of prompt
  // tokens for which the cache has been right. Zero: not known.
  absl::Duration saves;
};

// How long cached blocks are expected to stay at most.
inline constexpr absl::Duration kCacheHorizon = absl::Seconds(60);

// Seconds that a slab of cached blocks is expected to save: the chance that its tenant is used
// within the horizon (as if uses came at random: 1 - exp(-horizon / next_use)) times what it saves
// then.
double KvWorth(const CachedKv& kv);

// Whether cached blocks go before parameters of which reloading a slab takes `reload`.
bool KvGoesFirst(const CachedKv& kv, absl::Duration reload);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_VICTIM_ORDER_H_
