#include <grpcpp/client_context.h>

#include "common/grpc_time.h"
#include "tools/palctl/commands.h"

namespace palimpsest::palctl {
namespace {

// For the answer that it took too long.
constexpr absl::Duration kSlack = absl::Seconds(5);

}  // namespace

int RunPurge(const Node& node, const PurgeOptions& options, const Terminal& terminal) {
  const absl::StatusOr<v1::BlockAdmin::Stub*> admin = node.block_admin();
  if (!admin.ok()) return Fail(terminal, admin.status());
  v1::PurgeRequest request;
  request.set_tenant(options.tenant);
  request.set_wait_seconds(absl::ToDoubleSeconds(options.timeout));
  v1::PurgeResponse response;
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(options.timeout + kSlack));
  const absl::Status status = node.OperatorError((*admin)->Purge(&context, request, &response));
  if (!status.ok()) return Fail(terminal, status);
  terminal.out << "purged: " << response.blocks() << " blocks of tenant " << options.tenant
               << " are forgotten, on disks too" << std::endl;
  return kDone;
}

}  // namespace palimpsest::palctl
