// Admission (router/core/admission.h) for many threads: calls back when a request may start.
//
// Threads: all methods are thread-safe and do not block. One thread of its own expires waiting
// requests. Callbacks run on the thread that made the decision possible, without a lock held.
#ifndef PALIMPSEST_ROUTER_SERVER_ADMISSION_GATE_H_
#define PALIMPSEST_ROUTER_SERVER_ADMISSION_GATE_H_

#include <functional>
#include <map>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "router/core/admission.h"

namespace palimpsest::router {

class AdmissionGate {
 public:
  // Called once, possibly before Enter returns: OK when the request may start.
  using Callback = std::function<void(TicketId, absl::Status)>;

  // `clock` must outlive the gate.
  AdmissionGate(int32_t total_in_flight, const std::map<std::string, AdmissionLimits>& tenants,
                const Clock& clock);
  // Drops the callbacks of requests that still wait.
  ~AdmissionGate();

  // See Admission::Enter. Every admitted ticket must Leave; one that was refused or
  // abandoned need not.
  absl::StatusOr<TicketId> Enter(absl::string_view tenant, absl::Time deadline, Callback callback);

  // Ends an admitted request.
  void Leave(TicketId ticket);

  // Gives up waiting. True if the ticket still waited: its callback will not be called.
  bool Abandon(TicketId ticket);

  AdmissionLoad Load(absl::string_view tenant) const;
  int32_t total_in_flight() const;

  // Expires and admits; the gate's thread calls it when something is due.
  void RunOnce();

 private:
  struct Ready {
    Callback callback;
    AdmissionDecision decision;
  };

  std::vector<Ready> DecideLocked() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Deliver(std::vector<Ready> ready);
  void ExpireLoop();

  const Clock& clock_;
  mutable Mutex mutex_;
  CondVar changed_;
  Admission admission_ ABSL_GUARDED_BY(mutex_);
  std::unordered_map<uint64_t, Callback> waiting_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_ADMISSION_GATE_H_
