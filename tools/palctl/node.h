// Where a node's processes listen, and connections to them.
#ifndef PALIMPSEST_TOOLS_PALCTL_NODE_H_
#define PALIMPSEST_TOOLS_PALCTL_NODE_H_

#include <grpcpp/channel.h>
#include <grpcpp/client_context.h>
#include <grpcpp/support/status.h>

#include <map>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "proto/palimpsest/v1/block_store.grpc.pb.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"
#include "proto/palimpsest/v1/router.grpc.pb.h"

namespace palimpsest::palctl {

// The content of a node file:
//
//   broker: broker.sock             # the broker's control socket
//   operator: state/operator.sock   # the broker's socket for operators, in its state_dir
//   router: 127.0.0.1:9100
//   tokens: {alpha: secrets/alpha.token}
//   tls_ca: ca.pem                  # the router listens with TLS, and this signed its certificate
//   server_name: router.example     # the name in that certificate, if the address has another
//
// Paths are relative to the file's folder. Every key may be missing.
struct NodeAddresses {
  std::string broker_socket;
  std::string operator_socket;
  std::string router;
  std::map<std::string, std::string> token_files;  // by tenant
  std::string token;                               // given as a flag; used for every tenant
  std::string tls_ca;       // PEM file of the authorities that the router's certificate may be from
  std::string server_name;  // expected in the certificate; empty: the router's host
  std::string tls_roots;    // what `tls_ca` holds; empty: no TLS
};

absl::StatusOr<NodeAddresses> ReadNodeFile(const std::string& path);

// Of deploy/local/node.yaml, ~/.config/palimpsest/node.yaml and ~/.cache/palimpsest/local/node.yaml
// (tools/quickstart) the first whose broker socket exists, else the first that exists; empty if
// none does.
std::string DefaultNodeFile();

// Connections are made when first used. Thread-safe after construction.
class Node {
 public:
  explicit Node(NodeAddresses addresses);

  const NodeAddresses& addresses() const { return addresses_; }

  // FAILED_PRECONDITION if the node file and the flags name none.
  absl::StatusOr<v1::Broker::Stub*> broker() const;
  absl::StatusOr<v1::Router::Stub*> router() const;
  absl::StatusOr<v1::BlockAdmin::Stub*> block_admin() const;

  // The tenant's bearer token.
  absl::StatusOr<std::string> Token(const std::string& tenant) const;
  // Adds it to a call to the router.
  absl::Status Authorize(const std::string& tenant, grpc::ClientContext& context) const;

  // The only tenant that has a token; INVALID_ARGUMENT if there are several.
  absl::StatusOr<std::string> OnlyTenant() const;

  // The error of a call, with what to do about it.
  absl::Status BrokerError(const grpc::Status& status) const;
  absl::Status OperatorError(const grpc::Status& status) const;
  absl::Status RouterError(const grpc::Status& status) const;

 private:
  NodeAddresses addresses_;
  std::unique_ptr<v1::Broker::Stub> broker_;
  std::unique_ptr<v1::Router::Stub> router_;
  std::unique_ptr<v1::BlockAdmin::Stub> block_admin_;
};

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_NODE_H_
