#include "worker/memory/parameter_gate.h"

#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"

namespace palimpsest {

absl::Status ParameterGateImpl::AwaitStage(int stage) {
  absl::Status result;
  absl::Time start = absl::InfinitePast();
  {
    MutexLock lock(&mu_);
    if (stage < 0 || stage >= static_cast<int>(stages_.size())) {
      return absl::InvalidArgumentError(
          absl::StrCat("stage ", stage, " of a model of ", stages_.size()));
    }
    while (failure_.ok() && stages_[stage] == Stage::kComing) {
      if (start == absl::InfinitePast()) start = absl::Now();
      if (changed_.WaitWithDeadline(&mu_, start + patience_) && stages_[stage] == Stage::kComing) {
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
    }
  }
  if (waited_ && start != absl::InfinitePast()) waited_(absl::Now() - start);
  return result;
}

void ParameterGateImpl::Set(int stage, Stage state) {
  MutexLock lock(&mu_);
  stages_[stage] = state;
  changed_.SignalAll();
}

ParameterGateImpl::Stage ParameterGateImpl::Get(int stage) const {
  MutexLock lock(&mu_);
  return stages_[stage];
}

void ParameterGateImpl::Fail(absl::Status status) {
  MutexLock lock(&mu_);
  if (failure_.ok()) failure_ = std::move(status);
  changed_.SignalAll();
}

}  // namespace palimpsest
