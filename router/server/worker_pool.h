// The router's connections to its workers: one channel each, health checks, and the directory of
// who can take a request (router/core/worker_directory.h). Targets that are names are resolved
// again and again, and each of their addresses is a worker.
//
// Threads: all methods are thread-safe; none blocks but Start and the destructor. Callbacks run on
// gRPC's threads.
//
// Legal order: Start once, before or while the router serves. Destroy only after every call made
// through stub() has ended.
#ifndef PALIMPSEST_ROUTER_SERVER_WORKER_POOL_H_
#define PALIMPSEST_ROUTER_SERVER_WORKER_POOL_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>

#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/clock.h"
#include "common/mutex.h"
#include "common/secret_file.h"
#include "proto/palimpsest/v1/worker.grpc.pb.h"
#include "router/core/worker_directory.h"
#include "router/server/name_resolver.h"

namespace palimpsest::router {

struct WorkerPoolOptions {
  // The targets of the configuration.
  std::vector<WorkerEndpoint> workers;
  // Its first secret is sent to workers as `authorization: Bearer <secret>`; null sends none.
  std::shared_ptr<const SecretFile> token;
  // Each worker is polled every interval, give or take a fifth; a poll fails after `timeout`.
  absl::Duration interval = absl::Seconds(1);
  absl::Duration timeout = absl::Seconds(2);
  absl::Duration resolve_interval = absl::Seconds(5);
  NameResolver::Lookup lookup = LookUp;
};

class WorkerPool {
 public:
  // `clock` must outlive the pool.
  WorkerPool(WorkerPoolOptions options, const Clock& clock);
  // Cancels the polls in flight and waits for them.
  ~WorkerPool();

  // Starts to resolve names, and the thread that polls the workers, at once and then at intervals.
  void Start();

  // See WorkerDirectory.
  absl::StatusOr<WorkerId> Choose(absl::string_view tenant, absl::string_view model,
                                  const PlacementRequest& request,
                                  absl::Span<const WorkerId> excluded);
  void Finished(WorkerId worker);
  void ReportFailure(WorkerId worker, const absl::Status& status);
  absl::Time SilentSince(WorkerId worker) const;
  std::vector<WorkerView> List() const;
  std::vector<WorkerView> ListTenant(absl::string_view tenant) const;

  // Longest sequence that every polled worker of the model serves, in tokens; 0 if none answered
  // yet.
  int32_t MaxSequenceTokens(absl::string_view tenant, absl::string_view model) const;

  // Of a worker that has a request.
  std::shared_ptr<v1::Worker::Stub> stub(WorkerId worker) const;

  // Of the model's workers that are healthy, draining or not.
  std::vector<std::shared_ptr<v1::Worker::Stub>> HealthyStubs(absl::string_view tenant,
                                                              absl::string_view model) const;

  // Adds the router's credentials.
  void Authorize(grpc::ClientContext& context) const;

  // Stops sending requests to the tenant's workers and asks them to drain. `done` gets the requests
  // that still ran at `deadline`, or UNAVAILABLE naming the workers that could not be asked.
  void DrainTenant(absl::string_view tenant, absl::Time deadline,
                   std::function<void(absl::StatusOr<int32_t>)> done);

 private:
  struct Connection {
    std::shared_ptr<grpc::Channel> channel;
    std::shared_ptr<v1::Worker::Stub> stub;
    WorkerEndpoint endpoint;
    absl::Time next_poll = absl::InfinitePast();
    bool polling = false;
  };
  class Poll;
  struct DrainCall;
  struct Drain;

  void OnResolved(size_t name, const absl::StatusOr<std::vector<std::string>>& found)
      ABSL_LOCKS_EXCLUDED(mutex_);
  void SetAddresses(size_t target, const std::vector<std::string>& addresses)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DropGone() ABSL_LOCKS_EXCLUDED(mutex_);

  // Starts the polls that are due; returns when the next one is.
  absl::Time StartDuePolls() ABSL_LOCKS_EXCLUDED(mutex_);
  void PollEnded(Poll* poll, const PollResult& result) ABSL_LOCKS_EXCLUDED(mutex_);
  void PollLoop();
  void DrainAnswered(DrainCall& call, const grpc::Status& status) ABSL_LOCKS_EXCLUDED(mutex_);

  const WorkerPoolOptions options_;
  const Clock& clock_;
  // The names to resolve, the targets that each stands for, and what was found last.
  struct Name {
    HostPort name;
    std::vector<size_t> targets;
    absl::Status problem;
    std::vector<std::string> addresses;
  };

  mutable Mutex mutex_;
  CondVar changed_;
  WorkerDirectory directory_ ABSL_GUARDED_BY(mutex_);
  std::map<WorkerId, Connection> connections_ ABSL_GUARDED_BY(mutex_);
  std::vector<Name> names_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::shared_ptr<Poll>> polls_ ABSL_GUARDED_BY(mutex_);
  std::minstd_rand jitter_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
  std::unique_ptr<NameResolver> resolver_;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_WORKER_POOL_H_
