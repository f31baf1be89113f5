// What an operator configures about a pool and its tenants, and whether it can work at all.
#ifndef PALIMPSEST_BROKER_CORE_POOL_CONFIG_H_
#define PALIMPSEST_BROKER_CORE_POOL_CONFIG_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace palimpsest {

// What happens when KV cache needs more memory than there is. See docs/policies.md.
enum class MemoryPolicy : uint8_t {
  kRemap,      // parameters go and come back
  kStatic,     // each tenant keeps to its own share, which is its floor
  kRecompute,  // parameters stay, KV shares the rest; preempted sequences are computed again
  kSwap,       // as kRecompute, but the KV of preempted sequences goes to host memory and back
};

// "remap", "static", "recompute", "swap".
absl::string_view MemoryPolicyName(MemoryPolicy policy);

struct TenantConfig {
  std::string name;
  // Higher goes first.
  int32_t priority = 0;
  // Never gives parameters.
  bool pinned = false;
  // Slabs that the tenant gets whenever it asks, in all roles together; others may use them until
  // then. 0: best effort.
  uint32_t floor_slabs = 0;
  // The floor is nobody's wish but WithDefaultFloors': layers may rotate below it, which leaves the
  // tenant able to serve.
  bool floor_by_default = false;
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
  // The operator says nothing about a floor, not even that it is 0.
  bool floor_unsaid = false;
};

// Floors for tenants about which the operator says nothing: what serving takes at all, that is
// image + workspace + one longest sequence, so that no demand of others keeps a tenant waiting that
// comes back. All of them, if they fit the pool beside the floors of the others; otherwise none,
// since a promise to some would be at the cost of the rest. For policies in which parameters go:
// where they stay, ConfigUnder keeps room for them.
std::vector<TenantDemand> WithDefaultFloors(uint32_t pool_slabs, std::vector<TenantDemand> tenants);

// Whether every promise can be kept at once:
//   - names are unique and not empty;
//   - each tenant alone fits: image + workspace + one longest sequence <= quota <= pool;
//   - a floor is 0 (and the tenant not pinned) or holds image + workspace + one longest sequence,
//     and is at most the quota;
//   - the floors, and the workspaces of tenants without a floor, fit the pool together; where
//     parameters stay, so do the images of those tenants, and one longest sequence of each of them
//     alone;
//   - with kStatic, every tenant has a floor.
// Otherwise InvalidArgument with the numbers of every broken rule and what to change.
absl::Status ValidatePool(uint32_t pool_slabs, absl::Span<const TenantDemand> tenants,
                          MemoryPolicy policy = MemoryPolicy::kRemap);

// What the arbiter has to be told of a valid tenant so that its rules become the policy's. Where
// parameters stay they are pinned, and part of a floor, so that a worker that comes back finds room
// for them. With kStatic the floor is the quota too: whatever a tenant may ask for is its own, and
// nobody else may have it.
TenantConfig ConfigUnder(MemoryPolicy policy, const TenantDemand& tenant);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_POOL_CONFIG_H_
