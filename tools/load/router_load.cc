#include "tools/load/router_load.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "common/monotonic_time.h"
#include "common/mutex.h"
#include "tools/load/recorded_call.h"

namespace palimpsest::load {
namespace {

constexpr absl::Duration kProgressInterval = absl::Seconds(1);

using Call = RecordedCall<v1::Router, v1::GenerateRequest, v1::GenerateResponse>;

// The time of a run, and how many of its calls have ended.
class Run {
 public:
  // The time is 0.
  void Begin() { start_ = MonotonicNow(); }
  absl::Time start() const { return start_; }
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

}  // namespace

std::vector<RequestRecord> RunRouterLoad(const RouterTarget& target,
                                         absl::Span<const PromptRequest> requests,
                                         absl::Duration cutoff,
                                         const std::function<void(const LoadProgress&)>& progress) {
  Run run;
  std::vector<std::unique_ptr<Call>> calls;
  for (const PromptRequest& request : requests) {
    RequestRecord record{.due = request.due,
                         .prompt_tokens = static_cast<uint32_t>(request.prompt.size()),
                         .request = calls.size()};
    calls.push_back(
        std::make_unique<Call>(MakeRequest(target, request), target.token, std::move(record)));
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
    call->Start(*target.stub, run.start(), cutoff, [&run] { run.OneEnded(); });
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
