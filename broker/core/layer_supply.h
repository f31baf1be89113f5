// Layers of running tenants as a source of memory: who may give some, what the conditions of
// rotation_plan.h are asked about, what a rotation would be, and what rotations leave of the link.
// Pure functions of the sessions.
#ifndef PALIMPSEST_BROKER_CORE_LAYER_SUPPLY_H_
#define PALIMPSEST_BROKER_CORE_LAYER_SUPPLY_H_

#include <cstdint>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/core/arbiter_session.h"
#include "broker/core/remap_log.h"
#include "broker/core/supply_planner.h"

namespace palimpsest {

struct LayerOffer {
  Session* victim = nullptr;
  // Frees more than its rotation does now, unless slabs is 0.
  Rotation rotation;
  // 0: copies of one more layer would not be hidden.
  uint32_t slabs = 0;
  RotationInputs inputs;
};

enum class LayersOf { kRequester, kAll };

// As much of the need as active tenants can give without being slowed down; if that is too little,
// also who could not give any. Nobody gives layers to a requester of lower priority, and nobody
// what its own floor covers to another one, unless it is a default.
std::vector<LayerOffer> PlanLayers(absl::Span<Session* const> sessions, const Session& requester,
                                   LayersOf whose, uint32_t need, const SupplyRules& rules,
                                   absl::Time now);

// For the log.
RemapCandidate CandidateOf(const LayerOffer& offer, absl::Time now);

// What the session's rotation costs, with the share of the link that others leave it.
RotationInputs GrantedRotation(absl::Span<Session* const> sessions, const Session& session,
                               const SupplyRules& rules, absl::Time now);

// Bytes per second that each session may restore and move of blocks (BackgroundLimits), in the
// order of sessions; 0: as many as it likes. A restore of a whole image gets as much as it takes to
// end within `patience`.
std::vector<double> BackgroundLimitsOf(absl::Span<Session* const> sessions,
                                       const SupplyRules& rules, absl::Duration patience,
                                       absl::Time now);

RotationRules RulesOf(const RotationOptions& options);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_LAYER_SUPPLY_H_
