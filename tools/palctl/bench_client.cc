#include "tools/palctl/bench_client.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"

namespace palimpsest::palctl {
namespace {

constexpr absl::Duration kLongestAnswer = absl::Minutes(5);
constexpr int kReconnectMilliseconds = 10;

std::unique_ptr<v1::Worker::Stub> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, kReconnectMilliseconds);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, kReconnectMilliseconds);
  return v1::Worker::NewStub(
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
}

}  // namespace

// One request; lives until Await has returned.
class BenchClient::Call : public grpc::ClientReadReactor<v1::WorkerGenerateResponse> {
 public:
  Call(v1::Worker::Stub& stub, const std::string& token, v1::WorkerGenerateRequest request)
      : request_(std::move(request)) {
    context_.AddMetadata("authorization", absl::StrCat("Bearer ", token));
    context_.set_deadline(GrpcTimeout(kLongestAnswer));
    stub.async()->Generate(&context_, &request_, this);
  }

  void Start() {
    StartRead(&response_);
    StartCall();
  }

  absl::Status Await() {
    MutexLock lock(&mu_);
    while (!done_) changed_.Wait(&mu_);
    if (!status_.ok()) return FromGrpcStatus(status_);
    if (tokens_.size() == request_.sampling().max_tokens()) return absl::OkStatus();
    return absl::InternalError(absl::StrCat("the worker answered ", tokens_.size(), " tokens of ",
                                            request_.sampling().max_tokens()));
  }

  // After Await.
  absl::Time first_token() const { return first_token_; }
  const std::vector<int32_t>& tokens() const { return tokens_; }
  int64_t cached_tokens() const { return cached_tokens_; }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    if (tokens_.empty() && response_.token_ids_size() > 0) first_token_ = MonotonicNow();
    tokens_.insert(tokens_.end(), response_.token_ids().begin(), response_.token_ids().end());
    if (response_.has_usage()) cached_tokens_ = response_.usage().cached_tokens();
    StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    MutexLock lock(&mu_);
    status_ = status;
    done_ = true;
    changed_.SignalAll();
  }

 private:
  const v1::WorkerGenerateRequest request_;
  grpc::ClientContext context_;
  v1::WorkerGenerateResponse response_;
  // Of gRPC's reading thread until the call is done.
  absl::Time first_token_ = absl::InfinitePast();
  std::vector<int32_t> tokens_;
  int64_t cached_tokens_ = 0;

  Mutex mu_;
  CondVar changed_;
  grpc::Status status_ ABSL_GUARDED_BY(mu_);
  bool done_ ABSL_GUARDED_BY(mu_) = false;
};

BenchClient::BenchClient(const std::string& address, std::string token, int32_t vocabulary)
    : token_(std::move(token)), vocabulary_(vocabulary), stub_(Connect(address)) {}

std::vector<int32_t> BenchClient::RandomPrompt(int32_t tokens) {
  std::uniform_int_distribution<int32_t> id(0, vocabulary_ - 1);
  std::vector<int32_t> prompt(static_cast<size_t>(tokens));
  for (int32_t& token : prompt) token = id(random_);
  return prompt;
}

v1::WorkerGenerateRequest BenchClient::Request(const std::vector<int32_t>& prompt, int32_t tokens) {
  v1::WorkerGenerateRequest request;
  request.set_request_id(absl::StrCat("bench-", requests_++));
  request.mutable_prompt_token_ids()->Add(prompt.begin(), prompt.end());
  request.mutable_sampling()->set_max_tokens(static_cast<uint32_t>(tokens));
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

absl::StatusOr<BenchClient::Answer> BenchClient::Ask(int32_t batch, int32_t prompt_tokens,
                                                     int32_t tokens) {
  std::vector<std::unique_ptr<Call>> calls;
  for (int32_t i = 0; i < batch; ++i) {
    calls.push_back(
        std::make_unique<Call>(*stub_, token_, Request(RandomPrompt(prompt_tokens), tokens)));
  }
  const absl::Time start = MonotonicNow();
  for (const auto& call : calls) call->Start();
  absl::Status status;
  for (const auto& call : calls) status.Update(call->Await());
  const absl::Time end = MonotonicNow();
  if (!status.ok()) return status;
  return Answer{calls.front()->first_token() - start, end - start};
}

absl::StatusOr<BenchClient::Reply> BenchClient::AskPrompt(const std::vector<int32_t>& prompt,
                                                          int32_t tokens) {
  Call call(*stub_, token_, Request(prompt, tokens));
  const absl::Time start = MonotonicNow();
  call.Start();
  if (absl::Status status = call.Await(); !status.ok()) return status;
  return Reply{call.first_token() - start, call.tokens(), call.cached_tokens()};
}

absl::StatusOr<v1::WorkerStats> BenchClient::Stats(absl::Duration timeout) {
  grpc::ClientContext context;
  context.AddMetadata("authorization", absl::StrCat("Bearer ", token_));
  context.set_deadline(GrpcTimeout(timeout));
  // While a call waits, its channel notices at once that there is a worker.
  context.set_wait_for_ready(true);
  v1::WorkerStats stats;
  const grpc::Status status = stub_->GetStats(&context, {}, &stats);
  if (!status.ok()) return FromGrpcStatus(status);
  return stats;
}

}  // namespace palimpsest::palctl
