// One request of a load, and the record of its stream: when each token arrives and how it ends.
//
// Threads: Start and Cancel on any one; from Start until `ended` is called the record is gRPC's.
#ifndef PALIMPSEST_TOOLS_LOAD_RECORDED_CALL_H_
#define PALIMPSEST_TOOLS_LOAD_RECORDED_CALL_H_

#include <grpcpp/client_context.h>
#include <grpcpp/support/client_callback.h>

#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/monotonic_time.h"
#include "tools/load/latency.h"

namespace palimpsest::load {

// A Generate of `Service`, v1::Worker or v1::Router, whose answer counts as finished when it has
// sampling.max_tokens tokens.
template <typename Service, typename Request, typename Response>
class RecordedCall : public grpc::ClientReadReactor<Response> {
 public:
  // `record` says what is known before: due, request, prompt_tokens.
  RecordedCall(Request request, const std::string& token, RequestRecord record)
      : request_(std::move(request)), record_(std::move(record)) {
    context_.AddMetadata("authorization", absl::StrCat("Bearer ", token));
    record_.digest = kEmptyDigest;
    record_.tokens.reserve(request_.sampling().max_tokens());
  }

  // The run's times count from `start`, a time of MonotonicNow; whoever runs it cancels the call at
  // `cutoff`. `ended` is called once; the call may be destroyed from then on.
  void Start(typename Service::Stub& stub, absl::Time start, absl::Duration cutoff,
             std::function<void()> ended) {
    start_ = start;
    ended_ = std::move(ended);
    record_.sent = Now();
    context_.set_deadline(GrpcTimeout(cutoff - record_.sent + kCancelPatience));
    stub.async()->Generate(&context_, &request_, this);
    this->StartRead(&response_);
    this->StartCall();
  }

  void Cancel() { context_.TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    const absl::Duration now = Now();
    for (const int32_t id : response_.token_ids()) {
      answer_.push_back(id);
      record_.tokens.push_back(now);
      record_.digest = AddToDigest(record_.digest, static_cast<uint32_t>(id));
    }
    if (response_.has_usage()) {
      record_.preemptions = response_.usage().preemptions();
      record_.cached_tokens = response_.usage().cached_tokens();
    }
    this->StartRead(&response_);
  }

  void OnDone(const grpc::Status& status) override {
    record_.end = Now();
    if (!status.ok()) {
      // Ours, when it is given up; a server says so of no other.
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
    const std::function<void()> ended = std::move(ended_);
    ended();
  }

  const Request& request() const { return request_; }
  absl::Duration due() const { return record_.due; }

  // After the end.
  const RequestRecord& record() const { return record_; }
  RequestRecord TakeRecord() { return std::move(record_); }
  const std::vector<int32_t>& answer() const { return answer_; }

 private:
  // Only for a server that answers neither requests nor cancellations.
  static constexpr absl::Duration kCancelPatience = absl::Seconds(30);

  absl::Duration Now() const { return MonotonicNow() - start_; }

  const Request request_;
  grpc::ClientContext context_;
  Response response_;
  absl::Time start_;
  std::function<void()> ended_;
  RequestRecord record_;
  std::vector<int32_t> answer_;
};

}  // namespace palimpsest::load

#endif  // PALIMPSEST_TOOLS_LOAD_RECORDED_CALL_H_
