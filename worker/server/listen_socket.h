// A listening socket that outlives the gRPC servers behind it: one process binds it, and whoever
// serves at the moment takes its connections and hands them to its own server. Connections that
// come while nobody takes any wait in the kernel's queue; they are never refused.
#ifndef PALIMPSEST_WORKER_SERVER_LISTEN_SOCKET_H_
#define PALIMPSEST_WORKER_SERVER_LISTEN_SOCKET_H_

#include <grpcpp/server_builder.h>

#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "common/fd.h"

namespace palimpsest {

struct ListenSocket {
  UniqueFd socket;
  // As given, with the port that was taken. Also how this machine reaches it.
  std::string address;
};

// `address` is HOST:PORT (port 0: any) or unix:PATH; a socket file that nobody listens on is
// replaced. FailedPrecondition: it cannot be bound.
absl::StatusOr<ListenSocket> Listen(const std::string& address);

// Takes connections of a listening socket and gives them to a gRPC server, on a thread of its own.
// Made before the server is built, started afterwards; must end before the server does.
class ConnectionTaker {
 public:
  // Makes `builder`'s server take connections from here. `socket` must outlive this.
  ConnectionTaker(int socket, grpc::ServerBuilder& builder);
  // Stops.
  ~ConnectionTaker();

  absl::Status Start();
  // No connection is taken from now on; idempotent.
  void Stop();

 private:
  void Run();

  const int socket_;
  std::unique_ptr<grpc::experimental::ExternalConnectionAcceptor> acceptor_;
  UniqueFd stop_;  // an eventfd
  std::thread thread_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_LISTEN_SOCKET_H_
