#include "worker/server/doorman.h"

#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/health_check_service_interface.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "worker/server/router_token.h"

namespace palimpsest {
namespace {

constexpr char kServiceName[] = "palimpsest.v1.Worker";
// How soon callers are sent on to the worker, once it serves; until then they come back here.
constexpr int kConnectionAgeMs = 2000;
// How often a request that waits looks whether its caller has given up.
constexpr absl::Duration kLook = absl::Milliseconds(100);

// What those that wait have to be told the outcome in, at the end.
constexpr absl::Duration kFarewell = absl::Milliseconds(200);

// For the same call to the worker: with the caller's deadline, and cancelled when it is.
std::unique_ptr<grpc::ClientContext> Onward(const grpc::ServerContext& context) {
  std::unique_ptr<grpc::ClientContext> onward = grpc::ClientContext::FromServerContext(context);
  onward->set_wait_for_ready(true);
  for (const auto& [key, value] : context.client_metadata()) {
    if (key == "authorization") {
      onward->AddMetadata("authorization", std::string(value.data(), value.size()));
    }
  }
  return onward;
}

}  // namespace

Doorman::~Doorman() {
  Fail(absl::UnavailableError("the worker is shutting down; ask another one"));
  if (taker_ != nullptr) taker_->Stop();
  if (server_ == nullptr) return;
  server_->Shutdown(GrpcTimeout(kFarewell));
  server_->Wait();
}

absl::Status Doorman::Start(int socket) {
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();
  grpc::ResourceQuota quota("doorman");
  quota.SetMaxThreads(options_.max_requests + 16);
  grpc::ServerBuilder builder;
  builder.SetResourceQuota(quota);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS, kConnectionAgeMs);
  taker_ = std::make_unique<ConnectionTaker>(socket, builder);
  builder.RegisterService(this);
  server_ = builder.BuildAndStart();
  if (server_ == nullptr) return absl::InternalError("gRPC started no server");
  ShowHealth(!options_.stats.draining());
  return taker_->Start();
}

void Doorman::ShowHealth(bool serving) {
  server_->GetHealthCheckService()->SetServingStatus(serving);
  server_->GetHealthCheckService()->SetServingStatus(kServiceName, serving);
}

void Doorman::Open() {
  taker_->Stop();
  MutexLock lock(&mu_);
  if (outcome_.has_value()) return;
  worker_ = v1::Worker::NewStub(
      grpc::CreateChannel(options_.address, grpc::InsecureChannelCredentials()));
  outcome_ = absl::OkStatus();
  changed_.SignalAll();
}

void Doorman::Fail(absl::Status why) {
  MutexLock lock(&mu_);
  if (outcome_.has_value()) return;
  outcome_ = std::move(why);
  changed_.SignalAll();
}

absl::Status Doorman::AwaitOpen(grpc::ServerContext& context) {
  bool wake = false;
  {
    MutexLock lock(&mu_);
    if (draining_) return absl::UnavailableError("the worker is draining; ask another one");
    if (requests_ >= options_.max_requests) {
      return absl::ResourceExhaustedError(absl::StrCat("the queue is full: ", requests_,
                                                       " requests wait for the worker to wake up"));
    }
    ++requests_;
    wake = !std::exchange(woken_, true);
  }
  if (wake) options_.wake();
  MutexLock lock(&mu_);
  while (!outcome_.has_value() && !context.IsCancelled()) {
    changed_.WaitWithTimeout(&mu_, kLook);
  }
  --requests_;
  return outcome_.value_or(absl::CancelledError("the caller gave up"));
}

grpc::Status Doorman::Generate(grpc::ServerContext* context,
                               const v1::WorkerGenerateRequest* request,
                               grpc::ServerWriter<v1::WorkerGenerateResponse>* writer) {
  absl::Status status = CheckRouterToken(*context, *options_.router_tokens);
  if (status.ok()) status = AwaitOpen(*context);
  if (!status.ok()) return ToGrpcStatus(status);
  return PassThrough(*context, *request, *writer);
}

grpc::Status Doorman::PassThrough(grpc::ServerContext& context,
                                  const v1::WorkerGenerateRequest& request,
                                  grpc::ServerWriter<v1::WorkerGenerateResponse>& writer) {
  const std::unique_ptr<grpc::ClientContext> onward = Onward(context);
  const auto reader = worker().Generate(onward.get(), request);
  v1::WorkerGenerateResponse message;
  while (reader->Read(&message)) {
    if (!writer.Write(message)) onward->TryCancel();
  }
  const grpc::Status status = reader->Finish();
  const auto& trailers = onward->GetServerTrailingMetadata();
  if (const auto hint = trailers.find(kRetryAfterMetadata); hint != trailers.end()) {
    context.AddTrailingMetadata(kRetryAfterMetadata,
                                std::string(hint->second.data(), hint->second.size()));
  }
  return status;
}

grpc::Status Doorman::HintConversation(grpc::ServerContext* context, const v1::WorkerHintRequest*,
                                       v1::WorkerHintResponse*) {
  absl::Status status = CheckRouterToken(*context, *options_.router_tokens);
  status.Update(absl::UnavailableError(
      "the worker sleeps, and has no session with its broker: it wakes with the next request"));
  return ToGrpcStatus(status);
}

grpc::Status Doorman::Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                            v1::DrainResponse* response) {
  absl::Status status = CheckRouterToken(*context, *options_.router_tokens);
  if (!status.ok()) return ToGrpcStatus(status);
  {
    MutexLock lock(&mu_);
    draining_ = draining_ || !woken_;
  }
  if (draining()) {
    ShowHealth(false);
    return grpc::Status::OK;
  }
  status = AwaitOpen(*context);
  if (!status.ok()) return ToGrpcStatus(status);
  const std::unique_ptr<grpc::ClientContext> onward = Onward(*context);
  return worker().Drain(onward.get(), *request, response);
}

bool Doorman::draining() {
  MutexLock lock(&mu_);
  return draining_;
}

v1::Worker::Stub& Doorman::worker() {
  MutexLock lock(&mu_);
  return *worker_;
}

grpc::ServerUnaryReactor* Doorman::GetStats(grpc::CallbackServerContext* context,
                                            const v1::GetWorkerStatsRequest*,
                                            v1::WorkerStats* response) {
  grpc::ServerUnaryReactor* const reactor = context->DefaultReactor();
  const absl::Status status = CheckRouterToken(*context, *options_.router_tokens);
  if (status.ok()) {
    *response = options_.stats;
    response->set_draining(draining());
  }
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

}  // namespace palimpsest
