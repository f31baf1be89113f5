// The engine's transfers: KV that leaves for host memory and returns.
#include <algorithm>
#include <utility>

#include "common/log.h"
#include "worker/server/engine.h"

namespace palimpsest {
namespace {

void Smooth(double value, double& smoothed) {
  constexpr double kWeight = 0.2;
  smoothed = smoothed == 0 ? value : smoothed + kWeight * (value - smoothed);
}

}  // namespace

void Engine::StartTransfers() {
  if (parts_.swap == nullptr) return;
  for (SwapTransfer& transfer : scheduler_.TakeTransfers()) {
    parts_.swap->Start(std::move(transfer));
  }
}

bool Engine::TakeTransfers() {
  if (parts_.swap == nullptr) return false;
  const std::vector<SwapEnded> ended = parts_.swap->TakeEnded();
  if (ended.empty()) return false;
  const auto failed = std::find_if(ended.begin(), ended.end(), [](const SwapEnded& transfer) {
    return transfer.awaited && !transfer.status.ok();
  });
  if (failed != ended.end() && scheduler_.in_flight() > 0) {
    AbandonSteps();
    OnStepFailure(failed->status);
  }
  OnTransfersEnded(ended);
  return true;
}

void Engine::OnTransfersEnded(const std::vector<SwapEnded>& ended) {
  for (const SwapEnded& transfer : ended) {
    const bool in = transfer.direction == SwapTransfer::Direction::kIn;
    if (!transfer.status.ok()) {
      Log(LogLevel::kError, "KV could not be copied; its sequence is computed again",
          {{"direction", in ? "from host memory" : "to host memory"}, {"status", transfer.status}});
    } else if (in && transfer.took > absl::ZeroDuration()) {
      Smooth(transfer.blocks / absl::ToDoubleSeconds(transfer.took), swap_blocks_per_second_);
    }
    parts_.metrics->OnTransfer(transfer);
    scheduler_.OnTransferEnded(transfer.id, transfer.status.ok());
  }
  if (parts_.swap == nullptr) return;
  const double measured = std::min(step_durations_.decode_seconds() * swap_blocks_per_second_, 1e9);
  scheduler_.SetSwapOverlap(options_.swap_overlap_blocks.value_or(static_cast<int32_t>(measured)));
  StartTransfers();
}

void Engine::EndTransfers() {
  if (parts_.swap == nullptr) return;
  StartTransfers();
  const absl::Time begin = parts_.clock->Now();
  const bool any = scheduler_.transferring();
  while (scheduler_.transferring()) {
    parts_.swap->AwaitAll();
    OnTransfersEnded(parts_.swap->TakeEnded());
  }
  if (any) parts_.metrics->OnSwapStall(parts_.clock->Now() - begin);
}

void Engine::NoteSwapStall(absl::Time now) {
  if (scheduler_.transferring()) swap_stalled_since_ = std::min(swap_stalled_since_, now);
}

void Engine::EndSwapStall(absl::Time now) {
  if (parts_.swap == nullptr) return;
  if (swap_stalled_since_ < now) parts_.metrics->OnSwapStall(now - swap_stalled_since_);
  swap_stalled_since_ = absl::InfiniteFuture();
  const absl::Duration waited = parts_.swap->waited();
  parts_.metrics->OnSwapStall(waited - std::exchange(swap_waited_, waited));
}

}  // namespace palimpsest
