#include "worker/core/threaded_runner.h"

#include <utility>

#include "worker/core/check.h"

namespace palimpsest {

ThreadedRunner::ThreadedRunner(ModelRunner* inner) : inner_(inner), thread_([this] { Run(); }) {}

ThreadedRunner::~ThreadedRunner() {
  {
    MutexLock lock(&mutex_);
    PALIMPSEST_CHECK(flights_.empty());
    stopping_ = true;
    changed_.SignalAll();
  }
  thread_.join();
}

absl::Status ThreadedRunner::Submit(const StepPlan& plan) {
  MutexLock lock(&mutex_);
  PALIMPSEST_CHECK(static_cast<int>(flights_.size()) < pipeline_depth());
  flights_.push_back({PlanCopy(plan), std::nullopt});
  changed_.SignalAll();
  return absl::OkStatus();
}

absl::StatusOr<StepResult> ThreadedRunner::Wait() {
  MutexLock lock(&mutex_);
  PALIMPSEST_CHECK(!flights_.empty());
  while (!flights_.front().result.has_value()) changed_.Wait(&mutex_);
  absl::StatusOr<StepResult> result = *std::move(flights_.front().result);
  flights_.pop_front();
  return result;
}

absl::Status ThreadedRunner::SetRotation(const Rotation& rotation) {
  {
    MutexLock lock(&mutex_);
    PALIMPSEST_CHECK(flights_.empty());
  }
  return inner_->SetRotation(rotation);
}

ThreadedRunner::Flight* ThreadedRunner::Next() {
  for (Flight& flight : flights_) {
    if (!flight.result.has_value()) return &flight;
  }
  return nullptr;
}

void ThreadedRunner::Run() {
  StepResult previous;
  while (true) {
    Flight* flight = nullptr;
    {
      MutexLock lock(&mutex_);
      while ((flight = Next()) == nullptr && !stopping_) changed_.Wait(&mutex_);
      if (flight == nullptr) return;
    }
    // Nobody else touches a flight without a result, and it stays where it is.
    flight->plan.Resolve(previous);
    const absl::Status submitted = inner_->Submit(flight->plan.plan());
    absl::StatusOr<StepResult> result = submitted.ok() ? inner_->Wait() : submitted;
    previous = result.ok() ? *result : StepResult();
    MutexLock lock(&mutex_);
    flight->result = std::move(result);
    changed_.SignalAll();
  }
}

}  // namespace palimpsest
