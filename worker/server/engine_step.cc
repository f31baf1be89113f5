// The engine's steps: what it has in flight, and what it does when they fail or can't be planned.
#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/log.h"
#include "worker/server/engine.h"

namespace palimpsest {
namespace {

// How long nothing must have run before KV slabs are exchanged for better placed ones.
constexpr absl::Duration kCompactionDelay = absl::Seconds(1);
constexpr absl::Duration kFirstRetry = absl::Milliseconds(5);
constexpr absl::Duration kLongestRetry = absl::Seconds(1);

}  // namespace

// Submits steps until as many as may be are in flight, hands out the tokens of earlier ones while
// these run, and waits for the oldest.
bool Engine::RunSteps() {
  bool submitted = false;
  while (steps_in_flight_ < options_.scheduler.pipeline_depth && SubmitStep()) submitted = true;
  Deliver();
  if (steps_in_flight_ == 0) return submitted;
  AwaitStep();
  return true;
}

bool Engine::SubmitStep() {
  if (scheduler_.idle() || rotations_open_ > 0) return false;
  const Clock& clock = *parts_.clock;
  const absl::Time begin = clock.Now();
  if (!parts_.memory->ParametersAvailable()) {
    if (begin >= retry_activation_at_) {
      parts_.memory->RequestActivation(ActivationReason::kRequest);
    }
    return false;
  }
  if (!may_run_ || begin < retry_step_at_) return false;
  const StepPlan& plan = scheduler_.Schedule();
  StartTransfers();
  if (plan.chunks.empty()) {
    if (steps_in_flight_ == 0) NoteSwapStall(begin);
    if (steps_in_flight_ == 0) CompactIfStuck(begin);
    return false;
  }
  const absl::Time scheduled = clock.Now();
  if (absl::Status status = parts_.runner->Submit(plan); !status.ok()) {
    Quiesce();
    if (scheduler_.in_flight() > 0) scheduler_.Abandon();
    StartTransfers();
    OnStepFailure(status);
    return true;
  }
  ++steps_in_flight_;
  step_durations_.Submitted(plan, scheduled);
  EndSwapStall(begin);
  parts_.metrics->OnSubmitted(plan, scheduled - begin, clock.Now() - scheduled);
  return true;
}

void Engine::AwaitStep() {
  const Clock& clock = *parts_.clock;
  const absl::Time begin = clock.Now();
  absl::StatusOr<StepResult> result = parts_.runner->Wait();
  --steps_in_flight_;
  // Before the tokens are believed: KV that did not come back makes them worthless.
  std::vector<SwapEnded> ended;
  if (parts_.swap != nullptr) ended = parts_.swap->TakeEnded();
  for (const SwapEnded& transfer : ended) {
    if (transfer.awaited && result.ok() && !transfer.status.ok()) result = transfer.status;
  }
  if (!result.ok()) {
    step_durations_.Failed(clock.Now());
    AbandonSteps();
    OnTransfersEnded(ended);
    OnStepFailure(result.status());
    return;
  }
  const absl::Time executed = clock.Now();
  step_durations_.Ended(result->times, executed);
  rotation_bytes_ += result->rotation_bytes;
  parts_.metrics->OnExecuted(*result);
  if (!result->head_sample.empty()) TakeHeadSample(result->head_sample);
  scheduler_.Commit(*std::move(result));
  OnTransfersEnded(ended);
  step_failures_ = 0;
  refusal_.clear();
  last_progress_ = clock.Now();
  parts_.metrics->OnCommitted(executed - begin, last_progress_ - executed);
}

void Engine::TakeHeadSample(const HeadSample& sample) {
  if (!heads_.has_value()) return;
  absl::Status status = heads_->mass.Sample(sample.shares);
  status.Update(heads_->effect.Sample(sample.effects));
  if (!status.ok()) {
    Log(LogLevel::kWarning, "a sample of heads was not taken", {{"status", status}});
    return;
  }
  parts_.metrics->OnHeadSample(heads_->mass);
}

void Engine::Quiesce() {
  while (steps_in_flight_ > 0) AwaitStep();
}

void Engine::AbandonSteps() {
  for (; steps_in_flight_ > 0; --steps_in_flight_) {
    parts_.runner->Wait().IgnoreError();
    step_durations_.Failed(parts_.clock->Now());
  }
  scheduler_.Abandon();
}

void Engine::CompactIfStuck(absl::Time now) {
  if (now - std::max(last_progress_, last_compaction_) < kCompactionDelay) return;
  if (scheduler_.transferring()) return;
  last_compaction_ = now;
  const Scheduler::Give give = scheduler_.Compact();
  if (give.slabs.empty()) return;
  parts_.copier->Copy(give.moves);
  parts_.memory->ReleaseKv(give.slabs);
  parts_.memory->SetKvTarget(stated_target_.target_slabs, stated_target_.needed_slabs);
  Log(LogLevel::kInfo, "KV slabs behind holes given back, to be mapped at better places",
      {{"slabs", give.slabs.size()}, {"moved_blocks", give.moves.size()}});
}

void Engine::OnStepFailure(const absl::Status& status) {
  ++step_failures_;
  Log(LogLevel::kWarning, "step abandoned",
      {{"status", status}, {"failures_in_a_row", step_failures_}});
  if (step_failures_ >= options_.max_step_failures) {
    step_failures_ = 0;
    Fail(Who::kAll,
         absl::UnavailableError(absl::StrCat("the model could not run: ", status.message())),
         kDefaultRetryAfter);
    return;
  }
  const int doublings = std::min(step_failures_ - 1, 16);
  retry_step_at_ =
      parts_.clock->Now() + std::min(kLongestRetry, kFirstRetry * (int64_t{1} << doublings));
}

}  // namespace palimpsest
