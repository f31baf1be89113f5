#include "worker/server/generate_call.h"

#include <utility>

#include "common/grpc_status.h"
#include "worker/server/sampling_conversion.h"

namespace palimpsest {
namespace {

// A full queue or a drain is over in moments, or another worker should be asked.
constexpr absl::Duration kRetryAfterRefusal = absl::Seconds(1);

}  // namespace

std::shared_ptr<GenerateCall> GenerateCall::Create(grpc::CallbackServerContext* context,
                                                   Engine* engine) {
  std::shared_ptr<GenerateCall> call(new GenerateCall(context, engine));
  call->self_ = call;
  return call;
}

void GenerateCall::Refuse(const absl::Status& status) {
  GenerationStream::End end{.status = status};
  if (absl::IsResourceExhausted(status) || absl::IsUnavailable(status)) {
    end.retry_after = kRetryAfterRefusal;
  }
  {
    MutexLock lock(&mutex_);
    end_ = std::move(end);
  }
  Pump();
}

absl::Status GenerateCall::Begin(SequenceRequest request, bool logprobs) {
  auto stream = engine_->Submit(std::move(request), [call = shared_from_this()] { call->Pump(); });
  if (!stream.ok()) {
    Refuse(stream.status());
    return stream.status();
  }
  bool cancelled;
  {
    MutexLock lock(&mutex_);
    logprobs_ = logprobs;
    stream_ = *stream;
    cancelled = cancelled_;
  }
  if (cancelled) engine_->Cancel(**stream);
  Pump();
  return absl::OkStatus();
}

void GenerateCall::Pump() {
  Next next;
  grpc::Status status;
  {
    MutexLock lock(&mutex_);
    next = Choose(status);
  }
  // Only one caller gets here at a time, as what was chosen must be over before more is chosen.
  switch (next) {
    case Next::kNothing:
      return;
    case Next::kWrite:
      StartWrite(&response_);
      return;
    case Next::kWriteLast:
      StartWriteAndFinish(&response_, grpc::WriteOptions(), status);
      return;
    case Next::kFinish:
      Finish(status);
      return;
  }
}

GenerateCall::Next GenerateCall::Choose(grpc::Status& status) {
  if (writing_ || finished_) return Next::kNothing;
  if (cancelled_) {
    finished_ = true;
    status = grpc::Status(grpc::StatusCode::CANCELLED, "the client has gone");
    return Next::kFinish;
  }
  GenerationStream::Batch batch;
  if (stream_ != nullptr) batch = stream_->Take();
  if (batch.end.has_value()) end_ = std::move(batch.end);
  if (end_.has_value() && end_->status.ok()) {
    finished_ = true;
    FillResponse(batch);
    response_.set_finish_reason(ToProto(end_->reason));
    response_.set_stop_trim_bytes(end_->stop_trim_bytes);
    FillUsage(end_->usage, *response_.mutable_usage());
    return Next::kWriteLast;
  }
  if (!batch.tokens.empty()) {
    writing_ = true;
    FillResponse(batch);
    return Next::kWrite;
  }
  if (!end_.has_value()) return Next::kNothing;
  finished_ = true;
  status = ToGrpcStatus(end_->status);
  if (end_->retry_after > absl::ZeroDuration()) {
    context_->AddTrailingMetadata(kRetryAfterMetadata, RetryAfterValue(end_->retry_after));
  }
  return Next::kFinish;
}

void GenerateCall::FillResponse(const GenerationStream::Batch& batch) {
  response_.Clear();
  for (const SampledToken& token : batch.tokens) {
    response_.add_token_ids(token.token);
    if (logprobs_) FillLogprob(token, *response_.add_logprobs());
  }
}

void GenerateCall::OnWriteDone(bool ok) {
  {
    MutexLock lock(&mutex_);
    writing_ = false;
  }
  if (ok) {
    Pump();
  } else {
    Abort();
  }
}

void GenerateCall::OnCancel() { Abort(); }

void GenerateCall::Abort() {
  std::shared_ptr<GenerationStream> stream;
  {
    MutexLock lock(&mutex_);
    cancelled_ = true;
    stream = stream_;
  }
  if (stream != nullptr) engine_->Cancel(*stream);
  Pump();
}

void GenerateCall::OnDone() {
  const std::shared_ptr<GenerateCall> self = std::move(self_);
  MutexLock lock(&mutex_);
  stream_ = nullptr;
}

}  // namespace palimpsest
