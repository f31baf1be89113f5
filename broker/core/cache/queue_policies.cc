#include "broker/core/cache/queue_policies.h"

#include <algorithm>

namespace palimpsest::cache {

void QueuePolicy::OnRequest(const RequestInfo&, const Access& access) {
  for (const BlockHandle block : access.path) OnUse(block);
}

void QueuePolicy::OnEvictable(BlockHandle block) {
  State& state = states_[block.value()];
  state.evictable = true;
  queues_[state.queue].evictable.Push(block, state.moved);
}

void QueuePolicy::OnPinned(BlockHandle block) {
  State& state = states_[block.value()];
  state.evictable = false;
  queues_[state.queue].evictable.Remove(block);
}

uint8_t QueuePolicy::QueueOf(BlockHandle block) const {
  return block.value() < states_.size() ? states_[block.value()].queue : kNotCached;
}

std::optional<BlockHandle> QueuePolicy::Oldest(uint8_t queue) const {
  const auto& evictable = queues_[queue].evictable;
  return evictable.empty() ? std::nullopt : std::optional(evictable.Top());
}

std::optional<BlockHandle> QueuePolicy::OldestOf(uint8_t first, uint8_t second) const {
  const std::optional<BlockHandle> oldest = Oldest(first);
  return oldest.has_value() ? oldest : Oldest(second);
}

void QueuePolicy::Move(BlockHandle block, uint8_t queue) {
  if (block.value() >= states_.size()) states_.resize(block.value() + size_t{1});
  State& state = states_[block.value()];
  if (state.queue != kNotCached) {
    --queues_[state.queue].size;
    if (state.evictable) queues_[state.queue].evictable.Remove(block);
  }
  state.queue = queue;
  state.moved = ++clock_;
  if (queue == kNotCached) {
    state.evictable = false;
    return;
  }
  ++queues_[queue].size;
  if (state.evictable) queues_[queue].evictable.Push(block, state.moved);
}

// ARC.

void ArcPolicy::OnUse(BlockHandle block) {
  if (QueueOf(block) != kNotCached) return Move(block, kOften);
  const auto once = static_cast<double>(once_evicted_.size());
  const auto often = static_cast<double>(often_evicted_.size());
  if (once_evicted_.Contains(block)) {
    target_ = std::min(target_ + std::max(1.0, often / once), static_cast<double>(capacity_));
  } else if (often_evicted_.Contains(block)) {
    target_ = std::max(target_ - std::max(1.0, once / often), 0.0);
  }
}

void ArcPolicy::OnInsert(RequestId, BlockHandle block, BlockHandle) {
  const bool evicted = once_evicted_.Contains(block) || often_evicted_.Contains(block);
  once_evicted_.Remove(block);
  often_evicted_.Remove(block);
  Move(block, evicted ? kOften : kOnce);
  while (once_evicted_.size() > 0 && SizeOf(kOnce) + once_evicted_.size() > capacity_) {
    once_evicted_.Remove(once_evicted_.oldest());
  }
  while (often_evicted_.size() > 0 &&
         SizeOf(kOnce) + SizeOf(kOften) + once_evicted_.size() + often_evicted_.size() >
             2 * capacity_) {
    often_evicted_.Remove(often_evicted_.oldest());
  }
}

std::optional<BlockHandle> ArcPolicy::ChooseVictim(absl::Time, BlockHandle block, bool) {
  const auto once = static_cast<double>(SizeOf(kOnce));
  const bool from_once = once > target_ || (once == target_ && often_evicted_.Contains(block));
  return from_once ? OldestOf(kOnce, kOften) : OldestOf(kOften, kOnce);
}

void ArcPolicy::OnEvict(BlockHandle block) {
  (QueueOf(block) == kOnce ? once_evicted_ : often_evicted_).Push(block);
  Move(block, kNotCached);
}

void ArcPolicy::OnForget(BlockHandle block) {
  once_evicted_.Remove(block);
  often_evicted_.Remove(block);
}

// S3-FIFO.

S3FifoPolicy::S3FifoPolicy(size_t capacity)
    : small_limit_(std::max<size_t>(1, capacity / 10)), evicted_limit_(capacity - capacity / 10) {}

void S3FifoPolicy::OnUse(BlockHandle block) {
  if (QueueOf(block) == kNotCached) return;
  uint8_t& uses = uses_[block.value()];
  uses = std::min<uint8_t>(uses + 1, kMostUses);
}

void S3FifoPolicy::OnInsert(RequestId, BlockHandle block, BlockHandle) {
  if (block.value() >= uses_.size()) uses_.resize(block.value() + size_t{1});
  uses_[block.value()] = 0;
  Move(block, evicted_.Contains(block) ? kMain : kSmall);
  evicted_.Remove(block);
}

std::optional<BlockHandle> S3FifoPolicy::FromSmall() {
  while (const std::optional<BlockHandle> oldest = Oldest(kSmall)) {
    if (uses_[oldest->value()] <= 1) return oldest;
    uses_[oldest->value()] = 0;
    Move(*oldest, kMain);
  }
  return std::nullopt;
}

std::optional<BlockHandle> S3FifoPolicy::FromMain() {
  while (const std::optional<BlockHandle> oldest = Oldest(kMain)) {
    if (uses_[oldest->value()] == 0) return oldest;
    --uses_[oldest->value()];
    Move(*oldest, kMain);
  }
  return std::nullopt;
}

std::optional<BlockHandle> S3FifoPolicy::ChooseVictim(absl::Time, BlockHandle, bool) {
  std::optional<BlockHandle> victim;
  if (SizeOf(kSmall) >= small_limit_) victim = FromSmall();
  if (!victim.has_value()) victim = FromMain();
  return victim.has_value() ? victim : Oldest(kSmall);
}

void S3FifoPolicy::OnEvict(BlockHandle block) {
  const bool small = QueueOf(block) == kSmall;
  Move(block, kNotCached);
  if (!small) return;
  evicted_.Push(block);
  if (evicted_.size() > evicted_limit_) evicted_.Remove(evicted_.oldest());
}

// W-TinyLFU.

TinyLfuPolicy::TinyLfuPolicy(size_t capacity)
    : window_limit_(std::max<size_t>(1, capacity / 100)),
      protected_limit_((capacity - std::min(capacity, window_limit_)) * 8 / 10),
      sample_(10 * capacity) {}

uint32_t TinyLfuPolicy::Uses(BlockHandle block) const {
  if (block.value() >= counts_.size()) return 0;
  const Count& count = counts_[block.value()];
  const uint32_t halvings = halvings_ - count.halvings;
  return halvings < 32 ? count.uses >> halvings : 0;
}

void TinyLfuPolicy::OnUse(BlockHandle block) {
  if (block.value() >= counts_.size()) counts_.resize(block.value() + size_t{1});
  counts_[block.value()] = {std::min(Uses(block) + 1, kMostUses), halvings_};
  if (++used_ >= sample_) {
    ++halvings_;
    used_ = 0;
  }
  const uint8_t queue = QueueOf(block);
  if (queue == kNotCached) return;
  Move(block, queue == kWindow ? kWindow : kProtected);
  if (SizeOf(kProtected) > protected_limit_) {
    if (const auto oldest = Oldest(kProtected)) Move(*oldest, kProbation);
  }
}

void TinyLfuPolicy::OnInsert(RequestId, BlockHandle block, BlockHandle) {
  Move(block, kWindow);
  while (SizeOf(kWindow) > window_limit_) {
    const std::optional<BlockHandle> oldest = Oldest(kWindow);
    if (!oldest.has_value()) break;
    Move(*oldest, kProbation);
  }
}

std::optional<BlockHandle> TinyLfuPolicy::ChooseVictim(absl::Time, BlockHandle, bool) {
  const std::optional<BlockHandle> main = OldestOf(kProbation, kProtected);
  if (SizeOf(kWindow) < window_limit_ && main.has_value()) return main;
  const std::optional<BlockHandle> candidate = Oldest(kWindow);
  if (!candidate.has_value() || !main.has_value()) return main.has_value() ? main : candidate;
  return Uses(*candidate) > Uses(*main) ? main : candidate;
}

void TinyLfuPolicy::OnForget(BlockHandle block) {
  if (block.value() < counts_.size()) counts_[block.value()] = {};
}

}  // namespace palimpsest::cache
