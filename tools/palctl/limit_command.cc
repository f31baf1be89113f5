#include <grpcpp/client_context.h>

#include "common/bytes.h"
#include "common/grpc_time.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/tier_names.h"

namespace palimpsest::palctl {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(10);

}  // namespace

int RunLimit(const Node& node, const LimitOptions& options, const Terminal& terminal) {
  const absl::StatusOr<Bytes> bytes = ParseBytes(options.bytes);
  if (!bytes.ok()) return Fail(terminal, bytes.status());
  const absl::StatusOr<v1::BlockAdmin::Stub*> admin = node.block_admin();
  if (!admin.ok()) return Fail(terminal, admin.status());
  v1::SetLimitRequest request;
  request.set_tier(TierFromName(options.tier));
  request.set_tenant(options.tenant);
  request.set_bytes(static_cast<uint64_t>(bytes->count()));
  v1::SetLimitResponse response;
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(kTimeout));
  const absl::Status status = node.OperatorError((*admin)->SetLimit(&context, request, &response));
  if (!status.ok()) return Fail(terminal, status);
  terminal.out << "limit " << Bytes(static_cast<int64_t>(response.limit_bytes())).ToString()
               << ", used " << Bytes(static_cast<int64_t>(response.used_bytes())).ToString()
               << std::endl;
  return kDone;
}

}  // namespace palimpsest::palctl
