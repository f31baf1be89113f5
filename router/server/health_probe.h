// One grpc.health.v1.Health/Check of a whole server, without generated code: the request is empty
// and the answer is one enum.
#ifndef PALIMPSEST_ROUTER_SERVER_HEALTH_PROBE_H_
#define PALIMPSEST_ROUTER_SERVER_HEALTH_PROBE_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/support/byte_buffer.h>

#include <functional>
#include <memory>

#include "absl/status/status.h"

namespace palimpsest::router {

// Lives until its callback was called. Not thread-safe.
class HealthProbe {
 public:
  explicit HealthProbe(const std::shared_ptr<grpc::Channel>& channel) : stub_(channel) {}

  // `done` gets OK if the server says SERVING, FAILED_PRECONDITION if it answers anything else, and
  // UNAVAILABLE if no answer comes. `context` holds the deadline and must live until then.
  void Check(grpc::ClientContext* context, std::function<void(absl::Status)> done);

 private:
  grpc::GenericStub stub_;
  grpc::ByteBuffer request_;
  grpc::ByteBuffer response_;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_HEALTH_PROBE_H_
