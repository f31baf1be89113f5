#include "tools/palctl/replay_target.h"

#include <grpcpp/client_context.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "common/grpc_time.h"
#include "tools/replay/served_trace.h"

namespace palimpsest::palctl {
namespace {

constexpr absl::Duration kUnaryTimeout = absl::Seconds(10);

// The tenant's model of that name.
absl::StatusOr<v1::Model> ChooseModel(const v1::ListModelsResponse& models,
                                      const std::string& name) {
  if (name.empty() && models.models_size() == 1) return models.models(0);
  std::string names;
  for (const v1::Model& model : models.models()) {
    if (model.name() == name) return model;
    absl::StrAppend(&names, names.empty() ? "" : ", ", model.name());
  }
  return absl::InvalidArgumentError(absl::StrCat("which model? Give --model; there are: ", names));
}

std::vector<load::PromptRequest> Requests(const replay::Trace& trace, replay::Hints hints,
                                          uint64_t salt, int32_t vocabulary) {
  const std::vector<replay::ClientHint> said = replay::HintsFromTheFuture(trace, hints);
  std::vector<load::PromptRequest> requests;
  for (size_t i = 0; i < trace.requests().size(); ++i) {
    const replay::TraceRequest& traced = trace.requests()[i];
    load::PromptRequest& request = requests.emplace_back();
    request.due = traced.arrival;
    request.prompt = replay::ServedPrompt(trace, i, salt, vocabulary);
    request.output_tokens = static_cast<int32_t>(traced.output_tokens);
    if (traced.conversation.value() != 0) {
      request.conversation = absl::StrCat("replay-", salt, "-", traced.conversation.value());
    }
    request.hints.set_last_turn(said[i].last_turn);
    if (said[i].expected_idle.has_value()) {
      request.hints.set_expected_idle_seconds(absl::ToDoubleSeconds(*said[i].expected_idle));
    }
  }
  return requests;
}

}  // namespace

absl::StatusOr<ReplayTarget> ReplayTarget::Find(const Node& node, std::string tenant,
                                                const std::string& model) {
  if (tenant.empty()) {
    absl::StatusOr<std::string> only = node.OnlyTenant();
    if (!only.ok()) return only.status();
    tenant = *std::move(only);
  }
  const absl::StatusOr<v1::Router::Stub*> router = node.router();
  if (!router.ok()) return router.status();
  const absl::StatusOr<std::string> token = node.Token(tenant);
  if (!token.ok()) return token.status();
  const auto prepare = [&](grpc::ClientContext& context) {
    context.set_deadline(GrpcTimeout(kUnaryTimeout));
    return node.Authorize(tenant, context);
  };

  grpc::ClientContext listing;
  if (absl::Status ready = prepare(listing); !ready.ok()) return ready;
  v1::ListModelsResponse models;
  absl::Status status = node.RouterError((*router)->ListModels(&listing, {}, &models));
  if (!status.ok()) return status;
  const absl::StatusOr<v1::Model> chosen = ChooseModel(models, model);
  if (!chosen.ok()) return chosen.status();

  // Whose token it is, which the command line need not say.
  grpc::ClientContext asking;
  if (absl::Status ready = prepare(asking); !ready.ok()) return ready;
  v1::GetTenantStatusResponse whose;
  status = node.RouterError((*router)->GetTenantStatus(&asking, {}, &whose));
  if (!status.ok()) return status;
  return ReplayTarget(node, whose.tenant(),
                      {.stub = *router,
                       .token = *token,
                       .model = chosen->name(),
                       .vocabulary = static_cast<int32_t>(chosen->vocabulary_size())},
                      chosen->max_sequence_tokens());
}

absl::StatusOr<std::vector<replay::ServedTier>> ReplayTarget::Tiers() const {
  const absl::StatusOr<v1::Broker::Stub*> broker = node_->broker();
  if (!broker.ok()) return broker.status();
  grpc::ClientContext context;
  context.set_deadline(GrpcTimeout(kUnaryTimeout));
  v1::GetStatusResponse response;
  const absl::Status status = node_->BrokerError((*broker)->GetStatus(&context, {}, &response));
  if (!status.ok()) return status;
  std::vector<replay::ServedTier> tiers;
  for (const v1::TierMemory& tier : response.tiers()) {
    replay::ServedTier& counted = tiers.emplace_back();
    counted.name = tier.tier();
    for (const v1::TenantTier& tenant : tier.tenants()) {
      if (tenant.tenant() != tenant_) continue;
      counted.hit_blocks = static_cast<int64_t>(tenant.hit_blocks());
    }
  }
  return tiers;
}

absl::Status ReplayTarget::Send(const replay::Trace& trace, replay::Hints hints,
                                absl::Duration patience, const Terminal& terminal,
                                replay::ServedReport& report) const {
  const absl::StatusOr<std::vector<replay::ServedTier>> before = Tiers();
  if (!before.ok()) return before.status();
  const std::vector<load::PromptRequest> requests =
      Requests(trace, hints, report.salt, router_.vocabulary);
  const absl::Duration last = trace.requests().back().arrival;
  const auto records =
      load::RunRouterLoad(router_, requests, last + patience, [&](const load::LoadProgress& now) {
        terminal.err << absl::StrFormat("%3.0f s: %d of %d requests sent, %d ended\n",
                                        absl::ToDoubleSeconds(now.now), now.sent, now.requests,
                                        now.ended);
      });
  absl::StatusOr<std::vector<replay::ServedTier>> after = Tiers();
  if (!after.ok()) return after.status();
  for (size_t i = 0; i < after->size() && i < before->size(); ++i) {
    (*after)[i].hit_blocks -= (*before)[i].hit_blocks;
  }
  report.tiers = *std::move(after);
  replay::CountServed(records, last + absl::Milliseconds(1), report);
  return absl::OkStatus();
}

}  // namespace palimpsest::palctl
