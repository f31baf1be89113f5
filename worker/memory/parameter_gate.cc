#include "worker/memory/parameter_gate.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "common/monotonic_time.h"

namespace palimpsest {

absl::Status ParameterGateImpl::AwaitStage(int stage) {
  const absl::StatusOr<Stage> state = Await(stage, Stage::kReady);
  if (rotating_ == nullptr) return state.status();
  absl::Status status = state.status();
  if (status.ok() && *state == Stage::kRotating) status = rotating_->Await(stage);
  if (!status.ok()) rotating_->Restart();
  return status;
}

void ParameterGateImpl::ReleaseStage(int stage) {
  if (rotating_ != nullptr && Get(stage) == Stage::kRotating) rotating_->Release(stage);
}

absl::Status ParameterGateImpl::StageEvents(int stage, absl::Span<void*> events) {
  const absl::StatusOr<Stage> state = Await(stage, Stage::kQueued);
  if (!state.ok()) return state.status();
  for (size_t rank = 0; rank < events.size(); ++rank) {
    events[rank] = *state == Stage::kQueued ? event_(stage, static_cast<int>(rank)) : nullptr;
  }
  return absl::OkStatus();
}

absl::Status ParameterGateImpl::CheckPassed() {
  const absl::Time deadline = MonotonicNow() + patience_;
  MutexLock lock(&mu_);
  while (failure_.ok() && std::any_of(passed_.begin(), passed_.end(),
                                      [this](int stage) ABSL_NO_THREAD_SAFETY_ANALYSIS {
                                        return unproved_[stage];
                                      })) {
    if (changed_.WaitWithDeadline(&mu_, deadline)) {
      return absl::DeadlineExceededError("the checksums of parameters in use did not come");
    }
  }
  passed_.clear();
  return failure_;
}

absl::StatusOr<ParameterGateImpl::Stage> ParameterGateImpl::Await(int stage, Stage wanted) {
  absl::StatusOr<Stage> result = Stage::kReady;
  absl::Time start = absl::InfinitePast();
  {
    MutexLock lock(&mu_);
    if (stage < 0 || stage >= static_cast<int>(stages_.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("stage ", stage, " of a model of ", stages_.size()));
    }
    const auto coming = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return stages_[stage] == Stage::kComing ||
             (stages_[stage] == Stage::kQueued && wanted == Stage::kReady);
    };
    while (failure_.ok() && coming()) {
      if (start == absl::InfinitePast()) start = MonotonicNow();
      if (changed_.WaitWithDeadline(&mu_, start + patience_) && coming()) {
        result = absl::DeadlineExceededError(absl::StrCat("the parameters of stage ", stage,
                                                          " did not come within ",
                                                          absl::FormatDuration(patience_)));
        break;
      }
    }
    if (!failure_.ok()) {
      result = failure_;
    } else if (stages_[stage] == Stage::kAbsent) {
      result = absl::UnavailableError(
          absl::StrCat("the parameters of stage ", stage, " are not in memory"));
    } else if (result.ok()) {
      result = stages_[stage];
      if (stages_[stage] == Stage::kQueued) passed_.insert(stage);
    }
  }
  if (waited_ && start != absl::InfinitePast()) waited_(MonotonicNow() - start);
  return result;
}

void ParameterGateImpl::Set(int stage, Stage state, bool unproved) {
  MutexLock lock(&mu_);
  stages_[stage] = state;
  unproved_[stage] = unproved;
  changed_.SignalAll();
}

ParameterGateImpl::Stage ParameterGateImpl::Get(int stage) const {
  MutexLock lock(&mu_);
  return stages_[stage];
}

void ParameterGateImpl::Fail(absl::Status status) {
  if (rotating_ != nullptr) rotating_->Fail(status);
  MutexLock lock(&mu_);
  if (failure_.ok()) failure_ = std::move(status);
  changed_.SignalAll();
}

}  // namespace palimpsest
