// One HintConversation call: the hint goes to every healthy worker of the model, as their nodes'
// brokers know what they have of the conversation, and ends when all have answered.
//
// Thread-safe. Does not block.
#ifndef PALIMPSEST_ROUTER_SERVER_HINT_CALL_H_
#define PALIMPSEST_ROUTER_SERVER_HINT_CALL_H_

#include <grpcpp/server_context.h>

#include "proto/palimpsest/v1/router.pb.h"
#include "router/server/router_context.h"

namespace palimpsest::router {

// `router`, `request` and `response` must outlive the call.
grpc::ServerUnaryReactor* HintConversation(RouterContext& router,
                                           grpc::CallbackServerContext* context,
                                           const v1::HintConversationRequest& request,
                                           v1::HintConversationResponse& response);

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_HINT_CALL_H_
