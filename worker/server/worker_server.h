// A worker's gRPC server: the worker service, health (grpc.health.v1) and reflection. It is healthy
// (SERVING) while the session with the broker stands and the worker is not draining.
//
// Threads: thread-safe. Shutdown blocks.
#ifndef PALIMPSEST_WORKER_SERVER_WORKER_SERVER_H_
#define PALIMPSEST_WORKER_SERVER_WORKER_SERVER_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/mutex.h"
#include "worker/server/listen_socket.h"

namespace palimpsest {

class WorkerServer {
 public:
  WorkerServer() = default;
  // Shuts down at once.
  ~WorkerServer();

  // `service` must outlive the server. FailedPrecondition: `address` cannot be bound.
  absl::Status Start(const std::string& address, grpc::Service* service);

  // Takes its connections from a socket that somebody else listens on, and that outlives the
  // server.
  absl::Status StartOn(int listen_socket, const std::string& address, grpc::Service* service);
  // StartOn: takes no more connections; those that stand go on.
  void StopListening();

  // With the port that was taken.
  const std::string& address() const { return address_; }

  // May be called before Start.
  void SetConnected(bool connected);
  void SetDraining();

  // Accepts no more calls, and cancels those that are left after `patience`.
  void Shutdown(absl::Duration patience);

 private:
  absl::Status Build(grpc::ServerBuilder& builder, grpc::Service* service);
  void ShowHealth() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  std::string address_;
  std::unique_ptr<ConnectionTaker> taker_;
  std::unique_ptr<grpc::Server> server_;

  Mutex mutex_;
  bool connected_ ABSL_GUARDED_BY(mutex_) = false;
  bool draining_ ABSL_GUARDED_BY(mutex_) = false;
  grpc::HealthCheckServiceInterface* health_ ABSL_GUARDED_BY(mutex_) = nullptr;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_WORKER_SERVER_H_
