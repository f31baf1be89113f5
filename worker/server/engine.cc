#include "worker/server/engine.h"

#include <algorithm>
#include <utility>
#include <variant>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "common/monotonic_time.h"
#include "worker/core/check.h"

namespace palimpsest {
namespace {

// How long the thread sleeps at most: reports and the KV target depend on time.
constexpr absl::Duration kLongestSleep = absl::Milliseconds(250);
// How long a stream waits at most between two requests for its model's parameters.
constexpr absl::Duration kLongestActivationRetry = absl::Seconds(5);

}  // namespace

absl::Status EngineOptions::Validate() const {
  if (absl::Status status = scheduler.Validate(); !status.ok()) return status;
  if (absl::Status status = kv_target.Validate(); !status.ok()) return status;
  if (stream_tokens < 1 || max_step_failures < 1 || stall_timeout <= absl::ZeroDuration()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "stream_tokens (", stream_tokens, "), max_step_failures (", max_step_failures,
        ") and stall_timeout (", absl::FormatDuration(stall_timeout), ") must be above 0"));
  }
  return absl::OkStatus();
}

Engine::Engine(const EngineOptions& options, const EngineParts& parts)
    : options_(options),
      parts_(parts),
      scheduler_(options.scheduler, parts.token_bytes, parts.store),
      kv_target_(options.kv_target),
      last_progress_(parts.clock->Now()),
      step_durations_(options.scheduler.sliding_window),
      streams_alive_(std::make_shared<std::atomic<int32_t>>(0)),
      idle_since_(parts.clock->Now()) {
  PALIMPSEST_CHECK(options.scheduler.pipeline_depth <= parts.runner->pipeline_depth());
  const bool copies = options.scheduler.swap_blocks > 0 || parts.store != nullptr;
  PALIMPSEST_CHECK(copies == (parts.swap != nullptr));
  if (options.heads.has_value()) {
    auto mass = HeadMass::Create(*options.heads);
    PALIMPSEST_CHECK(mass.ok());
    heads_ = Heads{*mass, *mass};
  }
  if (parts_.store != nullptr) parts_.store->SetWakeup([this] { Wake(); });
  if (parts_.swap != nullptr) parts_.swap->SetWakeup([this] { Wake(); });
  parts_.memory->SetWakeup([this] { Wake(); });
}

Engine::~Engine() {
  Stop();
  parts_.memory->SetWakeup(nullptr);
  if (parts_.store != nullptr) parts_.store->SetWakeup(nullptr);
  if (parts_.swap == nullptr) return;
  parts_.swap->AwaitAll();
  parts_.swap->SetWakeup(nullptr);
}

void Engine::Start() {
  thread_ = std::thread([this] { Run(); });
}

void Engine::Stop() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    woken_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
  Quiesce();
  EndTransfers();
  if (!rotation_.none()) TellRunner(rotation_ = Rotation());
  TakeRequests();
  Fail(Who::kAll, absl::UnavailableError("the worker is shutting down; ask another one"),
       absl::ZeroDuration());
  Deliver();
}

void Engine::Run() {
  while (true) {
    {
      MutexLock lock(&mutex_);
      if (stopping_) return;
      woken_ = false;
    }
    if (RunOnce()) continue;
    const absl::Time now = parts_.clock->Now();
    absl::Duration sleep = kLongestSleep;
    for (const absl::Time next : {retry_step_at_, scheduler_.next_give_up()}) {
      if (next > now) sleep = std::min(sleep, next - now);
    }
    MutexLock lock(&mutex_);
    if (!woken_) changed_.WaitWithTimeout(&mutex_, sleep);
  }
}

void Engine::Wake() {
  MutexLock lock(&mutex_);
  woken_ = true;
  changed_.SignalAll();
}

absl::StatusOr<std::shared_ptr<GenerationStream>> Engine::Submit(SequenceRequest request,
                                                                 std::function<void()> ready) {
  if (absl::Status status = scheduler_.CheckRequest(request); !status.ok()) return status;
  const int32_t most = options_.scheduler.max_sequences();
  MutexLock lock(&mutex_);
  if (stopping_ || draining_) {
    return absl::UnavailableError("the worker is draining; ask another one");
  }
  if (unfinished_ >= most) {
    return absl::ResourceExhaustedError(
        absl::StrCat("the queue is full: ", unfinished_, " requests run or wait; try again later"));
  }
  if (streams_alive_->load(std::memory_order_relaxed) >= 2 * most) {
    return absl::ResourceExhaustedError(absl::StrCat(
        "the outputs of ", most, " finished requests wait for their clients to read them"));
  }
  auto stream = std::make_shared<GenerationStream>(next_ticket_++, options_.stream_tokens,
                                                   std::move(ready), streams_alive_);
  ++unfinished_;
  inbox_.push_back({stream, std::move(request), parts_.clock->Now()});
  woken_ = true;
  changed_.SignalAll();
  return stream;
}

void Engine::Cancel(const GenerationStream& stream) {
  MutexLock lock(&mutex_);
  if (stopping_) return;
  cancelled_.push_back(stream.ticket());
  woken_ = true;
  changed_.SignalAll();
}

void Engine::StartDrain() {
  MutexLock lock(&mutex_);
  draining_ = true;
  stats_.draining = true;
}

int32_t Engine::AwaitDrained(absl::Duration timeout) {
  const absl::Time deadline = MonotonicNow() + timeout;
  MutexLock lock(&mutex_);
  while (unfinished_ > 0 && !changed_.WaitWithDeadline(&mutex_, deadline)) {
  }
  return unfinished_;
}

absl::Duration Engine::IdleFor() const {
  MutexLock lock(&mutex_);
  return unfinished_ > 0 ? absl::ZeroDuration() : parts_.clock->Now() - idle_since_;
}

EngineStats Engine::Stats() const {
  MutexLock lock(&mutex_);
  return stats_;
}

bool Engine::RunOnce() {
  bool busy = TakeTransfers();
  busy |= PollStore();
  busy |= HandleMemoryEvents();
  busy |= TakeRequests();
  FailStalled();
  StateNeeds();
  busy |= RunSteps();
  PublishStats();
  return busy;
}

// Requests and cancellations that arrived; in this order, so that a request can be cancelled.
bool Engine::TakeRequests() {
  std::vector<Submission> submissions;
  std::vector<uint64_t> cancelled;
  {
    MutexLock lock(&mutex_);
    submissions.swap(inbox_);
    cancelled.swap(cancelled_);
  }
  const bool busy = !submissions.empty() || !cancelled.empty();
  if (scheduler_.idle()) last_progress_ = parts_.clock->Now();
  for (Submission& submission : submissions) AddSequence(std::move(submission));
  for (uint64_t ticket : cancelled) {
    const auto found = sequence_of_ticket_.find(ticket);
    if (found != sequence_of_ticket_.end()) scheduler_.Cancel(found->second);
  }
  return busy;
}

void Engine::AddSequence(Submission submission) {
  Active active{std::move(submission.stream), submission.arrival};
  active.streamed = submission.request.output_offset > 0;
  const auto id = scheduler_.Add(std::move(submission.request));
  if (!id.ok()) {
    End(active, {.status = id.status(), .retry_after = kDefaultRetryAfter});
    return;
  }
  sequence_of_ticket_.emplace(active.stream->ticket(), *id);
  active_.emplace(*id, std::move(active));
  retry_activation_at_ = absl::InfinitePast();
}

bool Engine::HandleMemoryEvents() {
  const std::vector<MemoryEvent> events = parts_.memory->TakeEvents();
  for (const MemoryEvent& event : events) {
    std::visit([this](const auto& e) { Handle(e); }, event);
  }
  return !events.empty();
}

void Engine::Handle(const KvMapped& event) { scheduler_.OnSlabsMapped(event.indexes); }

void Engine::Handle(const KvRevoked& event) {
  Quiesce();
  scheduler_.MakeRoomToGive(event.slabs);
  EndTransfers();
  const Scheduler::Give give = scheduler_.GiveSlabs(event.slabs);
  parts_.copier->Copy(give.moves);
  parts_.memory->FinishKvRevoke(event.id, give.slabs);
  Log(LogLevel::kInfo, "KV slabs given back",
      {{"revoke", event.id},
       {"asked", event.slabs},
       {"slabs", give.slabs.size()},
       {"moved_blocks", give.moves.size()},
       {"preempted", give.preempted}});
}

void Engine::Handle(const ParametersRevoked& event) {
  Quiesce();
  parts_.memory->FinishParameterRevoke(event.id);
  Log(LogLevel::kInfo, "parameter slabs given back",
      {{"revoke", event.id}, {"slabs", event.indexes.size()}});
}

void Engine::Handle(const RotationWanted& event) {
  Quiesce();
  // It may copy into memory that is about to be unmapped.
  if (!rotation_.none()) TellRunner(Rotation());
  ++rotations_open_;
  parts_.memory->FinishRotation(event.id);
}

void Engine::TellRunner(const Rotation& rotation) {
  const absl::Status status = parts_.runner->SetRotation(rotation);
  Log(status.ok() ? LogLevel::kInfo : LogLevel::kError, "the runner knows which layers rotate",
      {{"layers", rotation.stages.size()}, {"slots", rotation.slots}, {"status", status}});
}

void Engine::Handle(const RotationSettled& event) {
  --rotations_open_;
  const bool told = !rotation_.none();
  if (event.changed) rotation_ = event.rotation;
  // Until all are settled it must not copy.
  if ((event.changed || told) && rotations_open_ == 0) TellRunner(rotation_);
}

void Engine::Handle(const ParametersComing&) { retry_step_at_ = absl::InfinitePast(); }

void Engine::Handle(const ActivationRefused& event) {
  if (parts_.memory->ParametersAvailable()) return;  // they came in the meantime
  refusal_ = event.message;
  retry_activation_at_ = parts_.clock->Now() + std::min(event.retry_after, kLongestActivationRetry);
  const int32_t failed = Fail(
      Who::kUnstreamed,
      absl::UnavailableError(absl::StrCat("no memory for the model's parameters: ", event.message)),
      event.retry_after);
  scheduler_.PreemptAll();
  Log(LogLevel::kWarning, "activation refused",
      {{"reason", event.message},
       {"retry_after", event.retry_after},
       {"failed", failed},
       {"streams_paused", active_.size()}});
}

void Engine::Handle(const KvPressureSeen& event) {
  Log(LogLevel::kDebug, "no more KV slabs now", {{"target", event.target_slabs}});
}

void Engine::Handle(const TurnBegun& event) {
  may_run_ = true;
  last_compaction_ = parts_.clock->Now();  // what is stuck has to be so during the turn
  Log(LogLevel::kDebug, "turn begun", {{"turn", event.id}, {"quantum", event.quantum}});
}

void Engine::Handle(const TurnEnding& event) {
  Quiesce();
  may_run_ = false;
  parts_.memory->FinishTurn(event.id);
  Log(LogLevel::kDebug, "turn ended", {{"turn", event.id}});
}

void Engine::Handle(const BrokerConnected& event) {
  connected_ = true;
  may_run_ = !event.turns;
  if (parts_.on_connection) parts_.on_connection(true);
  parts_.memory->SetKvTarget(stated_target_.target_slabs, stated_target_.needed_slabs);
  parts_.memory->RequestActivation(ActivationReason::kEager);
}

void Engine::Handle(const BrokerLost& event) {
  connected_ = false;
  if (parts_.on_connection) parts_.on_connection(false);
  Log(LogLevel::kWarning, "broker lost; running on with the memory that is here",
      {{"reason", event.reason}});
}

void Engine::FailStalled() {
  const absl::Time now = parts_.clock->Now();
  if (scheduler_.idle() || now - last_progress_ < options_.stall_timeout) return;
  std::string reason = "there are not enough KV slabs for the oldest request";
  if (!parts_.memory->ParametersAvailable()) {
    reason = "the model's parameters are not in memory";
    if (!refusal_.empty()) absl::StrAppend(&reason, " (the broker refused them: ", refusal_, ")");
  } else if (!may_run_) {
    reason = "other tenants had their turns all this time";
  }
  Fail(Who::kAll,
       absl::UnavailableError(absl::StrCat("no step could run for ",
                                           absl::FormatDuration(now - last_progress_), ": ", reason,
                                           connected_ ? "" : ", and the broker is not connected")),
       kDefaultRetryAfter);
}

int32_t Engine::Fail(Who who, const absl::Status& status, absl::Duration retry_after) {
  Deliver();
  std::vector<SequenceId> failed;
  for (const auto& [id, active] : active_) {
    if (who == Who::kAll || !active.streamed) failed.push_back(id);
  }
  // Youngest first, so that what many share stays in the cache longest.
  std::sort(failed.begin(), failed.end(), std::greater<>());
  for (SequenceId id : failed) {
    PALIMPSEST_CHECK(scheduler_.Drop(id));
    const auto found = active_.find(id);
    End(found->second, {.status = status, .retry_after = retry_after});
    active_.erase(found);
  }
  return static_cast<int32_t>(failed.size());
}

// Hands the scheduler's outputs to their streams, and tells the readers afterwards.
void Engine::Deliver() {
  std::vector<SequenceOutput> outputs = scheduler_.TakeOutputs();
  const absl::Time begin = parts_.clock->Now();
  const bool any = !outputs.empty();
  while (!outputs.empty()) {
    for (SequenceOutput& output : outputs) DeliverOne(output);
    outputs = scheduler_.TakeOutputs();  // of readers that were too slow
  }
  for (const auto& stream : std::exchange(to_notify_, {})) stream->Notify();
  if (any) parts_.metrics->OnDelivered(parts_.clock->Now() - begin);
}

void Engine::DeliverOne(SequenceOutput& output) {
  const auto found = active_.find(output.id);
  PALIMPSEST_CHECK(found != active_.end());
  Active& active = found->second;
  if (output.token.has_value()) {
    const absl::Time now = parts_.clock->Now();
    if (active.started) {
      parts_.metrics->OnNextToken(now - active.last_event);
    } else {
      parts_.metrics->OnFirstToken(now - active.last_event);
    }
    active.started = true;
    active.streamed = true;
    active.last_event = now;
    if (!active.stream->Push(*std::move(output.token))) {
      End(active, {.status = absl::ResourceExhaustedError(absl::StrCat(
                       "the client is more than ", options_.stream_tokens, " tokens behind"))});
      if (!output.finish.has_value()) scheduler_.Cancel(output.id);
    } else if (!output.finish.has_value()) {
      to_notify_.push_back(active.stream);
    }
  }
  if (!output.finish.has_value()) return;
  if (active.stream != nullptr) {
    parts_.metrics->OnFinish(*output.finish);
    End(active, {.reason = *output.finish,
                 .stop_trim_bytes = output.stop_trim_bytes,
                 .usage = output.usage});
  }
  active_.erase(found);
}

// Ends a request once; its readers are told by Deliver.
void Engine::End(Active& active, GenerationStream::End end) {
  if (!end.status.ok()) parts_.metrics->OnFailure(end.status);
  sequence_of_ticket_.erase(active.stream->ticket());
  active.stream->Finish(std::move(end));
  to_notify_.push_back(std::exchange(active.stream, nullptr));
  MutexLock lock(&mutex_);
  --unfinished_;
  idle_since_ = parts_.clock->Now();
  changed_.SignalAll();
}

void Engine::StateNeeds() {
  const KvTargetPolicy::Target target = kv_target_.Update(scheduler_.Demand(), parts_.clock->Now());
  if (target != stated_target_) {
    stated_target_ = target;
    parts_.memory->SetKvTarget(target.target_slabs, target.needed_slabs);
  }
  const SlabCounts slabs = scheduler_.blocks().CountSlabs();
  parts_.memory->SendReport(
      {.active = !scheduler_.idle(),
       .running_sequences = scheduler_.running(),
       .waiting_sequences = scheduler_.waiting(),
       .kv_slabs_used = slabs.used,
       .kv_slabs_cached = slabs.cached,
       .kv_slabs_free = slabs.free,
       .decode_step_seconds = step_durations_.decode_seconds(),
       .prefill_step_seconds = step_durations_.prefill_seconds(),
       .prefill_share = step_durations_.prefill_share(),
       .rotation_stall_seconds = absl::ToDoubleSeconds(step_durations_.rotation_stall()),
       .rotation_bytes = rotation_bytes_,
       .cached_slab_seconds = CachedSlabSeconds()});
}

double Engine::CachedSlabSeconds() const {
  const SchedulerCounters& counters = scheduler_.counters();
  if (counters.prompt_tokens == 0) return 0;
  const KvGeometry& geometry = options_.scheduler.geometry;
  const double tokens = static_cast<double>(geometry.slab_bytes.count()) /
                        static_cast<double>(geometry.block_bytes.count()) * geometry.block_tokens;
  return tokens * step_durations_.prompt_token_seconds() *
         static_cast<double>(counters.cached_tokens) / static_cast<double>(counters.prompt_tokens);
}

void Engine::PublishStats() {
  parts_.metrics->Update(scheduler_, parts_.memory->Mapped(), step_durations_);
  MutexLock lock(&mutex_);
  stats_.running = scheduler_.running();
  stats_.waiting = scheduler_.waiting();
  stats_.blocks_used = scheduler_.blocks().live_blocks();
  stats_.blocks_cached = scheduler_.blocks().cached_blocks();
  stats_.blocks_free = scheduler_.blocks().free_blocks();
  stats_.counters = scheduler_.counters();
  stats_.steps = parts_.metrics->step_totals();
  stats_.broker_connected = connected_;
}

}  // namespace palimpsest
