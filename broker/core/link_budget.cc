#include "broker/core/link_budget.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace palimpsest {
namespace {

constexpr absl::Duration kTrafficMemory = absl::Seconds(2);

}  // namespace

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

void LinkTraffic::Observe(uint64_t total_bytes, absl::Time now) {
  if (!last_.has_value() || total_bytes < total_bytes_) {
    last_ = now;
    total_bytes_ = total_bytes;
    return;
  }
  const absl::Duration passed = now - *last_;
  if (passed <= absl::ZeroDuration()) return;
  const double rate =
      static_cast<double>(total_bytes - total_bytes_) / absl::ToDoubleSeconds(passed);
  const double weight = 1.0 - std::exp(-absl::FDivDuration(passed, kTrafficMemory));
  bytes_per_second_ += (rate - bytes_per_second_) * weight;
  last_ = now;
  total_bytes_ = total_bytes;
}

std::vector<double> BackgroundLimits(absl::Span<const LinkUser> users, double bytes_per_second,
                                     const LinkBudgetRules& rules) {
  std::vector<double> limits(users.size(), std::numeric_limits<double>::infinity());
  double promised = 0;
  int copiers = 0;
  for (const LinkUser& user : users) {
    promised += user.promised;
    copiers += user.copies ? 1 : 0;
  }
  if (promised <= 0 || bytes_per_second <= 0) return limits;
  const double rest = std::max(1.0 - promised, std::clamp(rules.restore_share, 0.0, 1.0));
  for (size_t i = 0; i < users.size(); ++i) {
    const int parts = users[i].copies ? copiers : copiers + 1;
    limits[i] = std::max(bytes_per_second * rest / parts, users[i].least_bytes_per_second);
  }
  return limits;
}

}  // namespace palimpsest
