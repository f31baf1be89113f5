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

}  // namespace

// The time of a run, and which of its calls have ended.
class LoadGenerator::Clock {
 public:
  explicit Clock(absl::Time start) : start_(start) {}

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

// One request. The record is gRPC's from Start until the call has ended.
class LoadGenerator::Call : public grpc::ClientReadReactor<v1::WorkerGenerateResponse> {
 public:
  Call(v1::WorkerGenerateRequest request, const std::string& token, absl::Duration due, Place place)
      : request_(std::move(request)), place_(place) {
    context_.AddMetadata("authorization", absl::StrCat("Bearer ", token));
    record_.due = due;
    record_.digest = kEmptyDigest;
    record_.request = place.request;
    record_.prompt_tokens = static_cast<uint32_t>(request_.prompt_token_ids_size());
    record_.tokens.reserve(request_.sampling().max_tokens());
  }

  void Start(v1::Worker::Stub& stub, Clock& clock, absl::Duration cutoff) {
    clock_ = &clock;
    context_.set_deadline(GrpcTimeout(cutoff - clock.Now() + kCancelPatience));
    record_.sent = clock.Now();
    stub.async()->Generate(&context_, &request_, this);
    StartRead(&response_);
    StartCall();
  }

  void Cancel() { context_.TryCancel(); }

  void OnReadDone(bool ok) override {
    if (!ok) return;
    const absl::Duration now = clock_->Now();
    for (const int32_t id : response_.token_ids()) {
      answer_.push_back(id);
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
    record_.end = clock_->Now();
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
    clock_->OneEnded(place_);
  }

  absl::Duration due() const { return record_.due; }

  // After the end.
  const RequestRecord& record() const { return record_; }
  RequestRecord TakeRecord() { return std::move(record_); }
  // Prompt and answer.
  std::vector<int32_t> Text() const {
    std::vector<int32_t> text(request_.prompt_token_ids().begin(),
                              request_.prompt_token_ids().end());
    text.insert(text.end(), answer_.begin(), answer_.end());
    return text;
  }

 private:
  const v1::WorkerGenerateRequest request_;
  const Place place_;
  grpc::ClientContext context_;
  v1::WorkerGenerateResponse response_;
  Clock* clock_ = nullptr;
  RequestRecord record_;
  std::vector<int32_t> answer_;
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
    call.Start(*stubs[place.tenant], clock, cutoff);
    sent_.push_back(&call);
  }
  int64_t sent() const { return static_cast<int64_t>(sent_.size()); }

  // Plans the turn behind a call that has ended, if there is one to send.
  void Continue(Place ended, absl::Duration last_turn) {
    const std::optional<size_t> next = next_turns_[ended.tenant][ended.request];
    const Call& call = *calls_[ended.tenant][ended.request];
    if (!next.has_value() || call.record().outcome != Outcome::kFinished) return;
    const absl::Duration due = call.record().end + schedule_[ended.tenant][*next].due;
    if (due < last_turn) Add({ended.tenant, *next}, due, call.Text());
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
    calls_[place.tenant][place.request] =
        std::make_unique<Call>(std::move(request), target.token, due, place);
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
