#include "router/server/hint_call.h"

#include <grpcpp/client_context.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "worker/server/hint_conversion.h"

namespace palimpsest::router {
namespace {

// Longest that a worker's answer is awaited.
constexpr absl::Duration kPatience = absl::Seconds(5);

// The calls to the workers, which keep it.
class Hints {
 public:
  Hints(RouterContext& router, grpc::ServerUnaryReactor* reactor,
        v1::HintConversationResponse& response, std::string tenant,
        std::vector<std::shared_ptr<v1::Worker::Stub>> stubs)
      : router_(router),
        reactor_(reactor),
        response_(response),
        tenant_(std::move(tenant)),
        unanswered_(stubs.size()) {
    for (std::shared_ptr<v1::Worker::Stub>& stub : stubs) {
      calls_.push_back(std::make_unique<Call>());
      calls_.back()->stub = std::move(stub);
    }
  }

  static void Start(const std::shared_ptr<Hints>& hints, const v1::HintConversationRequest& request,
                    absl::Time deadline) {
    for (const std::unique_ptr<Call>& call : hints->calls_) {
      call->request.set_conversation_id(request.conversation_id());
      *call->request.mutable_action() = request.action();
      call->context.set_deadline(GrpcDeadline(deadline));
      hints->router_.workers.Authorize(call->context);
    }
    const std::vector<std::unique_ptr<Call>>& calls = hints->calls_;
    for (size_t i = 0; i < calls.size(); ++i) {
      calls[i]->stub->async()->HintConversation(
          &calls[i]->context, &calls[i]->request, &calls[i]->response,
          [hints, i](const grpc::Status& status) { hints->OnAnswer(*hints->calls_[i], status); });
    }
  }

 private:
  struct Call {
    std::shared_ptr<v1::Worker::Stub> stub;
    grpc::ClientContext context;
    v1::WorkerHintRequest request;
    v1::WorkerHintResponse response;
  };

  void OnAnswer(const Call& call, const grpc::Status& status) {
    absl::Status result;
    {
      MutexLock lock(&mutex_);
      if (status.ok()) {
        blocks_ += call.response.blocks();
        any_ = true;
      } else if (failure_.ok()) {
        failure_ = FromGrpcStatus(status);
      }
      if (--unanswered_ > 0) return;
      if (!any_) result = failure_;
      response_.set_blocks(blocks_);
    }
    router_.hints.End(tenant_);
    reactor_->Finish(ToGrpcStatus(result));
  }

  RouterContext& router_;
  grpc::ServerUnaryReactor* const reactor_;
  v1::HintConversationResponse& response_;
  const std::string tenant_;
  std::vector<std::unique_ptr<Call>> calls_;
  Mutex mutex_;
  size_t unanswered_ ABSL_GUARDED_BY(mutex_);
  bool any_ ABSL_GUARDED_BY(mutex_) = false;
  uint64_t blocks_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::Status failure_ ABSL_GUARDED_BY(mutex_);  // the first
};

absl::StatusOr<std::vector<std::shared_ptr<v1::Worker::Stub>>> Workers(
    const RouterContext& router, const std::string& tenant,
    const v1::HintConversationRequest& request) {
  const absl::StatusOr<const ServedModel*> model = router.models.Find(tenant, request.model());
  if (!model.ok()) return model.status();
  if (absl::Status name = CheckName("conversation_id", request.conversation_id()); !name.ok()) {
    return name;
  }
  if (absl::Status action = ToCacheAction(request.action()).status(); !action.ok()) return action;
  auto stubs = router.workers.HealthyStubs(tenant, (*model)->name);
  if (stubs.empty()) {
    return absl::UnavailableError(
        absl::StrCat("no worker of model '", (*model)->name, "' is healthy now"));
  }
  return stubs;
}

}  // namespace

grpc::ServerUnaryReactor* HintConversation(RouterContext& router,
                                           grpc::CallbackServerContext* context,
                                           const v1::HintConversationRequest& request,
                                           v1::HintConversationResponse& response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::StatusOr<std::string> tenant = router.Authenticate(*context);
  if (!tenant.ok()) {
    reactor->Finish(ToGrpcStatus(tenant.status()));
    return reactor;
  }
  auto stubs = Workers(router, *tenant, request);
  absl::Status status = stubs.status();
  if (status.ok() && !router.hints.Begin(*tenant)) {
    status = absl::ResourceExhaustedError(absl::StrCat(HintsUnderWay::kMost, " hints of tenant '",
                                                       *tenant,
                                                       "' are under way: try again in a moment"));
  }
  if (!status.ok()) {
    reactor->Finish(ToGrpcStatus(status));
    return reactor;
  }
  const absl::Time deadline = std::min(DeadlineOf(*context), router.clock.Now() + kPatience);
  Hints::Start(std::make_shared<Hints>(router, reactor, response, *tenant, *std::move(stubs)),
               request, deadline);
  return reactor;
}

}  // namespace palimpsest::router
