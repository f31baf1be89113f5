// What an operator configures about a pool and its tenants, and whether it can work at all.
#ifndef PALIMPSEST_BROKER_CORE_POOL_CONFIG_H_
#define PALIMPSEST_BROKER_CORE_POOL_CONFIG_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace palimpsest {

struct TenantConfig {
  std::string name;
  // Higher goes first.
  int32_t priority = 0;
  // Never gives parameters.
  bool pinned = false;
  // Slabs that the tenant gets whenever it asks, in all roles together; others may use them until
  // then. 0: best effort.
  uint32_t floor_slabs = 0;
  // Most slabs the tenant may hold in all roles together.
  uint32_t quota_slabs = 0;
  // KV slabs of the longest sequence that the model serves.
  uint32_t sequence_slabs = 0;
  // Slabs for activations, logits and kernel workspaces. Always kept for the tenant, so that its
  // worker has them as soon as it attaches, and never revoked.
  uint32_t workspace_slabs = 0;
};

// A tenant whose model is known.
struct TenantDemand {
  TenantConfig config;
  // Slabs of the whole parameter image.
  uint32_t image_slabs = 0;
};

// Whether every promise can be kept at once:
//   - names are unique and not empty;
//   - each tenant alone fits: image + workspace + one longest sequence <= quota <= pool;
//   - a floor is 0 (and the tenant not pinned) or holds image + workspace + one longest sequence,
//     and is at most the quota;
//   - the floors, and the workspaces of tenants without a floor, fit the pool together.
// Otherwise InvalidArgument with the numbers of every broken rule and what to change.
absl::Status ValidatePool(uint32_t pool_slabs, absl::Span<const TenantDemand> tenants);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_POOL_CONFIG_H_
