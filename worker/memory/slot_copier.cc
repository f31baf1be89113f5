#include "worker/memory/slot_copier.h"

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/monotonic_time.h"

namespace palimpsest {

SlotCopier::SlotCopier(Options options)
    : options_(std::move(options)), thread_([this] { Loop(); }) {}

SlotCopier::~SlotCopier() {
  {
    MutexLock lock(&mu_);
    ending_ = true;
    stopped_ = true;
    changed_.SignalAll();
  }
  thread_.join();
}

void SlotCopier::Start(const Rotation& rotation) {
  MutexLock lock(&mu_);
  rotation_ = rotation;
  sequence_ = SlotSequence(static_cast<int32_t>(rotation.stages.size()), rotation.slots);
  stopped_ = ending_;
  changed_.SignalAll();
}

void SlotCopier::Stop() {
  MutexLock lock(&mu_);
  stopped_ = true;
  changed_.SignalAll();
  while (copying_) changed_.Wait(&mu_);
  rotation_ = {};
  sequence_ = SlotSequence(0, 0);
}

int32_t SlotCopier::LayerOf(int stage) const {
  const auto found = std::lower_bound(rotation_.stages.begin(), rotation_.stages.end(), stage);
  if (found == rotation_.stages.end() || *found != stage) return -1;
  return static_cast<int32_t>(found - rotation_.stages.begin());
}

absl::Status SlotCopier::Await(int stage) {
  const absl::Time deadline = MonotonicNow() + options_.patience;
  MutexLock lock(&mu_);
  const int32_t layer = LayerOf(stage);
  if (layer == 0 && sequence_.next_use() != 0) {
    sequence_.Restart();
    changed_.SignalAll();
  }
  if (layer < 0 || layer != sequence_.next_use()) {
    return absl::OutOfRangeError(
        absl::StrCat("stage ", stage, " does not rotate, or it is another one's turn"));
  }
  const auto ready = [&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    return !failure_.ok() || sequence_.Ready(layer);
  };
  while (!ready()) {
    if (changed_.WaitWithDeadline(&mu_, deadline) && !ready()) {
      return absl::DeadlineExceededError(absl::StrCat("stage ", stage, " was not copied within ",
                                                      absl::FormatDuration(options_.patience)));
    }
  }
  if (!failure_.ok()) return failure_;
  sequence_.BeginUse(layer);
  return absl::OkStatus();
}

void SlotCopier::Release(int stage) {
  MutexLock lock(&mu_);
  const int32_t layer = LayerOf(stage);
  if (layer < 0) return;
  sequence_.EndUse(layer);
  changed_.SignalAll();
}

void SlotCopier::Restart() {
  MutexLock lock(&mu_);
  sequence_.Restart();
  changed_.SignalAll();
}

void SlotCopier::Fail(absl::Status status) {
  MutexLock lock(&mu_);
  if (failure_.ok()) failure_ = std::move(status);
  changed_.SignalAll();
}

void SlotCopier::Loop() {
  MutexLock lock(&mu_);
  while (!ending_) {
    const std::optional<int32_t> next =
        stopped_ || !failure_.ok() ? std::nullopt : sequence_.NextCopy();
    if (!next.has_value()) {
      changed_.Wait(&mu_);
      continue;
    }
    copying_ = true;
    Copy(*next);
    copying_ = false;
    changed_.SignalAll();
  }
}

void SlotCopier::Copy(int32_t layer) {
  const auto stage = static_cast<size_t>(rotation_.stages[static_cast<size_t>(layer)]);
  const ParameterSlabs::StageSpan span = options_.stages[stage];
  const absl::Time start = MonotonicNow();
  sequence_.BeginCopy(layer);
  for (uint32_t i = 0; i < span.count; ++i) {
    if (stopped_ || !failure_.ok()) return sequence_.AbandonCopy(layer);
    mu_.Unlock();
    const absl::Status status =
        options_.restorer->CopySlab(options_.base, RegionIndex(span.first + i));
    if (!status.ok() && options_.on_failure) options_.on_failure(status);
    mu_.Lock();
    if (!status.ok()) {
      if (failure_.ok()) failure_ = status;
      return sequence_.AbandonCopy(layer);
    }
  }
  sequence_.EndCopy(layer);
  changed_.SignalAll();
  if (!options_.on_copied) return;
  mu_.Unlock();
  options_.on_copied(options_.slab_bytes * span.count, MonotonicNow() - start);
  mu_.Lock();
}

}  // namespace palimpsest
