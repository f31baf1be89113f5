#include "router/server/generate_call.h"

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/log.h"

namespace palimpsest::router {
namespace {

// A queue that was full empties at the pace of whole requests.
constexpr absl::Duration kQueueRetryAfter = absl::Seconds(1);

std::optional<absl::Duration> RetryAfterOf(const grpc::ClientContext& context) {
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto found = trailers.find(kRetryAfterMetadata);
  if (found == trailers.end()) return std::nullopt;
  return ParseRetryAfter(absl::string_view(found->second.data(), found->second.size()));
}

}  // namespace

// One call to one worker. Owns itself until it is done; a hold keeps it from being done before its
// last message was read (reads start from the client's side of the router).
class GenerateCall::Attempt final : public grpc::ClientReadReactor<v1::WorkerGenerateResponse>,
                                    public std::enable_shared_from_this<Attempt> {
 public:
  Attempt(std::shared_ptr<GenerateCall> call, WorkerId worker)
      : call_(std::move(call)), worker_(worker) {
    const PreparedRequest& request = call_->request_;
    const std::vector<TokenId>& output = call_->builder_->output();
    request_.set_request_id(request.request_id);
    request_.mutable_prompt_token_ids()->Add(request.prompt.begin(), request.prompt.end());
    request_.mutable_prompt_token_ids()->Add(output.begin(), output.end());
    request_.set_output_offset(static_cast<uint32_t>(output.size()));
    *request_.mutable_sampling() = request.sampling;
    request_.set_conversation_id(request.conversation_id);
    request_.mutable_parts()->Add(request.parts.begin(), request.parts.end());
    *request_.mutable_hints() = request.hints;
    request_.mutable_tool_call_token_ids()->Add(request.tool_call_tokens.begin(),
                                                request.tool_call_tokens.end());
    if (call_->deadline_ != absl::InfiniteFuture()) {
      context_.set_deadline(GrpcDeadline(call_->deadline_));
    }
    call_->router_.workers.Authorize(context_);
  }

  WorkerId worker() const { return worker_; }

  void Start() {
    self_ = shared_from_this();
    call_->router_.workers.stub(worker_)->async()->Generate(&context_, &request_, this);
    AddHold();
    ReadNext();
    StartCall();
  }

  void ReadNext() {
    message_.Clear();
    StartRead(&message_);
  }

  void Cancel() { context_.TryCancel(); }

  // Cancels, and ends as an attempt whose worker is gone.
  void Leave(absl::Status reason) {
    {
      MutexLock lock(&mutex_);
      left_ = std::move(reason);
    }
    context_.TryCancel();
  }

  void OnReadDone(bool ok) override {
    if (ok) {
      call_->OnWorkerMessage(*this, message_);
    } else {
      RemoveHold();
    }
  }

  void OnDone(const grpc::Status& status) override {
    const std::shared_ptr<Attempt> self = std::move(self_);
    call_->router_.workers.Finished(worker_);
    Failure failure{FromGrpcStatus(status), RetryAfterOf(context_)};
    {
      MutexLock lock(&mutex_);
      if (!left_.ok() && status.error_code() == grpc::StatusCode::CANCELLED) {
        failure.status = std::move(left_);
      }
    }
    call_->OnAttemptDone(std::move(failure));
  }

 private:
  const std::shared_ptr<GenerateCall> call_;
  const WorkerId worker_;
  std::shared_ptr<Attempt> self_;
  grpc::ClientContext context_;
  v1::WorkerGenerateRequest request_;
  v1::WorkerGenerateResponse message_;
  Mutex mutex_;
  absl::Status left_ ABSL_GUARDED_BY(mutex_);
};

grpc::ServerWriteReactor<v1::GenerateResponse>* GenerateCall::Start(
    RouterContext& router, grpc::CallbackServerContext* context,
    const v1::GenerateRequest* request) {
  std::shared_ptr<GenerateCall> call(new GenerateCall(router, context));
  call->self_ = call;
  call->Begin(*request);
  return call.get();
}

GenerateCall::GenerateCall(RouterContext& router, grpc::CallbackServerContext* context)
    : router_(router),
      context_(context),
      arrival_(router.clock.Now()),
      deadline_(DeadlineOf(*context)) {
  router_.calls.Add(this);
}

GenerateCall::~GenerateCall() { router_.calls.Remove(this); }

void GenerateCall::Begin(const v1::GenerateRequest& request) {
  absl::StatusOr<std::string> tenant = router_.Authenticate(*context_);
  if (!tenant.ok()) return FinishWithError({tenant.status()});
  tenant_ = *std::move(tenant);
  const absl::StatusOr<const ServedModel*> model = router_.models.Find(tenant_, request.model());
  if (!model.ok()) return FinishWithError({model.status()});
  absl::StatusOr<PreparedRequest> prepared =
      PrepareRequest(**model, request, router_.MaxSequenceTokens(tenant_, **model));
  if (!prepared.ok()) return FinishWithError({prepared.status()});
  request_ = *std::move(prepared);
  builder_.emplace(request_);
  EnterGate();
}

void GenerateCall::EnterGate() {
  const auto admitted = [self = shared_from_this()](TicketId ticket, absl::Status status) {
    self->OnAdmitted(ticket, std::move(status));
  };
  const absl::StatusOr<TicketId> ticket = router_.gate.Enter(tenant_, deadline_, admitted);
  if (!ticket.ok()) {
    router_.metrics.Counter<"palimpsest_router_queue_refusals_total">(tenant_).Increment();
    return FinishWithError({ticket.status(), kQueueRetryAfter});
  }
  bool cancelled = false;
  {
    MutexLock lock(&mutex_);
    waiting_ = *ticket;
    cancelled = cancelled_;
  }
  if (cancelled && router_.gate.Abandon(*ticket)) FinishWithError({CancelledStatus()});
}

void GenerateCall::OnAdmitted(TicketId ticket, absl::Status status) {
  if (!status.ok()) {
    const bool full = absl::IsResourceExhausted(status);
    return FinishWithError(
        {std::move(status), full ? std::make_optional(kQueueRetryAfter) : std::nullopt});
  }
  admitted_ = ticket;
  StartAttempt();
}

void GenerateCall::StartAttempt() {
  const absl::StatusOr<WorkerId> worker =
      router_.workers.Choose(tenant_, request_.model->name,
                             PlacementRequest{request_.prompt, request_.conversation_id}, tried_);
  if (!worker.ok()) {
    return FinishWithError(last_failure_.value_or(Failure{worker.status(), kQueueRetryAfter}));
  }
  tried_.push_back(*worker);
  auto attempt = std::make_shared<Attempt>(shared_from_this(), *worker);
  bool cancelled = false;
  {
    MutexLock lock(&mutex_);
    cancelled = cancelled_;
    if (!cancelled) attempt_ = attempt;
    heard_at_ = router_.clock.Now();
  }
  if (cancelled) {
    router_.workers.Finished(*worker);
    return FinishWithError({CancelledStatus()});
  }
  attempt->Start();
}

void GenerateCall::OnWorkerMessage(Attempt& attempt, const v1::WorkerGenerateResponse& message) {
  {
    MutexLock lock(&mutex_);
    heard_at_ = router_.clock.Now();
    if (ended_) {  // the client has its last message; nothing should follow it
      attempt.Cancel();
      return attempt.ReadNext();
    }
  }
  absl::StatusOr<v1::GenerateResponse> response = builder_->Add(message);
  if (!response.ok()) {
    attempt.Cancel();
    FinishWithError({response.status()});
    return attempt.ReadNext();
  }
  response_ = *std::move(response);
  if (builder_->finished()) {
    // A stop string that began in another worker's output is found here alone.
    if (message.finish_reason() == v1::FINISH_REASON_UNSPECIFIED) attempt.Cancel();
    FinishWithResponse();
    return attempt.ReadNext();
  }
  if (response_.token_ids().empty() && response_.text().empty()) return attempt.ReadNext();
  BeginWrite();
  StartWrite(&response_);
}

void GenerateCall::BeginWrite() {
  const absl::Time now = router_.clock.Now();
  if (!last_write_) {
    router_.metrics.Histogram<"palimpsest_router_time_to_first_token_seconds">(tenant_).Observe(
        absl::ToDoubleSeconds(now - arrival_));
  } else if (!response_.token_ids().empty()) {
    router_.metrics.Histogram<"palimpsest_router_time_between_tokens_seconds">(tenant_).Observe(
        absl::ToDoubleSeconds(now - *last_write_));
  }
  last_write_ = now;
  MutexLock lock(&mutex_);
  writing_since_ = now;
}

void GenerateCall::OnWriteDone(bool ok) {
  std::shared_ptr<Attempt> attempt;
  {
    MutexLock lock(&mutex_);
    writing_since_ = absl::InfiniteFuture();
    attempt = attempt_;
  }
  if (!ok) attempt->Cancel();
  attempt->ReadNext();
}

void GenerateCall::OnAttemptDone(Failure failure) {
  bool cancelled = false;
  {
    MutexLock lock(&mutex_);
    attempt_ = nullptr;
    if (ended_) return;
    cancelled = cancelled_;
  }
  if (cancelled) return FinishWithError({CancelledStatus()});
  if (failure.status.ok()) {
    failure.status = absl::InternalError("the worker ended its stream without a finish reason");
  } else if (absl::IsUnauthenticated(failure.status) || absl::IsPermissionDenied(failure.status)) {
    failure.status = absl::InternalError(
        "the worker refused the router's own token: worker_token_file differs from the worker's");
  }
  RetryOrFail(std::move(failure));
}

void GenerateCall::RetryOrFail(Failure failure) {
  if (absl::IsUnavailable(failure.status)) {
    // A hint comes from a worker that is well but has no memory for this model now.
    if (!failure.retry_after) router_.workers.ReportFailure(tried_.back(), failure.status);
    v1::GenerateResponse last;
    if (builder_->FinishIfComplete(&last)) {
      response_ = std::move(last);
      return FinishWithResponse();
    }
  }
  const auto sent = static_cast<int64_t>(builder_->output().size());
  const NextStep step =
      router_.retry.Decide({failure.status, static_cast<int32_t>(tried_.size()), sent});
  Log(LogLevel::kWarning, "worker failed a request",
      {{"request", request_.request_id},
       {"tenant", tenant_},
       {"attempt", tried_.size()},
       {"tokens_sent", sent},
       {"error", failure.status}});
  if (absl::IsUnavailable(failure.status) && sent > 0) {
    failure.status = absl::UnavailableError(
        absl::StrCat("the worker was lost after ", sent,
                     " tokens and no other worker can continue: ", failure.status.message()));
  }
  if (step == NextStep::kFail) return FinishWithError(failure);
  last_failure_ = std::move(failure);
  if (step == NextStep::kRetry) {
    router_.metrics.Counter<"palimpsest_router_retries_total">(tenant_).Increment();
  } else {
    router_.metrics.Counter<"palimpsest_router_resumes_total">(tenant_).Increment();
  }
  StartAttempt();
}

void GenerateCall::OnCancel() {
  std::shared_ptr<Attempt> attempt;
  std::optional<TicketId> waiting;
  {
    MutexLock lock(&mutex_);
    cancelled_ = true;
    attempt = attempt_;
    waiting = waiting_;
  }
  if (attempt != nullptr) {
    attempt->Cancel();
  } else if (waiting && router_.gate.Abandon(*waiting)) {
    FinishWithError({CancelledStatus()});
  }
}

void GenerateCall::CancelIfStalled(absl::Time since) {
  {
    MutexLock lock(&mutex_);
    if (writing_since_ > since) return;
    writing_since_ = absl::InfiniteFuture();
  }
  Log(LogLevel::kWarning, "client takes no messages, its request is cancelled",
      {{"request", request_.request_id}, {"tenant", tenant_}});
  MutexLock lock(&context_mutex_);
  if (!context_gone_) context_->TryCancel();
}

void GenerateCall::LeaveIfSilent(absl::Time since, absl::Duration timeout) {
  std::shared_ptr<Attempt> attempt;
  {
    MutexLock lock(&mutex_);
    if (attempt_ == nullptr || heard_at_ > since) return;
    attempt = attempt_;
  }
  if (router_.workers.SilentSince(attempt->worker()) > since) return;
  attempt->Leave(absl::UnavailableError(
      absl::StrCat("the worker has answered neither this request nor a health check for ",
                   absl::FormatDuration(timeout))));
}

absl::Status GenerateCall::CancelledStatus() const {
  if (deadline_ <= router_.clock.Now()) {
    return absl::DeadlineExceededError("the deadline passed before the output was complete");
  }
  return absl::CancelledError("the client cancelled the request or vanished");
}

bool GenerateCall::TakeEnd() {
  MutexLock lock(&mutex_);
  return !std::exchange(ended_, true);
}

void GenerateCall::FinishWithResponse() {
  if (!TakeEnd()) return;
  BeginWrite();
  StartWriteAndFinish(&response_, grpc::WriteOptions(), grpc::Status::OK);
}

void GenerateCall::FinishWithError(const Failure& failure) {
  if (!TakeEnd()) return;
  final_code_ = failure.status.code();
  if (failure.retry_after) {
    context_->AddTrailingMetadata(kRetryAfterMetadata, RetryAfterValue(*failure.retry_after));
  }
  Finish(ToGrpcStatus(failure.status));
}

void GenerateCall::OnDone() {
  {
    MutexLock lock(&context_mutex_);
    context_gone_ = true;
  }
  {
    MutexLock lock(&mutex_);
    writing_since_ = absl::InfiniteFuture();
  }
  if (admitted_) {
    router_.gate.Leave(*admitted_);
    router_.metrics.Counter<"palimpsest_router_tokens_total">(tenant_, "prompt")
        .Increment(static_cast<double>(request_.prompt.size()));
    router_.metrics.Counter<"palimpsest_router_tokens_total">(tenant_, "generated")
        .Increment(static_cast<double>(builder_->output().size()));
  }
  router_.metrics
      .Counter<"palimpsest_router_requests_total">(tenant_, absl::StatusCodeToString(final_code_))
      .Increment();
  self_.reset();
}

}  // namespace palimpsest::router
