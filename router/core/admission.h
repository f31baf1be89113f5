// Who may start now, who waits and who is turned away: bounded requests in flight and a bounded
// queue with a deadline for each tenant, and one limit for all tenants together. Pure: the caller
// passes the time and carries the decisions out.
//
// Fairness: within a tenant first come, first served; when the common limit binds, tenants that
// have waiting requests and room of their own take turns.
//
// Legal order: Enter, then RunOnce, which decides at once or later; then Leave exactly once for
// every ticket that was entered, admitted or not, unless RunOnce reported an error for it. Call
// RunOnce after each Enter and Leave, and at NextExpiry().
//
// Threads: none of its own; the caller serialises.
#ifndef PALIMPSEST_ROUTER_CORE_ADMISSION_H_
#define PALIMPSEST_ROUTER_CORE_ADMISSION_H_

#include <cstdint>
#include <deque>
#include <map>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/strong_int.h"

namespace palimpsest::router {

using TicketId = StrongInt<struct TicketIdTag, uint64_t>;

struct AdmissionLimits {
  int32_t in_flight = 1;
  int32_t queue = 0;
  absl::Duration queue_timeout;
};

struct AdmissionLoad {
  int32_t in_flight = 0;
  int32_t waiting = 0;
};

// OK: the ticket is admitted. RESOURCE_EXHAUSTED: its queue timeout passed. DEADLINE_EXCEEDED: its
// own deadline passed. After an error the ticket is gone.
struct AdmissionDecision {
  TicketId ticket;
  absl::Status status;
};

class Admission {
 public:
  Admission(int32_t total_in_flight, const std::map<std::string, AdmissionLimits>& tenants);

  // RESOURCE_EXHAUSTED if the tenant's queue is full, DEADLINE_EXCEEDED if `deadline` has passed,
  // NOT_FOUND if there is no such tenant. Otherwise the ticket waits for RunOnce.
  absl::StatusOr<TicketId> Enter(absl::string_view tenant, absl::Time now, absl::Time deadline);

  // Ends an admitted request or abandons a waiting one. Unknown tickets are ignored, so that a
  // caller may abandon while a decision is on its way.
  void Leave(TicketId ticket);

  // Expires first, then admits, so that a place is never given to a request that is already late.
  std::vector<AdmissionDecision> RunOnce(absl::Time now);

  // When RunOnce has something to expire; InfiniteFuture if nobody waits.
  absl::Time NextExpiry() const;

  AdmissionLoad Load(absl::string_view tenant) const;
  int32_t total_in_flight() const { return in_flight_; }

 private:
  struct Tenant {
    std::string name;
    AdmissionLimits limits;
    int32_t in_flight = 0;
    std::deque<TicketId> waiting;
  };
  struct Ticket {
    size_t tenant = 0;
    bool admitted = false;
    absl::Time expiry;
    bool own_deadline = false;
  };

  bool HasRoom(const Tenant& tenant) const;
  absl::Status ExpiredError(const Ticket& ticket) const;
  void RemoveWaiting(TicketId id, const Ticket& ticket);

  const int32_t limit_;
  int32_t in_flight_ = 0;
  uint64_t next_ticket_ = 1;
  size_t next_turn_ = 0;
  std::vector<Tenant> tenants_;
  std::map<std::string, size_t, std::less<>> index_;
  std::unordered_map<uint64_t, Ticket> tickets_;
  std::set<std::pair<absl::Time, TicketId>> expiries_;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_CORE_ADMISSION_H_
