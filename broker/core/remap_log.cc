#include "broker/core/remap_log.h"

#include <algorithm>
#include <utility>

namespace palimpsest {
namespace {

// Demands that may be unmet at the same time, each of which is looked at with every event.
constexpr size_t kLookBack = 64;

// Whether b only says again what a did: nothing was found, by the same rules.
bool Repeats(const RemapDecision& a, const RemapDecision& b) {
  if (a.requester != b.requester || a.reason != b.reason || a.planned > 0 || b.planned > 0) {
    return false;
  }
  return std::equal(a.candidates.begin(), a.candidates.end(), b.candidates.begin(),
                    b.candidates.end(), [](const RemapCandidate& x, const RemapCandidate& y) {
                      return x.tenant == y.tenant && x.rule == y.rule && x.outcome == y.outcome;
                    });
}

}  // namespace

absl::string_view RemapRuleName(RemapRule rule) {
  switch (rule) {
    case RemapRule::kSurplusKv:
      return "surplus_kv";
    case RemapRule::kInactiveParameters:
      return "inactive_parameters";
    case RemapRule::kCachedKv:
      return "cached_kv";
    case RemapRule::kSilentKv:
      return "silent_kv";
    case RemapRule::kRotation:
      return "rotation";
    case RemapRule::kKvByForce:
      return "kv_by_force";
    case RemapRule::kOwnKv:
      return "own_kv";
    case RemapRule::kBestEffortParameters:
      return "best_effort_parameters";
    case RemapRule::kReversion:
      return "reversion";
  }
  return "invalid";
}

absl::string_view RemapOutcomeName(RemapOutcome outcome) {
  switch (outcome) {
    case RemapOutcome::kTaken:
      return "taken";
    case RemapOutcome::kNotNeeded:
      return "not_needed";
    case RemapOutcome::kPinned:
      return "pinned";
    case RemapOutcome::kJustRestored:
      return "just_restored";
    case RemapOutcome::kArriving:
      return "arriving";
    case RemapOutcome::kRecentlyActive:
      return "recently_active";
    case RemapOutcome::kActive:
      return "active";
    case RemapOutcome::kNotHidden:
      return "not_hidden";
    case RemapOutcome::kNotEnough:
      return "not_enough";
  }
  return "invalid";
}

void RemapLog::Add(RemapDecision decision) {
  // The last word about this demand, unless something was moved for it since.
  size_t looked = 0;
  for (auto known = decisions_.rbegin(); known != decisions_.rend() && looked < kLookBack;
       ++known, ++looked) {
    if (known->requester != decision.requester || known->reason != decision.reason) continue;
    if (!Repeats(*known, decision)) break;
    ++known->repeats;
    known->at = decision.at;
    known->wanted = decision.wanted;
    return;
  }
  for (const RemapCandidate& candidate : decision.candidates) {
    Total& total =
        totals_[static_cast<size_t>(candidate.rule)][static_cast<size_t>(candidate.outcome)];
    ++total.candidates;
    total.slabs += candidate.slabs;
  }
  decision.sequence = ++sequence_;
  if (decisions_.size() == kKept) decisions_.pop_front();
  decisions_.push_back(std::move(decision));
}

}  // namespace palimpsest
