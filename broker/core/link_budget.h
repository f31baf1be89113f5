// Who may use how much of the link between images and slabs. Rotations, restores and blocks share
// it. What is not kept for restores and blocks is divided among the tenants that rotate, and each
// plans with the share it is granted; in return restores and blocks of all workers are held back to
// what rotations leave. Rotations go first: a layer that comes late stalls a step, a restore that
// takes longer only delays a first token. Yet some of the link is always the others'. Pure.
#ifndef PALIMPSEST_BROKER_CORE_LINK_BUDGET_H_
#define PALIMPSEST_BROKER_CORE_LINK_BUDGET_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/core/remap_policy.h"

namespace palimpsest {

struct LinkUse {
  // Measured rate of copies that have the link for themselves; 0: not known.
  double bytes_per_second = 0;
  // Blocks that move over it, smoothed.
  double block_bytes_per_second = 0;
  // Parameters come over this link, or would: they are missing somewhere, and their tenant, which
  // must not wait behind copies of rotating layers, may ask at any time.
  bool restores_expected = false;
};

struct LinkBudgetRules {
  // Kept for restores while some are expected; and the least that is left to restores and blocks
  // together, whatever rotates.
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

// Rate of what a worker counts since its start, smoothed over a few seconds.
class LinkTraffic {
 public:
  void Observe(uint64_t total_bytes, absl::Time now);
  double bytes_per_second() const { return bytes_per_second_; }

 private:
  std::optional<absl::Time> last_;
  uint64_t total_bytes_ = 0;
  double bytes_per_second_ = 0;
};

// A worker, as one that uses the link.
struct LinkUser {
  // Share of the whole link that copies of its rotating layers count on; 0: none rotates.
  double promised = 0;
  // Whether it restores parameters or moves blocks now.
  bool copies = false;
  // It is never held back to less, so that a restore ends before its deadline.
  double least_bytes_per_second = 0;
};

// Bytes per second that each worker may restore and move of blocks: the part of the link that is
// not promised, but no less than restore_share, in equal parts for those that copy; for another
// one the part that it would have. Infinite if nothing is promised, or the link's rate is not known
// (0).
std::vector<double> BackgroundLimits(absl::Span<const LinkUser> users, double bytes_per_second,
                                     const LinkBudgetRules& rules);

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_LINK_BUDGET_H_
