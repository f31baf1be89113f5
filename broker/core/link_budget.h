// How much of the link between images and slabs rotation may count on. Restores and blocks use the
// same link; what is not kept for them is divided among the tenants that rotate, and each plans
// with the share it is granted. Pure functions.
#ifndef PALIMPSEST_BROKER_CORE_LINK_BUDGET_H_
#define PALIMPSEST_BROKER_CORE_LINK_BUDGET_H_

#include <cstdint>

#include "absl/types/span.h"
#include "broker/core/remap_policy.h"

namespace palimpsest {

struct LinkUse {
  // Measured rate of copies that have the link for themselves; 0: not known.
  double bytes_per_second = 0;
  // Blocks that move over it, smoothed.
  double block_bytes_per_second = 0;
  // Parameters that would come over this link are missing somewhere: their tenant may ask at any
  // time, and must not wait behind copies of rotating layers.
  bool restores_expected = false;
};

struct LinkBudgetRules {
  // Kept for restores while some are expected.
  double restore_share = 0.25;
  // Blocks can wait: they get what they use, but no more than this.
  double most_block_share = 0.25;
};

// Of the link, what all rotations together may use: from 0 to 1.
double RotationShare(const LinkUse& use, const LinkBudgetRules& rules);

// The smallest share of its link with which every copy of this rotation is hidden; 0 if nothing is
// freed, above 1 if no share is enough. `whole_link` has the rate of the whole link.
double ShareNeeded(const RotationCost& whole_link, int32_t freed, int32_t slots);

// The same numbers with a share of the link alone.
RotationCost WithShare(const RotationCost& whole_link, double share);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_LINK_BUDGET_H_
