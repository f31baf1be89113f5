#include "router/server/router_service.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "common/grpc_status.h"
#include "router/server/generate_call.h"
#include "router/server/hint_call.h"
#include "router/server/request_preparation.h"

namespace palimpsest::router {
namespace {

// Longest that a drain waits whose caller sets no deadline.
constexpr absl::Duration kMaxDrain = absl::Minutes(10);

grpc::ServerUnaryReactor* FinishUnary(grpc::CallbackServerContext* context,
                                      const absl::Status& status) {
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

}  // namespace

grpc::ServerWriteReactor<v1::GenerateResponse>* RouterService::Generate(
    grpc::CallbackServerContext* context, const v1::GenerateRequest* request) {
  return GenerateCall::Start(router_, context, request);
}

grpc::ServerUnaryReactor* RouterService::HintConversation(
    grpc::CallbackServerContext* context, const v1::HintConversationRequest* request,
    v1::HintConversationResponse* response) {
  return router::HintConversation(router_, context, *request, *response);
}

absl::Status RouterService::TokenizeFor(const std::string& tenant,
                                        const v1::TokenizeRequest& request,
                                        v1::TokenizeResponse& response) const {
  const absl::StatusOr<const ServedModel*> model = router_.models.Find(tenant, request.model());
  if (!model.ok()) return model.status();
  const int32_t max_tokens = router_.MaxSequenceTokens(tenant, **model);
  absl::StatusOr<TokenisedPrompt> prompt =
      absl::InvalidArgumentError("the request must have an input: text or chat");
  if (request.has_text()) prompt = TokeniseText(**model, request.text(), max_tokens);
  if (request.has_chat()) prompt = TokeniseChat(**model, request.chat(), max_tokens);
  if (!prompt.ok()) return prompt.status();
  response.mutable_token_ids()->Add(prompt->ids.begin(), prompt->ids.end());
  return absl::OkStatus();
}

grpc::ServerUnaryReactor* RouterService::Tokenize(grpc::CallbackServerContext* context,
                                                  const v1::TokenizeRequest* request,
                                                  v1::TokenizeResponse* response) {
  const absl::StatusOr<std::string> tenant = router_.Authenticate(*context);
  return FinishUnary(context,
                     tenant.ok() ? TokenizeFor(*tenant, *request, *response) : tenant.status());
}

grpc::ServerUnaryReactor* RouterService::ListModels(grpc::CallbackServerContext* context,
                                                    const v1::ListModelsRequest*,
                                                    v1::ListModelsResponse* response) {
  const absl::StatusOr<std::string> tenant = router_.Authenticate(*context);
  if (!tenant.ok()) return FinishUnary(context, tenant.status());
  for (const ServedModel& model : router_.models.ModelsOf(*tenant)) {
    v1::Model* listed = response->add_models();
    listed->set_name(model.name);
    listed->set_max_sequence_tokens(
        static_cast<uint32_t>(router_.MaxSequenceTokens(*tenant, model)));
    listed->set_vocabulary_size(static_cast<uint32_t>(model.folder->vocab_size));
  }
  return FinishUnary(context, absl::OkStatus());
}

void RouterService::FillStatus(const std::string& tenant,
                               v1::GetTenantStatusResponse& response) const {
  const AdmissionLoad load = router_.gate.Load(tenant);
  const AdmissionLimits& limits = router_.limits.at(tenant);
  response.set_tenant(tenant);
  response.set_requests_in_flight(static_cast<uint32_t>(load.in_flight));
  response.set_request_limit(static_cast<uint32_t>(limits.in_flight));
  response.set_requests_waiting(static_cast<uint32_t>(load.waiting));
  response.set_queue_limit(static_cast<uint32_t>(limits.queue));
  for (const WorkerView& view : router_.workers.ListTenant(tenant)) {
    v1::WorkerStatus* worker = response.add_workers();
    worker->set_model(view.endpoint.model);
    worker->set_address(view.endpoint.address);
    worker->set_healthy(view.healthy);
    worker->set_draining(view.draining);
    worker->set_requests_in_flight(static_cast<uint32_t>(view.outstanding));
    worker->set_running_sequences(static_cast<uint32_t>(view.load.running_sequences));
    worker->set_waiting_sequences(static_cast<uint32_t>(view.load.waiting_sequences));
    worker->set_problem(view.problem);
  }
}

grpc::ServerUnaryReactor* RouterService::GetTenantStatus(grpc::CallbackServerContext* context,
                                                         const v1::GetTenantStatusRequest*,
                                                         v1::GetTenantStatusResponse* response) {
  const absl::StatusOr<std::string> tenant = router_.Authenticate(*context);
  if (tenant.ok()) FillStatus(*tenant, *response);
  return FinishUnary(context, tenant.status());
}

grpc::ServerUnaryReactor* RouterService::DrainTenant(grpc::CallbackServerContext* context,
                                                     const v1::DrainTenantRequest*,
                                                     v1::DrainTenantResponse* response) {
  const absl::StatusOr<std::string> tenant = router_.Authenticate(*context);
  if (!tenant.ok()) return FinishUnary(context, tenant.status());
  grpc::ServerUnaryReactor* reactor = context->DefaultReactor();
  const absl::Time deadline = std::min(DeadlineOf(*context), router_.clock.Now() + kMaxDrain);
  router_.workers.DrainTenant(*tenant, deadline, [=](const absl::StatusOr<int32_t>& remaining) {
    if (remaining.ok()) response->set_remaining_requests(static_cast<uint32_t>(*remaining));
    reactor->Finish(ToGrpcStatus(remaining.status()));
  });
  return reactor;
}

}  // namespace palimpsest::router
