// A SwapCopier for tests that copies whenever it likes: a transfer's bytes move when it is started
// or as late as when it ends, and it ends when the test says so or a step waits for it. May fail.
// Not thread-safe.
#ifndef PALIMPSEST_WORKER_CORE_FAKE_SWAP_COPIER_H_
#define PALIMPSEST_WORKER_CORE_FAKE_SWAP_COPIER_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <functional>
#include <random>
#include <utility>
#include <vector>

#include "common/block_checksum.h"
#include "common/bytes.h"
#include "worker/core/swap_copier.h"

namespace palimpsest {

class FakeSwapCopier final : public SwapCopier {
 public:
  struct Options {
    std::byte* kv = nullptr;
    Bytes block_bytes;
    int32_t slots = 0;
    uint64_t seed = 0;
    int failing_percent = 0;
  };

  explicit FakeSwapCopier(const Options& options)
      : options_(options),
        arena_(static_cast<size_t>((options.block_bytes * options.slots).count())),
        random_(options.seed) {}

  void Start(SwapTransfer transfer) override {
    ++started_;
    pending_.push_back({std::move(transfer)});
    if (random_() % 2 == 0) Copy(pending_.back());
  }

  // Ends one; the oldest or any.
  void EndOne() {
    if (pending_.empty()) return;
    const size_t index = random_() % 2 == 0 ? 0 : random_() % pending_.size();
    End(pending_[index]);
    pending_.erase(pending_.begin() + static_cast<ptrdiff_t>(index));
  }

  void AwaitAll() override {
    while (!pending_.empty()) EndOne();
  }

  std::vector<SwapEnded> TakeEnded() override {
    failure_ = absl::OkStatus();
    return std::exchange(ended_, {});
  }

  absl::Status AwaitLayer(int) override {
    for (size_t i = 0; i < pending_.size();) {
      if (!pending_[i].transfer.awaited) {
        ++i;
        continue;
      }
      End(pending_[i]);
      pending_.erase(pending_.begin() + static_cast<ptrdiff_t>(i));
    }
    return failure_;
  }

  void SetWakeup(std::function<void()>) override {}
  absl::Duration waited() const override { return absl::ZeroDuration(); }

  size_t pending() const { return pending_.size(); }
  int64_t started() const { return started_; }
  int64_t failures() const { return failures_; }
  void FailFromNowOn() { options_.failing_percent = 100; }

 private:
  struct Pending {
    SwapTransfer transfer;
    bool copied = false;
    std::vector<uint64_t> checksums;
  };

  std::byte* BlockAt(const SwapMove& move) const {
    return options_.kv + (options_.block_bytes * move.block.value()).count();
  }
  std::byte* HostAt(const SwapMove& move) {
    return move.memory != nullptr
               ? move.memory
               : arena_.data() + (options_.block_bytes * move.slot.value()).count();
  }
  uint64_t ChecksumOf(const SwapMove& move) const {
    return BlockChecksum(move.key,
                         {BlockAt(move), static_cast<size_t>(options_.block_bytes.count())});
  }

  void Copy(Pending& pending) {
    pending.copied = true;
    const auto size = static_cast<size_t>(options_.block_bytes.count());
    for (const SwapMove& move : pending.transfer.moves) {
      const bool out = pending.transfer.direction == SwapTransfer::Direction::kOut;
      std::memcpy(out ? HostAt(move) : BlockAt(move), out ? BlockAt(move) : HostAt(move), size);
      if (out && move.memory != nullptr) pending.checksums.push_back(ChecksumOf(move));
    }
  }

  void End(Pending& pending) {
    if (!pending.copied) Copy(pending);
    SwapEnded ended;
    ended.id = pending.transfer.id;
    ended.direction = pending.transfer.direction;
    ended.awaited = pending.transfer.awaited;
    ended.store = pending.transfer.store;
    ended.blocks = static_cast<int32_t>(pending.transfer.moves.size());
    ended.checksums = std::move(pending.checksums);
    if (ended.direction == SwapTransfer::Direction::kIn) Verify(pending.transfer, ended);
    if (static_cast<int>(random_() % 100) < options_.failing_percent) {
      ++failures_;
      ended.status = absl::DataLossError("the test lets a transfer fail");
      ended.intact = 0;
      Garble(pending.transfer);
    }
    if (ended.awaited) failure_.Update(ended.status);
    ended_.push_back(std::move(ended));
  }

  void Verify(const SwapTransfer& transfer, SwapEnded& ended) const {
    for (const SwapMove& move : transfer.moves) {
      if (move.memory != nullptr && ChecksumOf(move) != move.checksum) {
        ended.status = absl::DataLossError("a block has another checksum");
        return;
      }
      ++ended.intact;
    }
  }

  void Garble(const SwapTransfer& transfer) {
    const auto size = static_cast<size_t>(options_.block_bytes.count());
    for (const SwapMove& move : transfer.moves) {
      const bool out = transfer.direction == SwapTransfer::Direction::kOut;
      std::memset(out ? HostAt(move) : BlockAt(move), static_cast<int>(random_()), size);
    }
  }

  Options options_;
  std::vector<std::byte> arena_;
  std::mt19937_64 random_;
  std::deque<Pending> pending_;
  std::vector<SwapEnded> ended_;
  absl::Status failure_;
  int64_t started_ = 0;
  int64_t failures_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_FAKE_SWAP_COPIER_H_
