#include "tools/load/router_load.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"

namespace palimpsest::load {
namespace {

constexpr absl::Duration kProgressInterval = absl::Seconds(1);
// Only for a server that answers neither requests nor cancellations.
constexpr absl::Duration kCancelPatience = absl::Seconds(30);

// The time of a run, and how many of its calls have ended.
class Run {
 public:
  // The time is 0.
  void Begin() { start_ = MonotonicNow(); }
  // Since the start.
  absl::Duration Now() const { return MonotonicNow() - start_; }

  void OneEnded() {
    MutexLock lock(&mu_);
    ++ended_;
    changed_.Signal();
  }

  // Until `until`, or until `count` calls have ended; how many have.
  int64_t Await(absl::Duration until, int64_t count) {
    MutexLock lock(&mu_);
    while (ended_ < count) {
      if (changed_.WaitWithDeadline(&mu_, start_ + until)) break;
    }
    return ended_;
  }

 private:
  absl::Time start_;
  Mutex mu_;
  CondVar changed_;
  int64_t ended_ ABSL_GUARDED_BY(mu_) = 0;
};

v1::GenerateRequest MakeRequest(const RouterTarget& target, const PromptRequest& wanted) {
  v1::GenerateRequest request;
  request.set_model(target.model);
  request.mutable_tokens()->mutable_ids()->Add(wanted.prompt.begin(), wanted.prompt.end());
  request.mutable_sampling()->set_max_tokens(static_cast<uint32_t>(wanted.output_tokens));
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_ignore_eos(true);
  request.set_conversation_id(wanted.conversation);
  *request.mutable_hints() = wanted.hints;
  return request;
}

// One request. The record is gRPC's from Start until the call has ended.
class Call : public grpc::ClientReadReactor<v1::GenerateResponse> {
 public:
  Call(const RouterTarget& target, const PromptRequest& wanted, size_t number, Run& run)
      : run_(run), request_(MakeRequest(target, wanted)) {
    context_.AddMetadata("authorization", absl::StrCat("Bearer ", target.token));
    record_.due = wanted.due;
    record_.request = number;
    record_.digest = kEmptyDigest;
    record_.prompt_tokens = static_cast<uint32_t>(wanted.prompt.size());
    record_.tokens.reserve(request_.sampling().max_tokens());
  }

  void Start(v1::Router::Stub& stub, absl::Duration cutoff) {
    context_.set_deadline(GrpcTimeout(cutoff - run_.Now() + kCancelPatience));
    record_.sent = run_.Now();
    stub.async()->Generate(&context_, &request_, this);
    StartRead(&response_);
    StartCall();
  }

  void Cancel() { context_.TryCancel(); }
  absl::Duration due() const { return record_.due; }
  // After the end.
  RequestRecord TakeRecord() { return std::move(record_); }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    const absl::Duration now = run_.Now();
    for (const int32_t id : response_.token_ids()) {
      record_.tokens.push_back(now);
      record_.digest = AddToDigest(record_.digest, static_cast<uint32_t>(id));
    }
    if (response_.has_usage()) {
      record_.preemptions = response_.usage().preemptions();
      record_.cached_tokens = response_.usage().cached_tokens();
    }
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    record_.end = run_.Now();
    if (!status.ok()) {
      // Ours, when it is given up; a router says so of no other.
      const bool given_up = status.error_code() == grpc::StatusCode::CANCELLED;
      record_.outcome = given_up ? Outcome::kUnfinished : Outcome::kFailed;
      record_.error = given_up ? "" : FromGrpcStatus(status).ToString();
    } else if (record_.tokens.size() == request_.sampling().max_tokens()) {
      record_.outcome = Outcome::kFinished;
    } else {
      record_.outcome = Outcome::kFailed;
      record_.error = absl::StrCat("INTERNAL: ", record_.tokens.size(), " tokens of ",
                                   request_.sampling().max_tokens());
    }
    run_.OneEnded();
  }

 private:
  Run& run_;
  const v1::GenerateRequest request_;
  grpc::ClientContext context_;
  v1::GenerateResponse response_;
  RequestRecord record_;
};

}  // namespace

std::vector<RequestRecord> RunRouterLoad(const RouterTarget& target,
                                         absl::Span<const PromptRequest> requests,
                                         absl::Duration cutoff,
                                         const std::function<void(const LoadProgress&)>& progress) {
  Run run;
  std::vector<std::unique_ptr<Call>> calls;
  for (const PromptRequest& request : requests) {
    calls.push_back(std::make_unique<Call>(target, request, calls.size(), run));
  }
  run.Begin();
  const auto count = static_cast<int64_t>(calls.size());
  int64_t sent = 0;
  absl::Duration next_progress = kProgressInterval;
  // Until `until`, or until `most` calls have ended.
  const auto await = [&](absl::Duration until, int64_t most) {
    int64_t ended = 0;
    while (ended < most && run.Now() < until) {
      ended = run.Await(std::min(until, next_progress), most);
      if (run.Now() < next_progress) continue;
      if (progress) progress({run.Now(), count, sent, ended});
      next_progress = run.Now() + kProgressInterval;
    }
  };
  for (const auto& call : calls) {
    // More calls than there are cannot end: it waits for the time.
    await(call->due(), count + 1);
    call->Start(*target.stub, cutoff);
    ++sent;
  }
  await(cutoff, count);
  for (const auto& call : calls) call->Cancel();
  run.Await(absl::InfiniteDuration(), count);
  std::vector<RequestRecord> records;
  for (const auto& call : calls) records.push_back(call->TakeRecord());
  return records;
}

}  // namespace palimpsest::load
