#include "worker/compute/cuda/lockstep_gate.h"

namespace palimpsest::cuda {

LockstepGate::LockstepGate(ParameterGate* gate, RankMeeting* meeting, int ranks)
    : gate_(gate), meeting_(meeting), events_(static_cast<size_t>(ranks)) {
  ranks_.reserve(events_.size());
  for (int rank = 0; rank < ranks; ++rank) ranks_.emplace_back(this, rank);
}

absl::Status LockstepGate::RankGate::AwaitStage(int stage) {
  return all_->meeting_->Meet([&] { return all_->gate_->AwaitStage(stage); });
}

absl::Status LockstepGate::RankGate::StageEvents(int stage, absl::Span<void*> events) {
  absl::Status status = all_->meeting_->Meet(
      [&] { return all_->gate_->StageEvents(stage, absl::MakeSpan(all_->events_)); });
  for (void*& event : events) event = status.ok() ? all_->events_[rank_] : nullptr;
  return status;
}

}  // namespace palimpsest::cuda
