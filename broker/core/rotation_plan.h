// Which running models give layers for a need of slabs, and when layers come back. Pure functions;
// the overlap conditions are remap_policy.h's.
#ifndef PALIMPSEST_BROKER_CORE_ROTATION_PLAN_H_
#define PALIMPSEST_BROKER_CORE_ROTATION_PLAN_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "broker/core/remap_policy.h"

namespace palimpsest {

struct RotationRules {
  SlotPreference slots = SlotPreference::kAuto;
  // Hysteresis against numbers that waver: a layer more is freed only if all conditions hold with
  // steps this much shorter than measured, and comes back only if they fail with steps as measured.
  // From 0 to below 1.
  double headroom = 0.1;
};

// An active tenant whose layers may be taken.
struct RotatingTenant {
  int32_t priority = 0;
  // With the rate of its whole link.
  RotationCost whole_link;
  // How it rotates now.
  int32_t freed = 0;
  int32_t slots = 0;
  // Tenants with the same number share a link: an index into `link_shares`.
  size_t link = 0;
};

struct RotationTake {
  // Index of the tenant.
  size_t tenant = 0;
  // Frees more than the tenant's rotation does now.
  RotationChoice choice;
  // What that gives.
  int64_t slabs = 0;
  // Share of the link that the choice counts on.
  double link_share = 0;
};

// Takes layers for `need` slabs, one more at a time: from the tenant of the lowest priority that
// can give one; among equals from one whose layer covers what is still needed with the least
// excess, or else from the one with the largest part of its hiding time left. At the end layers
// that are not needed are left where they are, those of high priority first. Gives at most what the
// conditions allow, which may be less than the need. Every tenant's rotation, taken or not, keeps
// the share of its link that it needs; `link_shares` are those of RotationShare. In the order of
// tenants.
std::vector<RotationTake> PlanRotations(absl::Span<const RotatingTenant> tenants,
                                        absl::Span<const double> link_shares,
                                        const RotationRules& rules, int64_t need);

// The share of its link that is left for tenant `index`, when the others keep what their rotations
// need; from 0 to 1.
double ShareLeft(absl::Span<const RotatingTenant> tenants, absl::Span<const double> link_shares,
                 size_t index);

enum class ReversionReason : uint8_t {
  kNone,
  kTooSlow,     // copies are not hidden any more: the link or the steps changed
  kCap,         // more is freed than the cap allows
  kDemandFell,  // there are slabs for it
};
// "none", "too_slow", "cap", "demand_fell".
absl::string_view ReversionReasonName(ReversionReason reason);

struct Reversion {
  ReversionReason reason = ReversionReason::kNone;
  RotationChoice to;  // frees less than before, unless the reason is kNone
};

// Whether a tenant that has `freed` layers freed (more than 0) should get some back. Too slow or
// above the cap: down to the most that is allowed, whatever the supply. Otherwise as many layers as
// `spare_slabs` pay for, down to a number that is allowed. `granted` has the share of the link that
// is left for it; numbers that are not known do not make it too slow.
Reversion ChooseReversion(const RotationCost& granted, const RotationRules& rules, int32_t freed,
                          int32_t slots, int64_t spare_slabs);

// Whether something has held for long enough without a break: the hysteresis of reversion in time.
class Persistence {
 public:
  // Tells how it stands now; true once it has held for `delay`.
  bool Observe(bool holds, absl::Time now, absl::Duration delay);
  void Reset() { since_.reset(); }
  // When it will have held for `delay` if nothing changes; InfiniteFuture while it does not hold.
  absl::Time Due(absl::Duration delay) const;

 private:
  std::optional<absl::Time> since_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_ROTATION_PLAN_H_
