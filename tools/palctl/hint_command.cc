#include <grpcpp/client_context.h>

#include "absl/strings/str_cat.h"
#include "common/bytes.h"
#include "common/grpc_time.h"
#include "tools/palctl/commands.h"

namespace palimpsest::palctl {
namespace {

constexpr absl::Duration kTimeout = absl::Seconds(10);

}  // namespace

absl::StatusOr<v1::CacheAction> ToCacheAction(const CacheActionOptions& options) {
  v1::CacheAction action;
  if (options.kind == "retain") {
    v1::CacheAction::Retain& retain = *action.mutable_retain();
    retain.set_seconds(options.seconds);
    retain.set_half_life_seconds(options.half_life);
    retain.set_priority(options.priority);
    if (!options.budget.empty()) {
      const absl::StatusOr<Bytes> budget = ParseBytes(options.budget);
      if (!budget.ok()) return budget.status();
      retain.set_budget_bytes(static_cast<uint64_t>(budget->count()));
    }
  } else if (options.kind == "demote") {
    action.mutable_demote();
  } else if (options.kind == "prefetch") {
    action.mutable_prefetch()->set_seconds(options.seconds);
  } else if (options.kind == "release") {
    action.mutable_release();
  } else {
    return absl::InvalidArgumentError(absl::StrCat(
        "'", options.kind, "' is no action: expected retain, demote, prefetch or release"));
  }
  return action;
}

int RunHint(const Node& node, const HintOptions& options, const Terminal& terminal) {
  const absl::StatusOr<v1::CacheAction> action = ToCacheAction(options.action);
  if (!action.ok()) return Fail(terminal, action.status());
  const absl::StatusOr<v1::Router::Stub*> router = node.router();
  if (!router.ok()) return Fail(terminal, router.status());
  std::string tenant = options.tenant;
  if (tenant.empty()) {
    absl::StatusOr<std::string> only = node.OnlyTenant();
    if (!only.ok()) return Fail(terminal, only.status());
    tenant = *std::move(only);
  }
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(kTimeout));
  if (absl::Status known = node.Authorize(tenant, context); !known.ok()) {
    return Fail(terminal, known);
  }
  v1::HintConversationRequest request;
  request.set_model(options.model);
  request.set_conversation_id(options.conversation);
  *request.mutable_action() = *action;
  v1::HintConversationResponse response;
  const absl::Status status =
      node.RouterError((*router)->HintConversation(&context, request, &response));
  if (!status.ok()) return Fail(terminal, status);
  terminal.out << response.blocks() << " blocks of conversation " << options.conversation
               << std::endl;
  return kDone;
}

}  // namespace palimpsest::palctl
