#include "broker/core/link_budget.h"

#include <algorithm>
#include <limits>

namespace palimpsest {

double RotationShare(const LinkUse& use, const LinkBudgetRules& rules) {
  double share = 1.0;
  if (use.restores_expected) share -= rules.restore_share;
  if (use.bytes_per_second > 0) {
    share -= std::min(rules.most_block_share, use.block_bytes_per_second / use.bytes_per_second);
  }
  return std::clamp(share, 0.0, 1.0);
}

double ShareNeeded(const RotationCost& whole_link, int32_t freed, int32_t slots) {
  if (freed == 0) return 0;
  const double longest = LongestCopySeconds(whole_link, freed, slots);
  if (longest <= 0 || whole_link.link_bytes_per_second <= 0) {
    return std::numeric_limits<double>::infinity();
  }
  return CopySeconds(whole_link) / longest;
}

RotationCost WithShare(const RotationCost& whole_link, double share) {
  RotationCost cost = whole_link;
  cost.link_bytes_per_second *= std::clamp(share, 0.0, 1.0);
  return cost;
}

}  // namespace palimpsest
