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
      Log(LogLevel::kError,
          transfer.store && !in ? "KV could not be copied to the block store"
                                : "KV could not be copied; its sequence is computed again",
          {{"direction", in ? "from host memory" : "to host memory"}, {"status", transfer.status}});
    } else if (in && transfer.took > absl::ZeroDuration()) {
      const double seconds = absl::ToDoubleSeconds(transfer.took);
      Smooth(transfer.blocks / seconds, swap_blocks_per_second_);
      if (transfer.store) Smooth(seconds / transfer.blocks, load_block_seconds_);
    }
    parts_.metrics->OnTransfer(transfer);
    scheduler_.OnTransferEnded(transfer);
  }
  if (parts_.swap == nullptr) return;
  const double measured = std::min(step_durations_.decode_seconds() * swap_blocks_per_second_, 1e9);
  scheduler_.SetSwapOverlap(options_.swap_overlap_blocks.value_or(static_cast<int32_t>(measured)));
  StartTransfers();
}

bool Engine::PollStore() {
  if (parts_.store == nullptr) return false;
  StateLoadCosts();
  const bool any = scheduler_.PollStore(parts_.clock->Now());
  StartTransfers();
  return any;
}

void Engine::StateLoadCosts() {
  // A link that was slow once is believed to be so for a while, not for ever.
  constexpr double kForget = 0.98;
  const int64_t recomputed = scheduler_.counters().blocks_recomputed;
  if (std::exchange(blocks_recomputed_, recomputed) < recomputed) load_block_seconds_ *= kForget;
  const StepDurations::PrefillFit fit = step_durations_.prefill_fit();
  const int32_t window = options_.scheduler.sliding_window;
  const LoadCosts costs{.token_seconds = fit.token_seconds,
                        .position_seconds = fit.position_seconds,
                        .block_seconds = load_block_seconds_,
                        .answer_seconds = parts_.store->answer_seconds(),
                        .window_tokens = window};
  const int32_t tokens = options_.scheduler.geometry.block_tokens;
  // Behind a window every block costs the same.
  parts_.store->SetRecompute(ComputeSeconds(costs, window, tokens),
                             window > 0 ? 0 : fit.position_seconds * tokens * tokens);
  scheduler_.SetLoadCosts(costs);
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
  if (scheduler_.awaits_transfer()) swap_stalled_since_ = std::min(swap_stalled_since_, now);
}

void Engine::EndSwapStall(absl::Time now) {
  if (parts_.swap == nullptr) return;
  if (swap_stalled_since_ < now) parts_.metrics->OnSwapStall(now - swap_stalled_since_);
  swap_stalled_since_ = absl::InfiniteFuture();
  const absl::Duration waited = parts_.swap->waited();
  parts_.metrics->OnSwapStall(waited - std::exchange(swap_waited_, waited));
}

}  // namespace palimpsest
