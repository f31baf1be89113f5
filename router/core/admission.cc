#include "router/core/admission.h"

#include <algorithm>

#include "absl/strings/str_cat.h"

namespace palimpsest::router {

Admission::Admission(int32_t total_in_flight, const std::map<std::string, AdmissionLimits>& tenants)
    : limit_(total_in_flight) {
  for (const auto& [name, limits] : tenants) {
    index_.emplace(name, tenants_.size());
    tenants_.push_back(Tenant{name, limits});
  }
}

bool Admission::HasRoom(const Tenant& tenant) const {
  return in_flight_ < limit_ && tenant.in_flight < tenant.limits.in_flight;
}

absl::StatusOr<TicketId> Admission::Enter(absl::string_view tenant, absl::Time now,
                                          absl::Time deadline) {
  const auto found = index_.find(tenant);
  if (found == index_.end()) {
    return absl::NotFoundError(absl::StrCat("no tenant '", tenant, "' is configured"));
  }
  if (deadline <= now) return absl::DeadlineExceededError("the deadline passed before admission");
  Tenant& entered = tenants_[found->second];
  const bool at_once = entered.waiting.empty() && HasRoom(entered);
  const auto waiting = static_cast<int32_t>(entered.waiting.size());
  if (!at_once && waiting >= entered.limits.queue) {
    return absl::ResourceExhaustedError(
        absl::StrCat("tenant '", tenant, "' has ", entered.in_flight, " requests in flight (limit ",
                     entered.limits.in_flight, ") and ", waiting, " waiting (limit ",
                     entered.limits.queue, "): try again later"));
  }
  const TicketId id(next_ticket_++);
  const absl::Time timeout = now + entered.limits.queue_timeout;
  const Ticket ticket{found->second, false, std::min(deadline, timeout), deadline <= timeout};
  entered.waiting.push_back(id);
  expiries_.emplace(ticket.expiry, id);
  tickets_.emplace(id.value(), ticket);
  return id;
}

void Admission::RemoveWaiting(TicketId id, const Ticket& ticket) {
  std::deque<TicketId>& waiting = tenants_[ticket.tenant].waiting;
  waiting.erase(std::find(waiting.begin(), waiting.end(), id));
  expiries_.erase({ticket.expiry, id});
}

void Admission::Leave(TicketId id) {
  const auto found = tickets_.find(id.value());
  if (found == tickets_.end()) return;
  if (found->second.admitted) {
    --in_flight_;
    --tenants_[found->second.tenant].in_flight;
  } else {
    RemoveWaiting(id, found->second);
  }
  tickets_.erase(found);
}

absl::Status Admission::ExpiredError(const Ticket& ticket) const {
  const Tenant& tenant = tenants_[ticket.tenant];
  if (ticket.own_deadline) {
    return absl::DeadlineExceededError(
        absl::StrCat("the deadline passed while the request waited for one of tenant '",
                     tenant.name, "''s ", tenant.limits.in_flight, " places"));
  }
  return absl::ResourceExhaustedError(absl::StrCat(
      "waited ", absl::FormatDuration(tenant.limits.queue_timeout), " for one of tenant '",
      tenant.name, "''s ", tenant.limits.in_flight, " places: try again later"));
}

std::vector<AdmissionDecision> Admission::RunOnce(absl::Time now) {
  std::vector<AdmissionDecision> decisions;
  while (!expiries_.empty() && expiries_.begin()->first <= now) {
    const TicketId id = expiries_.begin()->second;
    const Ticket ticket = tickets_.at(id.value());
    RemoveWaiting(id, ticket);
    tickets_.erase(id.value());
    decisions.push_back({id, ExpiredError(ticket)});
  }
  // Ends after a whole round in which no tenant had both a waiting request and room.
  for (size_t idle = 0; idle < tenants_.size();) {
    Tenant& tenant = tenants_[next_turn_];
    if (tenant.waiting.empty() || !HasRoom(tenant)) {
      if (in_flight_ >= limit_) break;  // whose turn it is stays
      next_turn_ = (next_turn_ + 1) % tenants_.size();
      ++idle;
      continue;
    }
    const TicketId id = tenant.waiting.front();
    Ticket& ticket = tickets_.at(id.value());
    RemoveWaiting(id, ticket);
    ticket.admitted = true;
    ++tenant.in_flight;
    ++in_flight_;
    decisions.push_back({id, absl::OkStatus()});
    next_turn_ = (next_turn_ + 1) % tenants_.size();
    idle = 0;
  }
  return decisions;
}

absl::Time Admission::NextExpiry() const {
  return expiries_.empty() ? absl::InfiniteFuture() : expiries_.begin()->first;
}

AdmissionLoad Admission::Load(absl::string_view tenant) const {
  const auto found = index_.find(tenant);
  if (found == index_.end()) return {};
  const Tenant& loaded = tenants_[found->second];
  return {loaded.in_flight, static_cast<int32_t>(loaded.waiting.size())};
}

}  // namespace palimpsest::router
