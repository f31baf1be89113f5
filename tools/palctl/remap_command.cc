#include <grpcpp/client_context.h>

#include "common/grpc_time.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/remap_view.h"

namespace palimpsest::palctl {

int RunRemap(const Node& node, const RemapOptions& options, const Terminal& terminal) {
  const absl::StatusOr<v1::Broker::Stub*> broker = node.broker();
  if (!broker.ok()) return Fail(terminal, broker.status());
  v1::GetRemapLogRequest request;
  request.set_tenant(options.tenant);
  request.set_limit(options.last);
  v1::GetRemapLogResponse log;
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(options.timeout));
  const absl::Status result = node.BrokerError((*broker)->GetRemapLog(&context, request, &log));
  if (!result.ok()) return Fail(terminal, result);
  if (options.json) {
    terminal.out << RemapJson(log).dump(1) << std::endl;
  } else if (options.explain) {
    terminal.out << RemapExplanation(log, absl::LocalTimeZone()) << std::flush;
  } else {
    terminal.out << RemapTotalsTable(log) << std::flush;
  }
  return kDone;
}

}  // namespace palimpsest::palctl
