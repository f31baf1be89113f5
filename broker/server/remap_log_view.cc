#include "broker/server/remap_log_view.h"

#include <algorithm>
#include <vector>

#include "broker/core/arbiter.h"

namespace palimpsest {
namespace {

constexpr uint32_t kUsualLimit = 100;

void Fill(const RotationInputs& inputs, v1::RotationInputs& out) {
  out.set_layers(inputs.cost.layers);
  out.set_layer_bytes(static_cast<uint64_t>(inputs.cost.layer_bytes.count()));
  out.set_cap_freed(inputs.cost.cap_freed);
  out.set_step_seconds(inputs.cost.step_seconds);
  out.set_link_bytes_per_second(inputs.cost.link_bytes_per_second);
  out.set_link_share(inputs.link_share);
  out.set_copy_seconds(inputs.choice.copy_seconds);
  out.set_longest_copy_seconds(inputs.choice.longest_copy_seconds);
  out.set_freed_before(inputs.freed_before);
  out.set_slots_before(inputs.slots_before);
  out.set_freed_after(inputs.choice.freed);
  out.set_slots_after(inputs.choice.slots);
  out.set_limit(std::string(RotationLimitName(inputs.choice.limit)));
}

void FillTotals(const RemapLog& log, v1::GetRemapLogResponse& out) {
  for (size_t r = 0; r < kRemapRules; ++r) {
    for (size_t o = 0; o < kRemapOutcomes; ++o) {
      const auto rule = static_cast<RemapRule>(r);
      const auto outcome = static_cast<RemapOutcome>(o);
      const RemapLog::Total& total = log.total(rule, outcome);
      if (total.candidates == 0) continue;
      v1::RemapTotal& row = *out.add_totals();
      row.set_rule(std::string(RemapRuleName(rule)));
      row.set_outcome(std::string(RemapOutcomeName(outcome)));
      row.set_candidates(total.candidates);
      row.set_slabs(total.slabs);
    }
  }
}

}  // namespace

v1::GetRemapLogResponse RemapLogView(const RemapLog& log, const v1::GetRemapLogRequest& request,
                                     const std::function<const std::string&(TenantId)>& name,
                                     absl::Duration wall) {
  const size_t limit = request.limit() == 0 ? kUsualLimit : request.limit();
  const auto concerns = [&](const RemapDecision& decision) {
    if (request.tenant().empty() || name(decision.requester) == request.tenant()) return true;
    return std::any_of(decision.candidates.begin(), decision.candidates.end(),
                       [&](const RemapCandidate& candidate) {
                         return name(candidate.tenant) == request.tenant();
                       });
  };
  std::vector<const RemapDecision*> chosen;
  for (auto decision = log.decisions().rbegin();
       decision != log.decisions().rend() && chosen.size() < limit; ++decision) {
    if (decision->sequence <= request.after_sequence()) break;
    if (concerns(*decision)) chosen.push_back(&*decision);
  }
  v1::GetRemapLogResponse response;
  for (auto decision = chosen.rbegin(); decision != chosen.rend(); ++decision) {
    v1::RemapDecision& out = *response.add_decisions();
    out.set_sequence((*decision)->sequence);
    out.set_decided_at(absl::ToDoubleSeconds((*decision)->at + wall - absl::UnixEpoch()));
    out.set_repeats((*decision)->repeats);
    out.set_tenant(name((*decision)->requester));
    out.set_reason(std::string(MoveReasonName((*decision)->reason)));
    out.set_wanted_slabs((*decision)->wanted);
    out.set_planned_slabs((*decision)->planned);
    for (const RemapCandidate& candidate : (*decision)->candidates) {
      v1::RemapCandidate& row = *out.add_candidates();
      row.set_tenant(name(candidate.tenant));
      row.set_rule(std::string(RemapRuleName(candidate.rule)));
      row.set_outcome(std::string(RemapOutcomeName(candidate.outcome)));
      row.set_slabs(candidate.slabs);
      row.set_priority(candidate.priority);
      row.set_idle_seconds(absl::ToDoubleSeconds(candidate.idle));
      row.set_next_use_seconds(absl::ToDoubleSeconds(candidate.next_use));
      row.set_reload_seconds(absl::ToDoubleSeconds(candidate.reload));
      row.set_score(candidate.score);
      if (candidate.rotation.has_value()) Fill(*candidate.rotation, *row.mutable_rotation());
    }
  }
  FillTotals(log, response);
  return response;
}

}  // namespace palimpsest
