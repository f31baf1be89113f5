#include "worker/compute/cuda/tensor_parallel_runner.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"

namespace palimpsest::cuda {
namespace {

bool SameTokens(const StepResult& a, const StepResult& b) {
  return std::equal(a.sampled.begin(), a.sampled.end(), b.sampled.begin(), b.sampled.end(),
                    [](const auto& x, const auto& y) {
                      return x.has_value() == y.has_value() &&
                             (!x.has_value() || x->token == y->token);
                    });
}

}  // namespace

TensorParallelRunner::TensorParallelRunner(MeetingPtr meeting,
                                           std::unique_ptr<CollectiveGroup> group,
                                           ParameterGate* gate)
    : meeting_(std::move(meeting)),
      group_(std::move(group)),
      gate_(gate),
      lockstep_(gate, meeting_.get(), group_->ranks()),
      team_(group_->ranks()),
      runners_(static_cast<size_t>(group_->ranks())) {}

absl::StatusOr<std::unique_ptr<TensorParallelRunner>> TensorParallelRunner::Create(
    MeetingPtr meeting, std::unique_ptr<CollectiveGroup> group, ParameterGate* gate,
    MakeRank make) {
  std::unique_ptr<TensorParallelRunner> runner(
      new TensorParallelRunner(std::move(meeting), std::move(group), gate));
  if (absl::Status status = runner->MakeRunners(make); !status.ok()) return status;
  return runner;
}

absl::Status TensorParallelRunner::MakeRunners(MakeRank make) {
  std::vector<absl::Status> statuses(runners_.size());
  team_.Run([&](int rank) {
    auto made = make(group_->rank(rank), gate_ != nullptr ? lockstep_.rank(rank) : nullptr);
    if (made.ok()) {
      runners_[rank] = *std::move(made);
      return;
    }
    statuses[rank] = made.status();
    // The others may be waiting for it in their first step.
    group_->rank(rank).Abort(made.status());
  });
  return FirstError(statuses);
}

TensorParallelRunner::~TensorParallelRunner() {
  team_.Run([this](int rank) { runners_[rank].reset(); });
}

absl::Status TensorParallelRunner::FirstError(const std::vector<absl::Status>& statuses) const {
  if (absl::Status aborted = meeting_->aborted(); !aborted.ok()) return aborted;
  for (const absl::Status& status : statuses) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status TensorParallelRunner::OnAll(absl::FunctionRef<absl::Status(ModelRunner& runner)> call,
                                         absl::string_view what) {
  std::vector<absl::Status> statuses(runners_.size());
  team_.Run([&](int rank) { statuses[rank] = call(*runners_[rank]); });
  const auto failed = std::count_if(statuses.begin(), statuses.end(),
                                    [](const absl::Status& status) { return !status.ok(); });
  if (failed == 0) return absl::OkStatus();
  if (failed == ranks()) return statuses.front();
  const absl::Status error = absl::InternalError(
      absl::StrCat("the ranks do not agree on ", what, ": ", FirstError(statuses).message()));
  group_->rank(0).Abort(error);
  return error;
}

absl::Status TensorParallelRunner::Submit(const StepPlan& plan) {
  return OnAll([&](ModelRunner& runner) { return runner.Submit(plan); }, "a step plan");
}

absl::Status TensorParallelRunner::SetRotation(const Rotation& rotation) {
  return OnAll([&](ModelRunner& runner) { return runner.SetRotation(rotation); }, "a rotation");
}

absl::StatusOr<StepResult> TensorParallelRunner::Wait() {
  std::vector<absl::Status> statuses(runners_.size());
  std::vector<StepResult> results(runners_.size());
  team_.Run([&](int rank) {
    absl::StatusOr<StepResult> result = runners_[rank]->Wait();
    if (result.ok()) {
      results[rank] = *std::move(result);
    } else {
      statuses[rank] = result.status();
    }
  });
  if (absl::Status status = FirstError(statuses); !status.ok()) return status;
  if (gate_ != nullptr) {
    if (absl::Status status = gate_->CheckPassed(); !status.ok()) return status;
  }
  for (const StepResult& result : results) {
    if (SameTokens(result, results.front())) continue;
    const absl::Status error = absl::InternalError("the ranks sampled different tokens");
    group_->rank(0).Abort(error);
    return error;
  }
  return std::move(results.front());
}

}  // namespace palimpsest::cuda
