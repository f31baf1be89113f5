#include "router/server/admission_gate.h"

#include <utility>

namespace palimpsest::router {

AdmissionGate::AdmissionGate(int32_t total_in_flight,
                             const std::map<std::string, AdmissionLimits>& tenants,
                             const Clock& clock)
    : clock_(clock), admission_(total_in_flight, tenants), thread_([this] { ExpireLoop(); }) {}

AdmissionGate::~AdmissionGate() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
  }
  thread_.join();
}

absl::StatusOr<TicketId> AdmissionGate::Enter(absl::string_view tenant, absl::Time deadline,
                                              Callback callback) {
  absl::StatusOr<TicketId> ticket;
  std::vector<Ready> ready;
  {
    MutexLock lock(&mutex_);
    ticket = admission_.Enter(tenant, clock_.Now(), deadline);
    if (!ticket.ok()) return ticket;
    waiting_.emplace(ticket->value(), std::move(callback));
    ready = DecideLocked();
  }
  Deliver(std::move(ready));
  return ticket;
}

void AdmissionGate::Leave(TicketId ticket) {
  std::vector<Ready> ready;
  {
    MutexLock lock(&mutex_);
    admission_.Leave(ticket);
    ready = DecideLocked();
  }
  Deliver(std::move(ready));
}

bool AdmissionGate::Abandon(TicketId ticket) {
  MutexLock lock(&mutex_);
  if (waiting_.erase(ticket.value()) == 0) return false;
  admission_.Leave(ticket);
  return true;
}

AdmissionLoad AdmissionGate::Load(absl::string_view tenant) const {
  MutexLock lock(&mutex_);
  return admission_.Load(tenant);
}

int32_t AdmissionGate::total_in_flight() const {
  MutexLock lock(&mutex_);
  return admission_.total_in_flight();
}

void AdmissionGate::RunOnce() {
  std::vector<Ready> ready;
  {
    MutexLock lock(&mutex_);
    ready = DecideLocked();
  }
  Deliver(std::move(ready));
}

std::vector<AdmissionGate::Ready> AdmissionGate::DecideLocked() {
  const absl::Time before = admission_.NextExpiry();
  std::vector<Ready> ready;
  for (AdmissionDecision& decision : admission_.RunOnce(clock_.Now())) {
    const auto found = waiting_.find(decision.ticket.value());
    ready.push_back({std::move(found->second), std::move(decision)});
    waiting_.erase(found);
  }
  if (admission_.NextExpiry() <= before) changed_.Signal();
  return ready;
}

void AdmissionGate::Deliver(std::vector<Ready> ready) {
  for (Ready& entry : ready) {
    entry.callback(entry.decision.ticket, std::move(entry.decision.status));
  }
}

void AdmissionGate::ExpireLoop() {
  while (true) {
    {
      MutexLock lock(&mutex_);
      while (!stopping_ && admission_.NextExpiry() > clock_.Now()) {
        changed_.WaitWithTimeout(&mutex_, admission_.NextExpiry() - clock_.Now());
      }
      if (stopping_) return;
    }
    RunOnce();
  }
}

}  // namespace palimpsest::router
