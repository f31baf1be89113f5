#include <grpcpp/client_context.h>

#include "common/bytes.h"
#include "common/grpc_time.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/tier_names.h"

namespace palimpsest::palctl {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(10);

}  // namespace

int RunTrim(const Node& node, const TrimOptions& options, const Terminal& terminal) {
  const absl::StatusOr<Bytes> keep = ParseBytes(options.keep);
  if (!keep.ok()) return Fail(terminal, keep.status());
  const absl::StatusOr<v1::BlockAdmin::Stub*> admin = node.block_admin();
  if (!admin.ok()) return Fail(terminal, admin.status());
  v1::TrimRequest request;
  request.set_tier(TierFromName(options.tier));
  request.set_tenant(options.tenant);
  request.set_keep_bytes(static_cast<uint64_t>(keep->count()));
  v1::TrimResponse response;
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(kTimeout));
  const absl::Status status = node.OperatorError((*admin)->Trim(&context, request, &response));
  if (!status.ok()) return Fail(terminal, status);
  terminal.out << response.blocks() << " blocks ("
               << Bytes(static_cast<int64_t>(response.bytes())).ToString() << ") leave or have left"
               << std::endl;
  return kDone;
}

}  // namespace palimpsest::palctl
