// palimpsest.v1.Router on gRPC's callback API; see generate_call.h for the streams. Thread-safe.
#ifndef PALIMPSEST_ROUTER_SERVER_ROUTER_SERVICE_H_
#define PALIMPSEST_ROUTER_SERVER_ROUTER_SERVICE_H_

#include "proto/palimpsest/v1/router.grpc.pb.h"
#include "router/server/router_context.h"

namespace palimpsest::router {

class RouterService final : public v1::Router::CallbackService {
 public:
  // `router` must outlive the service and every call.
  explicit RouterService(RouterContext& router) : router_(router) {}

  grpc::ServerWriteReactor<v1::GenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::GenerateRequest* request) override;
  grpc::ServerUnaryReactor* HintConversation(grpc::CallbackServerContext* context,
                                             const v1::HintConversationRequest* request,
                                             v1::HintConversationResponse* response) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* context,
                                     const v1::TokenizeRequest* request,
                                     v1::TokenizeResponse* response) override;
  grpc::ServerUnaryReactor* ListModels(grpc::CallbackServerContext* context,
                                       const v1::ListModelsRequest* request,
                                       v1::ListModelsResponse* response) override;
  grpc::ServerUnaryReactor* GetTenantStatus(grpc::CallbackServerContext* context,
                                            const v1::GetTenantStatusRequest* request,
                                            v1::GetTenantStatusResponse* response) override;
  grpc::ServerUnaryReactor* DrainTenant(grpc::CallbackServerContext* context,
                                        const v1::DrainTenantRequest* request,
                                        v1::DrainTenantResponse* response) override;

 private:
  absl::Status TokenizeFor(const std::string& tenant, const v1::TokenizeRequest& request,
                           v1::TokenizeResponse& response) const;
  void FillStatus(const std::string& tenant, v1::GetTenantStatusResponse& response) const;

  RouterContext& router_;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_ROUTER_SERVICE_H_
