#include "tools/load/load_generator.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
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

std::unique_ptr<v1::Worker::Stub> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return v1::Worker::NewStub(
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
}

v1::WorkerGenerateRequest MakeRequest(std::string id, const ScheduledRequest& scheduled,
                                      int32_t vocabulary) {
  v1::WorkerGenerateRequest request;
  request.set_request_id(std::move(id));
  const std::vector<int32_t> prompt =
      RandomPrompt(scheduled.seed, scheduled.lengths.prompt_tokens, vocabulary);
  request.mutable_prompt_token_ids()->Add(prompt.begin(), prompt.end());
  request.mutable_sampling()->set_max_tokens(
      static_cast<uint32_t>(scheduled.lengths.output_tokens));
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

}  // namespace

// How many calls of a run have ended.
class LoadGenerator::Calls {
 public:
  explicit Calls(absl::Time start) : start_(start) {}

  // Since the start of the run.
  absl::Duration Now() const { return MonotonicNow() - start_; }

  void OneEnded() {
    MutexLock lock(&mu_);
    ++ended_;
    changed_.Signal();
  }

  int64_t ended() const {
    MutexLock lock(&mu_);
    return ended_;
  }

  // Until `until` since the start, or until `count` calls have ended.
  void Await(absl::Duration until, int64_t count) {
    MutexLock lock(&mu_);
    while (ended_ < count) {
      if (changed_.WaitWithDeadline(&mu_, start_ + until)) return;
    }
  }

 private:
  const absl::Time start_;
  mutable Mutex mu_;
  CondVar changed_;
  int64_t ended_ ABSL_GUARDED_BY(mu_) = 0;
};

// One request. The record is gRPC's from Start until the call has ended.
class LoadGenerator::Call : public grpc::ClientReadReactor<v1::WorkerGenerateResponse> {
 public:
  Call(v1::WorkerGenerateRequest request, const std::string& token, absl::Duration due)
      : request_(std::move(request)) {
    context_.AddMetadata("authorization", absl::StrCat("Bearer ", token));
    record_.due = due;
    record_.digest = kEmptyDigest;
    record_.tokens.reserve(request_.sampling().max_tokens());
  }

  void Start(v1::Worker::Stub& stub, Calls& calls, absl::Duration cutoff) {
    calls_ = &calls;
    context_.set_deadline(GrpcTimeout(cutoff - calls.Now() + kCancelPatience));
    record_.sent = calls.Now();
    stub.async()->Generate(&context_, &request_, this);
    StartRead(&response_);
    StartCall();
  }

  void Cancel() { context_.TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    const absl::Duration now = calls_->Now();
    for (const int32_t id : response_.token_ids()) {
      record_.tokens.push_back(now);
      record_.digest = AddToDigest(record_.digest, static_cast<uint32_t>(id));
    }
    if (response_.has_usage()) record_.preemptions = response_.usage().preemptions();
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    record_.end = calls_->Now();
    if (!status.ok()) {
      // Ours, when it is given up; a worker says so of no other.
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
    calls_->OneEnded();
  }

  absl::Duration due() const { return record_.due; }
  // After the end.
  RequestRecord TakeRecord() { return std::move(record_); }

 private:
  const v1::WorkerGenerateRequest request_;
  grpc::ClientContext context_;
  v1::WorkerGenerateResponse response_;
  Calls* calls_ = nullptr;
  RequestRecord record_;
};

LoadGenerator::LoadGenerator(std::vector<LoadTarget> targets) : targets_(std::move(targets)) {
  for (const LoadTarget& target : targets_) stubs_.push_back(Connect(target.address));
}

LoadGenerator::~LoadGenerator() = default;

std::vector<std::vector<RequestRecord>> LoadGenerator::Run(
    absl::Span<const std::vector<ScheduledRequest>> schedule, absl::Duration cutoff,
    const std::function<void(const LoadProgress&)>& progress) {
  ++runs_;
  std::vector<std::vector<std::unique_ptr<Call>>> calls(schedule.size());
  struct Due {
    Call* call;
    v1::Worker::Stub* stub;
  };
  std::vector<Due> order;
  for (size_t tenant = 0; tenant < schedule.size(); ++tenant) {
    for (const ScheduledRequest& scheduled : schedule[tenant]) {
      calls[tenant].push_back(
          std::make_unique<Call>(MakeRequest(absl::StrCat("load-", runs_, "-", order.size()),
                                             scheduled, targets_[tenant].vocabulary),
                                 targets_[tenant].token, scheduled.due));
      order.push_back({calls[tenant].back().get(), stubs_[tenant].get()});
    }
  }
  std::stable_sort(order.begin(), order.end(),
                   [](const Due& a, const Due& b) { return a.call->due() < b.call->due(); });
  const auto count = static_cast<int64_t>(order.size());
  Calls running(MonotonicNow());
  absl::Duration next_progress = kProgressInterval;
  int64_t sent = 0;
  const auto await = [&](absl::Duration until, int64_t ended) {
    while (running.ended() < ended && running.Now() < until) {
      running.Await(std::min(until, next_progress), ended);
      if (running.Now() < next_progress) continue;
      if (progress) progress({running.Now(), count, sent, running.ended()});
      next_progress = running.Now() + kProgressInterval;
    }
  };
  for (const Due& due : order) {
    // More calls than there are cannot end: it waits for the time.
    await(due.call->due(), count + 1);
    due.call->Start(*due.stub, running, cutoff);
    ++sent;
  }
  await(cutoff, count);
  for (const Due& due : order) due.call->Cancel();
  running.Await(absl::InfiniteDuration(), count);
  std::vector<std::vector<RequestRecord>> records(calls.size());
  for (size_t tenant = 0; tenant < calls.size(); ++tenant) {
    for (const auto& call : calls[tenant]) records[tenant].push_back(call->TakeRecord());
  }
  return records;
}

}  // namespace palimpsest::load
