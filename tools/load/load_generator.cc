#include "tools/load/load_generator.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>
#include <grpcpp/support/channel_arguments.h>

#include <algorithm>
#include <optional>
#include <queue>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/monotonic_time.h"
#include "common/mutex.h"
#include "tools/load/recorded_call.h"

namespace palimpsest::load {
namespace {

constexpr absl::Duration kProgressInterval = absl::Seconds(1);

std::unique_ptr<v1::Worker::Stub> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  return v1::Worker::NewStub(
      grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments));
}

v1::WorkerGenerateRequest MakeRequest(std::string id, std::vector<int32_t> prompt,
                                      int32_t output_tokens) {
  v1::WorkerGenerateRequest request;
  request.set_request_id(std::move(id));
  request.mutable_prompt_token_ids()->Add(prompt.begin(), prompt.end());
  request.mutable_sampling()->set_max_tokens(static_cast<uint32_t>(output_tokens));
  request.mutable_sampling()->set_temperature(0);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

// Behind what stands before it.
std::vector<int32_t> PromptOf(const ScheduledRequest& scheduled, int32_t vocabulary,
                              std::vector<int32_t> before) {
  const std::vector<int32_t> own =
      RandomPrompt(scheduled.seed, scheduled.lengths.prompt_tokens, vocabulary);
  before.insert(before.end(), own.begin(), own.end());
  return before;
}

// A request of a schedule.
struct Place {
  size_t tenant = 0;
  size_t request = 0;
};

using Call = RecordedCall<v1::Worker, v1::WorkerGenerateRequest, v1::WorkerGenerateResponse>;

}  // namespace

// The time of a run, and which of its calls have ended.
class LoadGenerator::Clock {
 public:
  explicit Clock(absl::Time start) : start_(start) {}

  absl::Time start() const { return start_; }
  // Since the start of the run.
  absl::Duration Now() const { return MonotonicNow() - start_; }

  void OneEnded(Place place) {
    MutexLock lock(&mu_);
    news_.push_back(place);
    changed_.Signal();
  }

  // Waits until `until` or until calls have ended since the last call of this function: which.
  std::vector<Place> Await(absl::Duration until) {
    MutexLock lock(&mu_);
    while (news_.empty()) {
      if (changed_.WaitWithDeadline(&mu_, start_ + until)) break;
    }
    return std::exchange(news_, {});
  }

 private:
  const absl::Time start_;
  Mutex mu_;
  CondVar changed_;
  std::vector<Place> news_ ABSL_GUARDED_BY(mu_);
};

// The requests of a run: those that are built, and which of them is due next.
class LoadGenerator::Calls {
 public:
  Calls(absl::Span<const std::vector<ScheduledRequest>> schedule,
        absl::Span<const LoadTarget> targets, int64_t run)
      : schedule_(schedule), targets_(targets), run_(run) {
    calls_.resize(schedule.size());
    next_turns_.resize(schedule.size());
    first_turns_.resize(schedule.size());
    for (size_t tenant = 0; tenant < schedule.size(); ++tenant) {
      calls_[tenant].resize(schedule[tenant].size());
      next_turns_[tenant].resize(schedule[tenant].size());
      first_turns_[tenant].resize(schedule[tenant].size());
      for (size_t i = 0; i < schedule[tenant].size(); ++i) {
        const ScheduledRequest& scheduled = schedule[tenant][i];
        if (scheduled.continues.has_value()) {
          next_turns_[tenant][*scheduled.continues] = i;
          first_turns_[tenant][i] = first_turns_[tenant][*scheduled.continues];
        } else {
          first_turns_[tenant][i] = i;
          Add({tenant, i}, scheduled.due,
              RandomPrompt(scheduled.system_seed, scheduled.system_tokens,
                           targets[tenant].vocabulary));
        }
        ++count_;
      }
    }
  }

  int64_t count() const { return count_; }
  bool empty() const { return waiting_.empty(); }
  absl::Duration next_due() const {
    return waiting_.empty() ? absl::InfiniteDuration() : waiting_.top().due;
  }

  void StartNext(absl::Span<const std::unique_ptr<v1::Worker::Stub>> stubs, Clock& clock,
                 absl::Duration cutoff) {
    const Place place = waiting_.top().place;
    waiting_.pop();
    Call& call = *calls_[place.tenant][place.request];
    call.Start(*stubs[place.tenant], clock.start(), cutoff,
               [place, &clock] { clock.OneEnded(place); });
    sent_.push_back(&call);
  }
  int64_t sent() const { return static_cast<int64_t>(sent_.size()); }

  // Plans the turn behind a call that has ended, if there is one to send.
  void Continue(Place ended, absl::Duration last_turn) {
    const std::optional<size_t> next = next_turns_[ended.tenant][ended.request];
    const Call& call = *calls_[ended.tenant][ended.request];
    if (!next.has_value() || call.record().outcome != Outcome::kFinished) return;
    const absl::Duration due = call.record().end + schedule_[ended.tenant][*next].due;
    if (due >= last_turn) return;
    const auto& prompt = call.request().prompt_token_ids();
    std::vector<int32_t> text(prompt.begin(), prompt.end());
    text.insert(text.end(), call.answer().begin(), call.answer().end());
    Add({ended.tenant, *next}, due, std::move(text));
  }

  void CancelSent() {
    for (Call* call : sent_) call->Cancel();
  }

  // Once all that were sent have ended.
  std::vector<std::vector<RequestRecord>> TakeRecords() {
    while (!waiting_.empty()) {
      const Place place = waiting_.top().place;
      calls_[place.tenant][place.request] = nullptr;
      waiting_.pop();
    }
    std::vector<std::vector<RequestRecord>> records(calls_.size());
    for (size_t tenant = 0; tenant < calls_.size(); ++tenant) {
      for (const auto& call : calls_[tenant]) {
        if (call != nullptr) records[tenant].push_back(call->TakeRecord());
      }
    }
    return records;
  }

 private:
  struct Waiting {
    absl::Duration due;
    int64_t number = 0;  // of equals the one that was planned first
    Place place;

    bool operator<(const Waiting& other) const {  // the largest is the next one
      return std::tie(other.due, other.number) < std::tie(due, number);
    }
  };

  void Add(Place place, absl::Duration due, std::vector<int32_t> before) {
    const ScheduledRequest& scheduled = schedule_[place.tenant][place.request];
    const LoadTarget& target = targets_[place.tenant];
    v1::WorkerGenerateRequest request = MakeRequest(
        absl::StrCat("load-", run_, "-", planned_),
        PromptOf(scheduled, target.vocabulary, std::move(before)), scheduled.lengths.output_tokens);
    // Seeds differ between measurements too, whose conversations are others.
    const size_t first = first_turns_[place.tenant][place.request];
    request.set_conversation_id(
        absl::StrCat("load-", absl::Hex(schedule_[place.tenant][first].seed)));
    RequestRecord record{.due = due,
                         .prompt_tokens = static_cast<uint32_t>(request.prompt_token_ids_size()),
                         .request = place.request};
    calls_[place.tenant][place.request] =
        std::make_unique<Call>(std::move(request), target.token, std::move(record));
    waiting_.push({due, planned_++, place});
  }

  const absl::Span<const std::vector<ScheduledRequest>> schedule_;
  const absl::Span<const LoadTarget> targets_;
  const int64_t run_;
  std::vector<std::vector<std::unique_ptr<Call>>> calls_;  // null: not built, or not sent
  std::vector<std::vector<std::optional<size_t>>> next_turns_;
  std::vector<std::vector<size_t>> first_turns_;  // of the conversation of each
  std::priority_queue<Waiting> waiting_;
  std::vector<Call*> sent_;
  int64_t count_ = 0, planned_ = 0;
};

LoadGenerator::LoadGenerator(std::vector<LoadTarget> targets) : targets_(std::move(targets)) {
  for (const LoadTarget& target : targets_) stubs_.push_back(Connect(target.address));
}

LoadGenerator::~LoadGenerator() = default;

std::vector<std::vector<RequestRecord>> LoadGenerator::Run(
    absl::Span<const std::vector<ScheduledRequest>> schedule, const LoadEnd& end,
    const std::function<void(const LoadProgress&)>& progress) {
  Calls calls(schedule, targets_, ++runs_);
  Clock clock(MonotonicNow());
  absl::Duration next_progress = kProgressInterval;
  int64_t ended = 0;
  while (!calls.empty() || ended < calls.sent()) {
    const absl::Duration now = clock.Now();
    if (now >= end.cutoff) break;
    if (now >= next_progress) {
      if (progress) progress({now, calls.count(), calls.sent(), ended});
      next_progress = clock.Now() + kProgressInterval;
    }
    if (calls.next_due() <= now) {
      calls.StartNext(stubs_, clock, end.cutoff);
      continue;
    }
    for (const Place& place :
         clock.Await(std::min({end.cutoff, next_progress, calls.next_due()}))) {
      ++ended;
      calls.Continue(place, end.last_turn);
    }
  }
  calls.CancelSent();
  while (ended < calls.sent()) {
    ended += static_cast<int64_t>(clock.Await(absl::InfiniteDuration()).size());
  }
  return calls.TakeRecords();
}

}  // namespace palimpsest::load
