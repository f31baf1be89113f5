// What was decided about whose memory goes, with the numbers that decided it, for people who ask
// why. The last kKept decisions, and counts of all since the start.
//
// A demand that finds nothing is looked at again with every event: it is one decision until
// something changes, with a count of how often it was made.
//
// Threads: none of its own; the caller serializes. Nothing blocks.
#ifndef PALIMPSEST_BROKER_CORE_REMAP_LOG_H_
#define PALIMPSEST_BROKER_CORE_REMAP_LOG_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "broker/core/arbiter_actions.h"
#include "broker/core/remap_policy.h"
#include "broker/core/slab_ledger.h"

namespace palimpsest {

// The rules by which memory is taken or given back, in the order in which they are tried.
enum class RemapRule : uint8_t {
  kSurplusKv,             // KV that its holder neither uses nor asks for, empty or worth little
  kInactiveParameters,    // of a tenant without requests
  kCachedKv,              // surplus KV that is worth more than reloading parameters
  kSilentKv,              // of a tenant whose worker does not report
  kRotation,              // layers of an active tenant
  kKvByForce,             // above a floor, for one below its floor or of higher priority
  kOwnKv,                 // the requester's, for its own parameters
  kBestEffortParameters,  // of an active tenant without a floor, for one below its floor
  kReversion,             // not taken: a tenant's layers or parameters come back
};
inline constexpr size_t kRemapRules = 9;
// "surplus_kv", "inactive_parameters", "cached_kv", "silent_kv", "rotation", "kv_by_force",
// "own_kv", "best_effort_parameters", "reversion".
absl::string_view RemapRuleName(RemapRule rule);

// What came of a candidate.
enum class RemapOutcome : uint8_t {
  kTaken,           // or, for a reversion, given back
  kNotNeeded,       // others before it were enough
  kPinned,          // never gives parameters
  kJustRestored,    // irrevocable for a while
  kArriving,        // its parameters are on their way to it
  kRecentlyActive,  // spared by a prefetch
  kActive,          // it runs on them
  kNotHidden,       // copies of one more layer would not be hidden
  kNotEnough,       // not what a model or a floor needs, alone or with all others: left where it is
};
inline constexpr size_t kRemapOutcomes = 9;
// "taken", "not_needed", "pinned", "just_restored", "arriving", "recently_active", "active",
// "not_hidden", "not_enough".
absl::string_view RemapOutcomeName(RemapOutcome outcome);

// What a rotation was decided by: of one step and one layer, on the slowest rank.
struct RotationInputs {
  RotationCost cost;      // with the share of the link that was granted
  double link_share = 0;  // which is this
  int32_t freed_before = 0;
  int32_t slots_before = 0;
  RotationChoice choice;
};

struct RemapCandidate {
  TenantId tenant;
  RemapRule rule = RemapRule::kSurplusKv;
  RemapOutcome outcome = RemapOutcome::kTaken;
  uint32_t slabs = 0;  // taken or given back
  int32_t priority = 0;
  // Since it was active, and until it is expected to be again (victim_order.h). Of parameters: what
  // reloading them takes, and the score. Of cached KV: what a slab of it saves, and its worth over
  // what reloading a slab of parameters takes.
  absl::Duration idle;
  absl::Duration next_use;
  absl::Duration reload;
  double score = 0;
  std::optional<RotationInputs> rotation;
};

struct RemapDecision {
  uint64_t sequence = 0;  // from 1, without gaps; set by the log
  absl::Time at;          // of the last repetition
  uint64_t repeats = 0;   // how often it was made again
  TenantId requester;
  MoveReason reason = MoveReason::kActivation;
  // Slabs wanted beyond those that are free or on their way, and those that candidates give.
  uint32_t wanted = 0;
  uint32_t planned = 0;
  // In the order of rules, and of victims within a rule.
  std::vector<RemapCandidate> candidates;
};

class RemapLog {
 public:
  static constexpr size_t kKept = 1024;

  void Add(RemapDecision decision);

  // Oldest first.
  const std::deque<RemapDecision>& decisions() const { return decisions_; }

  struct Total {
    uint64_t candidates = 0;  // repetitions left out
    uint64_t slabs = 0;
  };
  // Since the start.
  const Total& total(RemapRule rule, RemapOutcome outcome) const {
    return totals_[static_cast<size_t>(rule)][static_cast<size_t>(outcome)];
  }

 private:
  std::deque<RemapDecision> decisions_;
  uint64_t sequence_ = 0;
  std::array<std::array<Total, kRemapOutcomes>, kRemapRules> totals_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_REMAP_LOG_H_
