// The router's proof towards a worker: metadata `authorization: Bearer TOKEN`.
#ifndef PALIMPSEST_WORKER_SERVER_ROUTER_TOKEN_H_
#define PALIMPSEST_WORKER_SERVER_ROUTER_TOKEN_H_

#include <grpcpp/server_context.h>

#include "absl/status/status.h"
#include "common/secret_file.h"

namespace palimpsest {

// Unauthenticated unless the call presents one of `tokens`, once.
absl::Status CheckRouterToken(const grpc::ServerContextBase& context, const SecretFile& tokens);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_ROUTER_TOKEN_H_
