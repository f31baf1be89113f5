// Victim selection: whose slabs are asked back for a requester, in the order that arbiter.h lists.
// A pure function of the sessions; free slabs and slabs on their way are the caller's business.
#ifndef PALIMPSEST_BROKER_CORE_SUPPLY_PLANNER_H_
#define PALIMPSEST_BROKER_CORE_SUPPLY_PLANNER_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/core/arbiter_session.h"
#include "broker/core/remap_log.h"
#include "broker/core/victim_order.h"
#include "common/bytes.h"

namespace palimpsest {

struct SupplyRequest {
  const Session* requester = nullptr;
  // Slabs wanted from victims.
  uint32_t need = 0;
  // How many slabs bring it to its floor and may be taken by force, counted after what it gets
  // without force; negative when it holds more.
  int64_t floor_gap = 0;
  // For parameters: its own KV may go, and the parameters of activations that wait behind it.
  bool activation = false;
  // Its turn has not begun: nothing is taken by force.
  bool gentle = false;
  // For KV above what is needed: it leaves alone the parameters of tenants that were active after
  // this instant, and what running sequences of others need.
  bool prefetch = false;
  absl::Time spare_active_after = absl::InfiniteFuture();
  // Only surplus KV, with targets stretched by this.
  bool surplus_only = false;
  // Of it, cached blocks too that are worth more than reloading parameters.
  bool any_cached = false;
  double hysteresis = 0.0;
};

struct SupplyRules {
  VictimPolicy victims = VictimPolicy::kExpected;
  // For what reloading costs.
  Bytes slab_bytes;
  RotationOptions rotation;
};

struct Take {
  Session* victim = nullptr;
  uint32_t kv_slabs = 0;
  // Parameters of the stages from first_stage on; parameter_slabs of them are granted.
  uint32_t first_stage = 0;
  uint32_t parameter_slabs = 0;
  // It stops rotating and gives back its slots, which parameter_slabs counts too.
  bool dissolves = false;
  // More of its layers rotate, which frees rotation_slabs.
  std::optional<Rotation> rotation;
  uint32_t rotation_slabs = 0;
  // All of it was surplus.
  bool surplus = true;
};

struct SupplyPlan {
  std::vector<Take> takes;
  // May exceed the need by part of a stage.
  uint32_t slabs = 0;
  // Who was looked at by which rule, and what came of it.
  std::vector<RemapCandidate> candidates;
};

// As much of the need as there is. `sessions` in a fixed order makes the plan deterministic.
SupplyPlan PlanSupply(absl::Span<Session* const> sessions, const SupplyRequest& request,
                      const SupplyRules& rules, absl::Time now);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_SUPPLY_PLANNER_H_
