#include "router/server/worker_pool.h"

#include <grpcpp/create_channel.h>
#include <grpcpp/security/credentials.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/grpc_time.h"
#include "common/log.h"
#include "router/server/health_probe.h"

namespace palimpsest::router {
namespace {

// Time left for a worker's answer to a drain to travel before the caller's own deadline.
constexpr absl::Duration kDrainAnswerMargin = absl::Milliseconds(200);
// Addresses of one name that become workers.
constexpr size_t kMaxAddresses = 256;

std::shared_ptr<grpc::Channel> Connect(const std::string& address) {
  grpc::ChannelArguments arguments;
  // A worker that was restarted is found again within a second or two.
  arguments.SetInt(GRPC_ARG_INITIAL_RECONNECT_BACKOFF_MS, 100);
  // (gRPC's name for how long an attempt to connect may take.)
  arguments.SetInt(GRPC_ARG_MIN_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_MAX_RECONNECT_BACKOFF_MS, 2000);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  // Token streams are thin: a small window each, so that slow clients cost little memory.
  arguments.SetInt(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  arguments.SetInt(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, 64 << 10);
  // Never through a proxy that the environment names: workers are neighbours.
  arguments.SetInt(GRPC_ARG_ENABLE_HTTP_PROXY, 0);
  return grpc::CreateCustomChannel(address, grpc::InsecureChannelCredentials(), arguments);
}

}  // namespace

// One health check and, if it passes, one GetStats. Where either got no answer both are asked once
// more, at once: a server that shuts down cancels what it has not begun, and who listens next at
// the same address (a successor, the doorman of a worker that hibernates) may be well.
class WorkerPool::Poll : public std::enable_shared_from_this<Poll> {
 public:
  Poll(WorkerPool& pool, WorkerId worker, uint64_t number, const Connection& connection)
      : pool_(pool),
        worker_(worker),
        number_(number),
        expected_(connection.endpoint),
        stub_(connection.stub),
        probe_(connection.channel) {}

  WorkerId worker() const { return worker_; }
  uint64_t number() const { return number_; }

  void Start() {
    const gpr_timespec deadline = GrpcTimeout(pool_.options_.timeout);
    for (Attempt& attempt : attempts_) {
      attempt.check.set_deadline(deadline);
      attempt.stats.set_deadline(deadline);
    }
    Check();
  }

  // Those that have not begun end as soon as they do.
  void Cancel() {
    for (Attempt& attempt : attempts_) {
      attempt.check.TryCancel();
      attempt.stats.TryCancel();
    }
  }

 private:
  struct Attempt {
    grpc::ClientContext check;
    grpc::ClientContext stats;
  };

  void Check() {
    probe_.Check(&attempts_[attempt_].check,
                 [self = shared_from_this()](const absl::Status& status) {
                   if (!absl::IsUnavailable(status)) self->answered_at_ = self->pool_.clock_.Now();
                   if (status.ok()) return self->GetStats();
                   self->Ended({status, self->answered_at_}, absl::IsUnavailable(status));
                 });
  }

  void GetStats() {
    grpc::ClientContext& context = attempts_[attempt_].stats;
    pool_.Authorize(context);
    stub_->async()->GetStats(&context, &request_, &stats_,
                             [self = shared_from_this()](const grpc::Status& status) {
                               self->Ended(self->Result(status), !status.ok());
                             });
  }

  void Ended(const PollResult& result, bool unanswered) {
    if (!unanswered || ++attempt_ == attempts_.size()) return pool_.PollEnded(this, result);
    Check();
  }

  PollResult Result(const grpc::Status& status) const {
    if (!status.ok()) {
      return {absl::UnavailableError(absl::StrCat("GetStats failed: ", status.error_message())),
              answered_at_};
    }
    PollResult result{.answered_at = answered_at_};
    result.draining = stats_.draining();
    result.load.running_sequences = static_cast<int32_t>(stats_.running_sequences());
    result.load.waiting_sequences = static_cast<int32_t>(stats_.waiting_sequences());
    result.load.kv_blocks_free = static_cast<int32_t>(stats_.kv_blocks_free());
    result.load.kv_blocks_cached = static_cast<int32_t>(stats_.kv_blocks_cached());
    result.load.max_sequence_tokens = static_cast<int32_t>(stats_.max_sequence_tokens());
    if (stats_.tenant() != expected_.tenant || stats_.model() != expected_.model) {
      result.status = absl::UnavailableError(
          "it serves another tenant or model than the router's configuration says");
    }
    return result;
  }

  WorkerPool& pool_;
  const WorkerId worker_;
  const uint64_t number_;
  const WorkerEndpoint expected_;
  const std::shared_ptr<v1::Worker::Stub> stub_;
  HealthProbe probe_;
  std::array<Attempt, 2> attempts_;
  size_t attempt_ = 0;
  v1::GetWorkerStatsRequest request_;
  v1::WorkerStats stats_;
  absl::Time answered_at_ = absl::InfinitePast();
};

WorkerPool::WorkerPool(WorkerPoolOptions options, const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      directory_(options_.workers, std::make_unique<LeastOutstanding>()),
      jitter_(std::random_device{}()) {
  MutexLock lock(&mutex_);
  for (size_t i = 0; i < options_.workers.size(); ++i) {
    const std::string& address = options_.workers[i].address;
    const std::optional<HostPort> name = NameOf(address);
    if (!name) {
      SetAddresses(i, {address});
      continue;
    }
    auto found = std::find_if(names_.begin(), names_.end(),
                              [&](const Name& other) { return other.name == *name; });
    if (found == names_.end()) found = names_.insert(found, Name{*name, {}, {}, {}});
    found->targets.push_back(i);
  }
}

WorkerPool::~WorkerPool() {
  resolver_.reset();
  std::vector<std::shared_ptr<Poll>> polls;
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    polls = polls_;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
  for (const std::shared_ptr<Poll>& poll : polls) poll->Cancel();
  MutexLock lock(&mutex_);
  while (!polls_.empty()) changed_.Wait(&mutex_);
}

void WorkerPool::Start() {
  std::vector<HostPort> names;
  {
    MutexLock lock(&mutex_);
    for (const Name& name : names_) names.push_back(name.name);
  }
  thread_ = std::thread([this] { PollLoop(); });
  resolver_ = std::make_unique<NameResolver>(
      std::move(names), options_.resolve_interval, options_.lookup,
      [this](size_t name, const absl::StatusOr<std::vector<std::string>>& found) {
        OnResolved(name, found);
      });
}

// A lookup that fails leaves the addresses as they are: what they lead to is checked anyway.
void WorkerPool::OnResolved(size_t index, const absl::StatusOr<std::vector<std::string>>& found) {
  std::vector<std::string> addresses = found.value_or(std::vector<std::string>());
  const size_t addresses_found = addresses.size();
  if (addresses.size() > kMaxAddresses) addresses.resize(kMaxAddresses);
  HostPort host;
  bool news = false;
  {
    MutexLock lock(&mutex_);
    Name& name = names_.at(index);
    host = name.name;
    news = name.problem != found.status() || (found.ok() && name.addresses != addresses);
    name.problem = found.status();
    if (found.ok()) name.addresses = addresses;
    for (size_t target : name.targets) {
      if (found.ok()) {
        SetAddresses(target, addresses);
      } else {
        directory_.SetProblem(target, found.status());
      }
    }
    changed_.SignalAll();
  }
  if (!news) return;
  if (!found.ok()) {
    Log(LogLevel::kWarning, "workers' name not resolved, the last addresses stay",
        {{"name", host.host}, {"error", found.status()}});
  } else {
    Log(LogLevel::kInfo, "workers' name resolved",
        {{"name", host.host},
         {"addresses", absl::StrJoin(addresses, " ")},
         {"left_out", addresses_found - addresses.size()}});
  }
}

void WorkerPool::SetAddresses(size_t target, const std::vector<std::string>& addresses) {
  for (const NewWorker& worker : directory_.SetAddresses(target, addresses)) {
    Connection& connection = connections_[worker.id];
    connection.channel = Connect(worker.endpoint.address);
    connection.stub = v1::Worker::NewStub(connection.channel);
    connection.endpoint = worker.endpoint;
  }
}

void WorkerPool::DropGone() {
  std::vector<Connection> gone;  // closed outside the lock
  MutexLock lock(&mutex_);
  for (WorkerId worker : directory_.TakeGone()) {
    gone.push_back(std::move(connections_.extract(worker).mapped()));
  }
}

void WorkerPool::PollLoop() {
  while (true) {
    DropGone();
    const absl::Time next = StartDuePolls();
    MutexLock lock(&mutex_);
    if (stopping_) return;
    changed_.WaitWithTimeout(&mutex_, std::max(next - clock_.Now(), absl::ZeroDuration()));
    if (stopping_) return;
  }
}

absl::Time WorkerPool::StartDuePolls() {
  std::vector<std::shared_ptr<Poll>> due;
  absl::Time next = absl::InfiniteFuture();
  {
    MutexLock lock(&mutex_);
    if (stopping_) return next;
    const absl::Time now = clock_.Now();
    std::uniform_real_distribution<double> factor(0.8, 1.2);
    for (auto& [worker, connection] : connections_) {
      if (connection.next_poll <= now && !connection.polling) {
        connection.polling = true;
        connection.next_poll = now + options_.interval * factor(jitter_);
        due.push_back(
            std::make_shared<Poll>(*this, worker, directory_.BeginPoll(worker), connection));
      }
      if (!connection.polling || connection.next_poll > now) {
        next = std::min(next, connection.next_poll);
      }
    }
    polls_.insert(polls_.end(), due.begin(), due.end());
  }
  for (const std::shared_ptr<Poll>& poll : due) poll->Start();
  return next;
}

void WorkerPool::PollEnded(Poll* poll, const PollResult& result) {
  std::shared_ptr<Poll> ended;  // outlives the lock
  MutexLock lock(&mutex_);
  directory_.EndPoll(poll->worker(), poll->number(), result);
  connections_.at(poll->worker()).polling = false;
  const auto found = std::find_if(polls_.begin(), polls_.end(),
                                  [&](const auto& other) { return other.get() == poll; });
  ended = std::move(*found);
  polls_.erase(found);
  changed_.SignalAll();
}

std::shared_ptr<v1::Worker::Stub> WorkerPool::stub(WorkerId worker) const {
  MutexLock lock(&mutex_);
  return connections_.at(worker).stub;
}

std::vector<std::shared_ptr<v1::Worker::Stub>> WorkerPool::HealthyStubs(
    absl::string_view tenant, absl::string_view model) const {
  std::vector<std::shared_ptr<v1::Worker::Stub>> stubs;
  MutexLock lock(&mutex_);
  for (const WorkerView& worker : directory_.ListTenant(tenant)) {
    if (worker.endpoint.model != model || !worker.healthy) continue;
    stubs.push_back(connections_.at(worker.id).stub);
  }
  return stubs;
}

absl::StatusOr<WorkerId> WorkerPool::Choose(absl::string_view tenant, absl::string_view model,
                                            const PlacementRequest& request,
                                            absl::Span<const WorkerId> excluded) {
  MutexLock lock(&mutex_);
  return directory_.Choose(tenant, model, request, excluded);
}

void WorkerPool::Finished(WorkerId worker) {
  MutexLock lock(&mutex_);
  directory_.Finished(worker);
}

void WorkerPool::ReportFailure(WorkerId worker, const absl::Status& status) {
  MutexLock lock(&mutex_);
  directory_.ReportFailure(worker, status);
}

absl::Time WorkerPool::SilentSince(WorkerId worker) const {
  MutexLock lock(&mutex_);
  return directory_.SilentSince(worker);
}

std::vector<WorkerView> WorkerPool::List() const {
  MutexLock lock(&mutex_);
  return directory_.List();
}

std::vector<WorkerView> WorkerPool::ListTenant(absl::string_view tenant) const {
  MutexLock lock(&mutex_);
  return directory_.ListTenant(tenant);
}

int32_t WorkerPool::MaxSequenceTokens(absl::string_view tenant, absl::string_view model) const {
  int32_t smallest = 0;
  for (const WorkerView& worker : ListTenant(tenant)) {
    const int32_t tokens = worker.load.max_sequence_tokens;
    if (worker.endpoint.model != model || tokens == 0) continue;
    smallest = smallest == 0 ? tokens : std::min(smallest, tokens);
  }
  return smallest;
}

void WorkerPool::Authorize(grpc::ClientContext& context) const {
  if (options_.token == nullptr) return;
  context.AddMetadata("authorization", absl::StrCat("Bearer ", options_.token->secrets()->front()));
}

struct WorkerPool::DrainCall {
  WorkerId worker;
  std::shared_ptr<v1::Worker::Stub> stub;
  grpc::ClientContext context;
  v1::DrainRequest request;
  v1::DrainResponse response;
  grpc::Status status;
};

// A drain of several workers; `done` is called when the last of them answered.
struct WorkerPool::Drain {
  std::vector<std::unique_ptr<DrainCall>> calls;
  std::atomic<size_t> unanswered;
  std::function<void(absl::StatusOr<int32_t>)> done;

  void Answered() {
    if (unanswered.fetch_sub(1) > 1) return;
    std::vector<std::string> problems;
    int32_t remaining = 0;
    for (const std::unique_ptr<DrainCall>& call : calls) {
      if (!call->status.ok()) problems.push_back(call->status.error_message());
      remaining += static_cast<int32_t>(call->response.remaining_requests());
    }
    if (problems.empty()) return done(remaining);
    done(absl::UnavailableError(
        absl::StrCat(problems.size(), " of ", calls.size(),
                     " workers could not be asked to drain: ", absl::StrJoin(problems, "; "))));
  }
};

void WorkerPool::DrainTenant(absl::string_view tenant, absl::Time deadline,
                             std::function<void(absl::StatusOr<int32_t>)> done) {
  auto drain = std::make_shared<Drain>();
  drain->done = std::move(done);
  {
    MutexLock lock(&mutex_);
    for (const WorkerView& worker : directory_.ListTenant(tenant)) {
      directory_.BeginDrain(worker.id);
      drain->calls.push_back(std::make_unique<DrainCall>());
      drain->calls.back()->worker = worker.id;
      drain->calls.back()->stub = connections_.at(worker.id).stub;
    }
  }
  if (drain->calls.empty()) return drain->done(0);
  drain->unanswered = drain->calls.size();
  for (const std::unique_ptr<DrainCall>& owned : drain->calls) {
    DrainCall* call = owned.get();
    call->context.set_deadline(GrpcDeadline(deadline - kDrainAnswerMargin));
    Authorize(call->context);
    call->stub->async()->Drain(&call->context, &call->request, &call->response,
                               [this, drain, call](const grpc::Status& status) {
                                 DrainAnswered(*call, status);
                                 drain->Answered();
                               });
  }
}

void WorkerPool::DrainAnswered(DrainCall& call, const grpc::Status& status) {
  call.status = status;
  MutexLock lock(&mutex_);
  // The worker drains, but could not say so before the deadline.
  if (status.error_code() == grpc::StatusCode::DEADLINE_EXCEEDED) {
    call.status = grpc::Status::OK;
    call.response.set_remaining_requests(
        static_cast<uint32_t>(directory_.View(call.worker).outstanding));
  }
  directory_.EndDrain(call.worker);
}

}  // namespace palimpsest::router
