// What restores and blocks may take of the link while layers rotate.
#include <cmath>

#include "broker/core/arbiter_impl.h"
#include "broker/core/layer_supply.h"

namespace palimpsest {
namespace {

// A smaller change of a limit is not worth a message.
constexpr double kChangeThatCounts = 0.1;
// A restore of a whole image takes no more than this part of what its grant may.
constexpr int kPartOfGrantDeadline = 4;

bool Differs(double limit, double told) {
  if (limit == 0 || told == 0) return limit != told;
  return std::abs(limit - told) > kChangeThatCounts * told;
}

}  // namespace

void Arbiter::Impl::ShareLink(absl::Time now) {
  const std::vector<double> limits =
      BackgroundLimitsOf(list_, Rules(), options_.grant_deadline / kPartOfGrantDeadline, now);
  for (size_t i = 0; i < list_.size(); ++i) {
    Session& session = *list_[i];
    if (!session.connected() || !Differs(limits[i], session.link_limit)) continue;
    session.link_limit = limits[i];
    Act(SendLinkLimit{.session = session.id, .bytes_per_second = limits[i]});
  }
}

}  // namespace palimpsest
