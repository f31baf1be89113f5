#include "tools/palctl/node.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <cstdlib>
#include <filesystem>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/file.h"
#include "common/grpc_status.h"
#include "common/yaml_config.h"

namespace palimpsest::palctl {
namespace {

constexpr size_t kMaxTenants = 1024;
constexpr size_t kMaxSocketPath = 107;  // sun_path of sockaddr_un

grpc::ChannelArguments Arguments() {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  return arguments;
}

std::shared_ptr<grpc::Channel> ConnectRouter(const NodeAddresses& addresses) {
  grpc::ChannelArguments arguments = Arguments();
  if (addresses.tls_roots.empty()) {
    return grpc::CreateCustomChannel(addresses.router, grpc::InsecureChannelCredentials(),
                                     arguments);
  }
  if (!addresses.server_name.empty()) arguments.SetSslTargetNameOverride(addresses.server_name);
  return grpc::CreateCustomChannel(
      addresses.router, grpc::SslCredentials({.pem_root_certs = addresses.tls_roots}), arguments);
}

// gRPC resolves relative socket paths itself, but its errors do not show against what.
std::string Resolve(const std::filesystem::path& folder, const std::string& path) {
  return path.empty() ? path : (folder / path).lexically_normal().string();
}

absl::Status Missing(absl::string_view what, absl::string_view flag) {
  return absl::FailedPreconditionError(
      absl::StrCat("no ", what, " is known: name a node file with --node, or give ", flag,
                   " (tools/quickstart --serve starts a node and prints its node file)"));
}

absl::Status CheckSocketPath(const std::string& path) {
  if (path.size() <= kMaxSocketPath) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the socket path '", path, "' is longer than ",
                                                 kMaxSocketPath,
                                                 " bytes, which Unix sockets do not allow"));
}

}  // namespace

absl::StatusOr<NodeAddresses> ReadNodeFile(const std::string& path) {
  absl::StatusOr<YamlConfig> yaml = YamlConfig::ReadFile(path);
  if (!yaml.ok()) return yaml.status();
  const std::filesystem::path folder = std::filesystem::absolute(path).parent_path();
  ConfigReader root = yaml->root();
  NodeAddresses addresses;
  addresses.broker_socket = Resolve(folder, root.String("broker", ""));
  addresses.operator_socket = Resolve(folder, root.String("operator", ""));
  addresses.router = root.String("router", "");
  addresses.tls_ca = Resolve(folder, root.String("tls_ca", ""));
  addresses.server_name = root.String("server_name", "");
  for (const auto& [tenant, file] : root.NamedStrings("tokens", kMaxTenants)) {
    addresses.token_files[tenant] = Resolve(folder, file);
  }
  const absl::Status status = yaml->Finish();
  if (!status.ok()) return status;
  return addresses;
}

std::string DefaultNodeFile() {
  std::vector<std::filesystem::path> candidates = {"deploy/local/node.yaml"};
  if (const char* home = std::getenv("HOME")) {
    candidates.push_back(std::filesystem::path(home) / ".config/palimpsest/node.yaml");
    candidates.push_back(std::filesystem::path(home) / ".cache/palimpsest/local/node.yaml");
  }
  std::string first;
  for (const std::filesystem::path& candidate : candidates) {
    std::error_code error;
    if (!std::filesystem::exists(candidate, error)) continue;
    if (first.empty()) first = candidate.string();
    const absl::StatusOr<NodeAddresses> addresses = ReadNodeFile(candidate.string());
    if (addresses.ok() && std::filesystem::is_socket(addresses->broker_socket, error)) {
      return candidate.string();
    }
  }
  return first;
}

Node::Node(NodeAddresses addresses) : addresses_(std::move(addresses)) {
  if (!addresses_.broker_socket.empty()) {
    broker_ = v1::Broker::NewStub(
        grpc::CreateCustomChannel(absl::StrCat("unix:", addresses_.broker_socket),
                                  grpc::InsecureChannelCredentials(), Arguments()));
  }
  if (!addresses_.operator_socket.empty()) {
    block_admin_ = v1::BlockAdmin::NewStub(
        grpc::CreateCustomChannel(absl::StrCat("unix:", addresses_.operator_socket),
                                  grpc::InsecureChannelCredentials(), Arguments()));
  }
  if (!addresses_.router.empty()) router_ = v1::Router::NewStub(ConnectRouter(addresses_));
}

absl::StatusOr<v1::Broker::Stub*> Node::broker() const {
  if (broker_ == nullptr) return Missing("broker", "--broker SOCKET");
  if (absl::Status path = CheckSocketPath(addresses_.broker_socket); !path.ok()) return path;
  return broker_.get();
}

absl::StatusOr<v1::BlockAdmin::Stub*> Node::block_admin() const {
  if (block_admin_ == nullptr) return Missing("operator socket", "--operator SOCKET");
  if (absl::Status path = CheckSocketPath(addresses_.operator_socket); !path.ok()) return path;
  return block_admin_.get();
}

absl::StatusOr<v1::Router::Stub*> Node::router() const {
  if (router_ == nullptr) return Missing("router", "--router ADDRESS");
  return router_.get();
}

absl::StatusOr<std::string> Node::Token(const std::string& tenant) const {
  if (!addresses_.token.empty()) return addresses_.token;
  const auto found = addresses_.token_files.find(tenant);
  if (found == addresses_.token_files.end()) {
    return absl::FailedPreconditionError(
        absl::StrCat("no token of tenant '", tenant,
                     "' is known: add it to `tokens` of the node file, or give --token-file FILE"));
  }
  return ReadSecretFile(found->second);
}

absl::Status Node::Authorize(const std::string& tenant, grpc::ClientContext& context) const {
  const absl::StatusOr<std::string> token = Token(tenant);
  if (!token.ok()) return token.status();
  context.AddMetadata("authorization", absl::StrCat("Bearer ", *token));
  return absl::OkStatus();
}

absl::StatusOr<std::string> Node::OnlyTenant() const {
  if (!addresses_.token.empty()) return std::string();  // the token says it
  if (addresses_.token_files.size() == 1) return addresses_.token_files.begin()->first;
  const auto name = [](std::string* out, const auto& entry) { out->append(entry.first); };
  return absl::InvalidArgumentError(
      absl::StrCat("which tenant? Give --tenant; the node file has tokens of: ",
                   absl::StrJoin(addresses_.token_files, ", ", name)));
}

absl::Status Node::BrokerError(const grpc::Status& status) const {
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return absl::UnavailableError(absl::StrCat("no broker listens on ", addresses_.broker_socket,
                                               ": start one with tools/quickstart --serve (",
                                               status.error_message(), ")"));
  }
  return FromGrpcStatus(status);
}

absl::Status Node::OperatorError(const grpc::Status& status) const {
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE) {
    return absl::UnavailableError(absl::StrCat(
        "no broker with tiers listens on ", addresses_.operator_socket,
        ": is that operator.sock in the broker's state_dir, has its configuration `tiers`, and are "
        "you its user? (",
        status.error_message(), ")"));
  }
  return FromGrpcStatus(status);
}

absl::Status Node::RouterError(const grpc::Status& status) const {
  // Refusals of the router itself come in its own words; gRPC's say that there is no connection.
  if (status.error_code() == grpc::StatusCode::UNAVAILABLE &&
      absl::StrContains(status.error_message(), "failed to connect")) {
    const bool refused = absl::StrContains(status.error_message(), "refused") ||
                         absl::StrContains(status.error_message(), "No such file");
    if (!refused && !addresses_.tls_roots.empty()) {
      return absl::UnavailableError(
          absl::StrCat("no TLS connection to the router at ", addresses_.router,
                       ": does it listen with TLS, is its certificate from --tls-ca, and is "
                       "--server-name the name in it? (",
                       status.error_message(), ")"));
    }
    if (!refused) {
      return absl::UnavailableError(absl::StrCat(
          "no connection to the router at ", addresses_.router,
          ": if it listens with TLS, give --tls-ca FILE (", status.error_message(), ")"));
    }
    return absl::UnavailableError(absl::StrCat("no router listens on ", addresses_.router,
                                               ": start one with tools/quickstart --serve (",
                                               status.error_message(), ")"));
  }
  return FromGrpcStatus(status);
}

}  // namespace palimpsest::palctl
