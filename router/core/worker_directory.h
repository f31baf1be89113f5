// What the router knows about its workers: whose they are, whether they answer, whether they drain,
// and how many requests they have. Pure.
//
// A target of the configuration stands for one worker or, if it is a name, for as many as it has
// addresses; which these are is told by SetAddresses. A worker whose address no target of its
// tenant and model has any more leaves: it is not chosen, finishes what it has, and is forgotten.
//
// A worker is chosen only if its last health check passed, nothing has failed since, and it is not
// draining or leaving. Before its first check a worker is not chosen.
//
// Threads: none of its own; the caller serialises.
#ifndef PALIMPSEST_ROUTER_CORE_WORKER_DIRECTORY_H_
#define PALIMPSEST_ROUTER_CORE_WORKER_DIRECTORY_H_

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "router/core/conversation_homes.h"
#include "router/core/placement.h"

namespace palimpsest::router {

struct WorkerEndpoint {
  std::string tenant;
  std::string model;
  std::string address;  // gRPC target

  friend bool operator==(const WorkerEndpoint&, const WorkerEndpoint&) = default;
};

// A worker of a target, as SetAddresses made it.
struct NewWorker {
  WorkerId id;
  WorkerEndpoint endpoint;
};

struct WorkerView {
  WorkerId id;
  WorkerEndpoint endpoint;
  bool healthy = false;
  bool draining = false;
  int32_t outstanding = 0;
  PolledLoad load;
  std::string problem;  // why it is not healthy; empty if it is
};

// What one poll of a worker found. `draining` is the worker's own word.
struct PollResult {
  absl::Status status;
  // When the worker answered, be it that it does not serve; InfinitePast if it said nothing.
  absl::Time answered_at = absl::InfinitePast();
  bool draining = false;
  PolledLoad load;
};

class WorkerDirectory {
 public:
  // No target has an address yet.
  WorkerDirectory(std::vector<WorkerEndpoint> targets, std::unique_ptr<PlacementPolicy> policy);

  // The addresses that a target (by its index) has now; returns the workers that this added.
  std::vector<NewWorker> SetAddresses(size_t target, const std::vector<std::string>& addresses);
  // Why a target's addresses are not known, or not known any better than before.
  void SetProblem(size_t target, const absl::Status& status);
  // Forgets the workers that left and have no request, poll or drain any more; their ids do not
  // return. From then on every call that names them is a mistake, but for ReportFailure and
  // SilentSince.
  std::vector<WorkerId> TakeGone();

  // Chooses a worker outside `excluded` and counts the request as outstanding until Finished. The
  // next turn of its conversation is offered to that worker.
  // UNAVAILABLE says why nobody can take it.
  absl::StatusOr<WorkerId> Choose(absl::string_view tenant, absl::string_view model,
                                  const PlacementRequest& request,
                                  absl::Span<const WorkerId> excluded);
  void Finished(WorkerId worker);

  // A request found the worker gone: it is not chosen again before a poll succeeds that began after
  // this.
  void ReportFailure(WorkerId worker, const absl::Status& status);

  // A poll begins; hand its result back with the number returned here. A result that is older than
  // the newest applied one, or than a failure or drain, is ignored.
  uint64_t BeginPoll(WorkerId worker);
  void EndPoll(WorkerId worker, uint64_t poll, const PollResult& result);

  // When a worker that does not answer any more answered last. InfiniteFuture while it answers:
  // fewer than two polls in a row got nothing (one may have been lost while the router itself did
  // not run).
  absl::Time SilentSince(WorkerId worker) const;

  // From BeginDrain on the worker is not chosen. It returns to service when a poll that began after
  // EndDrain finds a worker that does not drain: another process at the same address.
  void BeginDrain(WorkerId worker);
  void EndDrain(WorkerId worker);

  WorkerView View(WorkerId worker) const;
  std::vector<WorkerView> List() const;
  std::vector<WorkerView> ListTenant(absl::string_view tenant) const;
  size_t size() const { return workers_.size(); }

 private:
  static constexpr size_t kMostConversations = 1 << 16;

  struct Target {
    WorkerEndpoint endpoint;
    std::vector<std::string> addresses;
    std::string problem = "its name is not resolved yet";
  };
  struct Worker {
    WorkerEndpoint endpoint;
    bool leaving = false;
    int32_t polls = 0;  // that have not ended
    bool healthy = false;
    bool draining = false;
    int32_t drain_calls = 0;
    int32_t outstanding = 0;
    PolledLoad load;
    uint64_t last_chosen = 0;
    uint64_t newest_poll = 0;  // the result applied last
    uint64_t stale_below = 0;  // results of polls before this one are ignored
    int32_t unanswered = 0;    // polls in a row
    absl::Time answered_at = absl::InfinitePast();
    std::string problem = "not checked yet";
  };

  Worker& At(WorkerId worker);
  bool IsListed(const WorkerEndpoint& endpoint) const;
  absl::Status NobodyError(absl::string_view tenant, absl::string_view model) const;

  std::vector<Target> targets_;
  std::map<WorkerId, Worker> workers_;
  uint32_t next_id_ = 0;
  std::unique_ptr<PlacementPolicy> policy_;
  ConversationHomes homes_{kMostConversations};
  uint64_t placements_ = 0;
  uint64_t polls_ = 0;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_CORE_WORKER_DIRECTORY_H_
