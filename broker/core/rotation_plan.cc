#include "broker/core/rotation_plan.h"

#include <algorithm>

#include "broker/core/link_budget.h"

namespace palimpsest {
namespace {

RotationCost WithHeadroom(RotationCost cost, double headroom) {
  cost.step_seconds *= 1.0 - headroom;
  return cost;
}

class RotationPlanner {
 public:
  RotationPlanner(absl::Span<const RotatingTenant> tenants, absl::Span<const double> link_shares,
                  const RotationRules& rules, int64_t need)
      : before_(tenants),
        link_shares_(link_shares),
        rules_(rules),
        need_(need),
        after_(tenants.begin(), tenants.end()) {}

  std::vector<RotationTake> Run() {
    while (gained_ < need_ && TakeOne()) {
    }
    LeaveWhatIsNotNeeded();
    std::vector<RotationTake> takes;
    for (size_t i = 0; i < after_.size(); ++i) {
      if (after_[i].freed == before_[i].freed) continue;
      takes.push_back({.tenant = i,
                       .choice = choices_[i],
                       .slabs = Slabs(i, after_[i].freed),
                       .link_share = ShareLeft(after_, link_shares_, i)});
    }
    return takes;
  }

 private:
  // What tenant i has given when `freed` of its layers are.
  int64_t Slabs(size_t i, int32_t freed) const {
    return int64_t{freed - before_[i].freed} * before_[i].whole_link.stage_slabs;
  }

  // Frees `wanted` layers or a few more, within the share that is left.
  RotationChoice ChoiceFor(size_t i, int32_t wanted) const {
    const RotationCost granted =
        WithShare(after_[i].whole_link, ShareLeft(after_, link_shares_, i));
    return ChooseRotation(WithHeadroom(granted, rules_.headroom), rules_.slots, wanted);
  }

  void Apply(size_t i, const RotationChoice& choice) {
    gained_ += Slabs(i, choice.freed) - Slabs(i, after_[i].freed);
    after_[i].freed = choice.freed;
    after_[i].slots = choice.slots;
    choices_[i] = choice;
  }

  // Whether a is the better tenant to take the next layer from.
  struct Offer {
    size_t tenant = 0;
    RotationChoice choice;
    int64_t slabs = 0;
  };
  bool Better(const Offer& a, const Offer& b) const {
    const int32_t a_priority = before_[a.tenant].priority;
    const int32_t b_priority = before_[b.tenant].priority;
    if (a_priority != b_priority) return a_priority < b_priority;
    const int64_t rest = need_ - gained_;
    const bool a_covers = a.slabs >= rest;
    const bool b_covers = b.slabs >= rest;
    if (a_covers != b_covers) return a_covers;
    if (a_covers && a.slabs != b.slabs) return a.slabs < b.slabs;
    return a.choice.copy_seconds * b.choice.longest_copy_seconds <
           b.choice.copy_seconds * a.choice.longest_copy_seconds;
  }

  bool TakeOne() {
    std::optional<Offer> best;
    for (size_t i = 0; i < after_.size(); ++i) {
      const RotationChoice choice = ChoiceFor(i, after_[i].freed + 1);
      if (choice.freed <= after_[i].freed) continue;
      const Offer offer{.tenant = i,
                        .choice = choice,
                        .slabs = Slabs(i, choice.freed) - Slabs(i, after_[i].freed)};
      if (offer.slabs > 0 && (!best.has_value() || Better(offer, *best))) best = offer;
    }
    if (best.has_value()) Apply(best->tenant, best->choice);
    return best.has_value();
  }

  void LeaveWhatIsNotNeeded() {
    std::vector<size_t> order(after_.size());
    for (size_t i = 0; i < order.size(); ++i) order[i] = i;
    std::stable_sort(order.begin(), order.end(), [this](size_t a, size_t b) {
      return before_[a].priority > before_[b].priority;
    });
    for (const size_t i : order) {
      const int32_t stage_slabs = before_[i].whole_link.stage_slabs;
      if (after_[i].freed == before_[i].freed || gained_ <= need_) continue;
      const auto back = static_cast<int32_t>(
          std::min<int64_t>((gained_ - need_) / stage_slabs, after_[i].freed - before_[i].freed));
      const int32_t least = after_[i].freed - back;
      if (least == before_[i].freed) {
        gained_ -= Slabs(i, after_[i].freed);
        after_[i] = before_[i];
        continue;
      }
      const RotationChoice choice = ChoiceFor(i, least);
      if (choice.freed >= least && choice.freed < after_[i].freed) Apply(i, choice);
    }
  }

  const absl::Span<const RotatingTenant> before_;
  const absl::Span<const double> link_shares_;
  const RotationRules& rules_;
  const int64_t need_;
  std::vector<RotatingTenant> after_;
  std::vector<RotationChoice> choices_ = std::vector<RotationChoice>(after_.size());
  int64_t gained_ = 0;
};

}  // namespace

std::vector<RotationTake> PlanRotations(absl::Span<const RotatingTenant> tenants,
                                        absl::Span<const double> link_shares,
                                        const RotationRules& rules, int64_t need) {
  return RotationPlanner(tenants, link_shares, rules, need).Run();
}

double ShareLeft(absl::Span<const RotatingTenant> tenants, absl::Span<const double> link_shares,
                 size_t index) {
  double left = link_shares[tenants[index].link];
  for (size_t i = 0; i < tenants.size(); ++i) {
    const RotatingTenant& other = tenants[i];
    if (i == index || other.link != tenants[index].link) continue;
    left -= ShareNeeded(other.whole_link, other.freed, other.slots);
  }
  return std::clamp(left, 0.0, 1.0);
}

absl::string_view ReversionReasonName(ReversionReason reason) {
  switch (reason) {
    case ReversionReason::kNone:
      return "none";
    case ReversionReason::kTooSlow:
      return "too_slow";
    case ReversionReason::kCap:
      return "cap";
    case ReversionReason::kDemandFell:
      return "demand_fell";
  }
  return "invalid";
}

Reversion ChooseReversion(const RotationCost& granted, const RotationRules& rules, int32_t freed,
                          int32_t slots, int64_t spare_slabs) {
  const RotationCost careful = WithHeadroom(granted, rules.headroom);
  const bool above_cap = freed > granted.cap_freed;
  const bool measured = granted.step_seconds > 0 && granted.link_bytes_per_second > 0;
  if (above_cap || (measured && !Overlaps(granted, freed, slots))) {
    RotationCost less = careful;
    less.cap_freed = std::min(granted.cap_freed, freed - 1);
    return {.reason = above_cap ? ReversionReason::kCap : ReversionReason::kTooSlow,
            .to = ChooseRotation(less, rules.slots)};
  }
  if (granted.stage_slabs <= 0) return {};
  const int64_t paid = std::min<int64_t>(spare_slabs / granted.stage_slabs, freed);
  if (paid <= 0) return {};
  const auto wanted = static_cast<int32_t>(freed - paid);
  RotationChoice to = ChooseRotation(careful, rules.slots, wanted);
  // What rotates now may not be allowed with headroom either.
  if (to.freed < wanted) to = ChooseRotation(granted, rules.slots, wanted);
  if (to.freed < wanted || to.freed >= freed) return {};
  return {.reason = ReversionReason::kDemandFell, .to = to};
}

bool Persistence::Observe(bool holds, absl::Time now, absl::Duration delay) {
  if (!holds) {
    since_.reset();
    return false;
  }
  if (!since_.has_value()) since_ = now;
  return now >= *since_ + delay;
}

absl::Time Persistence::Due(absl::Duration delay) const {
  return since_.has_value() ? *since_ + delay : absl::InfiniteFuture();
}

}  // namespace palimpsest
