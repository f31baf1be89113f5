#include <grpcpp/client_context.h>

#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/tier_names.h"

namespace palimpsest::palctl {
namespace {

using nlohmann::json;

std::string KeyText(const v1::BlockKey& key) {
  return absl::StrFormat("%016x%016x", key.high(), key.low());
}

const char* KindName(const v1::BlockEvent& event) {
  return event.kind() == v1::BlockEvent::KIND_STORED ? "stored" : "removed";
}

void Print(const v1::BlockEvent& event, bool snapshot, bool as_json, std::ostream& out) {
  if (as_json) {
    out << json({{"event", snapshot ? "present" : KindName(event)},
                 {"sequence", event.sequence()},
                 {"tenant", event.tenant()},
                 {"tier", TierName(event.tier())},
                 {"key", KeyText(event.key())}})
               .dump()
        << "\n";
    return;
  }
  out << absl::StreamFormat("%12d %-8s %-16s %-10s %s\n", event.sequence(),
                            snapshot ? "present" : KindName(event), event.tenant(),
                            TierName(event.tier()), KeyText(event.key()));
}

void PrintBegin(const v1::WatchBlocksResponse& message, bool as_json, std::ostream& out) {
  const v1::WatchBlocksResponse::Snapshot& snapshot = message.snapshot();
  if (as_json) {
    out << json({{"event", "snapshot"},
                 {"sequence", message.sequence()},
                 {"generation", absl::StrFormat("%016x", message.generation())},
                 {"missed_events", snapshot.missed_events()}})
               .dump()
        << "\n";
    return;
  }
  if (snapshot.missed_events() > 0) {
    out << snapshot.missed_events() << " events were missed: what is above is void\n";
  }
  out << "snapshot, up to event " << message.sequence() << ":\n";
}

}  // namespace

int RunEvents(const Node& node, const EventsOptions& options, const Terminal& terminal) {
  const absl::StatusOr<v1::BlockAdmin::Stub*> admin = node.block_admin();
  if (!admin.ok()) return Fail(terminal, admin.status());
  v1::WatchBlocksRequest request;
  request.set_tenant(options.tenant);
  grpc::ClientContext context;
  const auto stream = (*admin)->WatchBlocks(&context, request);
  v1::WatchBlocksResponse message;
  uint64_t events = 0;
  bool enough = false;
  while (!enough && stream->Read(&message)) {
    const bool snapshot = message.has_snapshot();
    if (message.snapshot().begins()) PrintBegin(message, options.json, terminal.out);
    for (const v1::BlockEvent& event : message.events()) {
      if (!snapshot && options.count > 0 && events == options.count) break;
      events += snapshot ? 0 : 1;
      Print(event, snapshot, options.json, terminal.out);
    }
    terminal.out << std::flush;
    enough = (options.count > 0 && events == options.count) ||
             (options.snapshot && message.snapshot().ends());
  }
  if (enough) context.TryCancel();
  const absl::Status status = node.OperatorError(stream->Finish());
  return enough || status.ok() ? kDone : Fail(terminal, status);
}

}  // namespace palimpsest::palctl
