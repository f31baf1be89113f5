#include "worker/memory/threaded_swap_copier.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/monotonic_time.h"
#include "worker/core/check.h"

namespace palimpsest {
namespace {

// No copy within one machine takes that long.
constexpr absl::Duration kPatience = absl::Minutes(1);

}  // namespace

ThreadedSwapCopier::~ThreadedSwapCopier() { PALIMPSEST_CHECK(!out_thread_.joinable()); }

void ThreadedSwapCopier::StartThreads() {
  out_thread_ = std::thread([this] { Run(SwapTransfer::Direction::kOut); });
  in_thread_ = std::thread([this] { Run(SwapTransfer::Direction::kIn); });
}

void ThreadedSwapCopier::StopThreads() {
  {
    MutexLock lock(&mutex_);
    stopping_ = true;
    changed_.SignalAll();
  }
  if (out_thread_.joinable()) out_thread_.join();
  if (in_thread_.joinable()) in_thread_.join();
}

void ThreadedSwapCopier::Start(SwapTransfer transfer) {
  MutexLock lock(&mutex_);
  Of(transfer.direction).queue.push_back(std::move(transfer));
  changed_.SignalAll();
}

std::vector<SwapEnded> ThreadedSwapCopier::TakeEnded() {
  MutexLock lock(&mutex_);
  failure_ = absl::OkStatus();
  return std::exchange(ended_, {});
}

void ThreadedSwapCopier::AwaitAll() {
  MutexLock lock(&mutex_);
  while (!out_.queue.empty() || !in_.queue.empty() || out_.busy || in_.busy) changed_.Wait(&mutex_);
}

void ThreadedSwapCopier::SetWakeup(std::function<void()> wakeup) {
  MutexLock lock(&mutex_);
  wakeup_ = std::move(wakeup);
}

absl::Duration ThreadedSwapCopier::waited() const {
  MutexLock lock(&mutex_);
  return waited_;
}

bool ThreadedSwapCopier::Awaited() const {
  MutexLock lock(&mutex_);
  return std::any_of(in_.queue.begin(), in_.queue.end(),
                     [](const SwapTransfer& transfer) { return transfer.awaited; });
}

bool ThreadedSwapCopier::Missing(int layer) const {
  for (size_t i = 0; i < in_.queue.size(); ++i) {
    if (in_.queue[i].awaited && (i > 0 || passed_ <= layer)) return true;
  }
  return false;
}

absl::Status ThreadedSwapCopier::AwaitLayer(int layer) {
  MutexLock lock(&mutex_);
  if (!Missing(layer)) return failure_;
  const absl::Time begin = MonotonicNow();
  while (Missing(layer)) {
    if (changed_.WaitWithDeadline(&mutex_, begin + kPatience) && Missing(layer)) {
      return absl::DeadlineExceededError(
          absl::StrCat("KV did not come back from host memory within ",
                       absl::FormatDuration(kPatience), ": its copies hang"));
    }
  }
  waited_ += MonotonicNow() - begin;
  return failure_;
}

void ThreadedSwapCopier::AwaitTurn(Bytes bytes) {
  if (pacer_ != nullptr) pacer_->AwaitTurn(LinkPacer::Kind::kBlocks, bytes);
}

void ThreadedSwapCopier::Pass(int layers) {
  MutexLock lock(&mutex_);
  passed_ = layers;
  changed_.SignalAll();
}

void ThreadedSwapCopier::Run(SwapTransfer::Direction which) {
  const bool out = which == SwapTransfer::Direction::kOut;
  while (true) {
    const SwapTransfer* transfer = nullptr;
    {
      MutexLock lock(&mutex_);
      Direction& direction = Of(which);
      while (direction.queue.empty() && !stopping_) changed_.Wait(&mutex_);
      if (direction.queue.empty()) return;
      transfer = &direction.queue.front();  // stays while others are added
      direction.busy = true;
    }
    const absl::Time begin = MonotonicNow();
    SwapEnded ended{.id = transfer->id,
                    .direction = which,
                    .awaited = transfer->awaited,
                    .store = transfer->store,
                    .blocks = static_cast<int32_t>(transfer->moves.size())};
    ended.status = out ? CopyOut(*transfer, ended.checksums) : CopyIn(*transfer, ended.intact);
    ended.took = MonotonicNow() - begin;
    std::function<void()> wakeup;
    {
      MutexLock lock(&mutex_);
      if (transfer->awaited) failure_.Update(ended.status);
      ended_.push_back(std::move(ended));
      Of(which).queue.pop_front();
      if (!out) passed_ = 0;
      wakeup = wakeup_;
      changed_.SignalAll();
    }
    if (wakeup) wakeup();
    MutexLock lock(&mutex_);
    Of(which).busy = false;
    changed_.SignalAll();
  }
}

}  // namespace palimpsest
