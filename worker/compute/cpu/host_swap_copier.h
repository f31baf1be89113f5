// Swaps KV blocks of the host back-end: its arena is ordinary memory of this process, a block
// store's memory is mapped.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_HOST_SWAP_COPIER_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_HOST_SWAP_COPIER_H_

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/block_checksum.h"
#include "worker/core/model_runner.h"
#include "worker/memory/threaded_swap_copier.h"

namespace palimpsest {

class HostSwapCopier final : public ThreadedSwapCopier {
 public:
  // Blocks consist of `layers` equal parts. The arena takes memory only as it is written.
  // Both directions are copies within host memory, as those of parameters are: both await turns.
  HostSwapCopier(const ModelMemory& memory, int32_t slots, int layers, LinkPacer* pacer = nullptr)
      : ThreadedSwapCopier(pacer),
        memory_(memory),
        layers_(layers),
        arena_(std::make_unique_for_overwrite<std::byte[]>(
            static_cast<size_t>((memory.kv_block_bytes * slots).count()))) {
    StartThreads();
  }
  ~HostSwapCopier() override { StopThreads(); }

 private:
  absl::Status CopyOut(const SwapTransfer& transfer, std::vector<uint64_t>& checksums) override {
    const auto size = static_cast<size_t>(memory_.kv_block_bytes.count());
    for (const SwapMove& move : transfer.moves) {
      AwaitTurn(memory_.kv_block_bytes);
      std::memcpy(HostOf(move), At(move.block), size);
      if (move.memory != nullptr) checksums.push_back(ChecksumOf(move));
    }
    return absl::OkStatus();
  }

  absl::Status CopyIn(const SwapTransfer& transfer, int32_t& intact) override {
    const auto size = static_cast<size_t>(memory_.kv_block_bytes.count());
    const size_t layer_size = size / static_cast<size_t>(layers_);
    for (int layer = 0; layer < layers_; ++layer) {
      const size_t begin = layer_size * static_cast<size_t>(layer);
      const size_t end = layer + 1 == layers_ ? size : begin + layer_size;
      AwaitTurn(Bytes(static_cast<int64_t>((end - begin) * transfer.moves.size())));
      for (const SwapMove& move : transfer.moves) {
        std::memcpy(At(move.block) + begin, HostOf(move) + begin, end - begin);
      }
      if (layer + 1 < layers_) Pass(layer + 1);
    }
    for (const SwapMove& move : transfer.moves) {
      if (move.memory != nullptr && ChecksumOf(move) != move.checksum) {
        return absl::DataLossError(
            absl::StrCat("block ", intact, " of ", transfer.moves.size(),
                         " came from the block store with another checksum than it went with"));
      }
      ++intact;
    }
    return absl::OkStatus();
  }

  uint64_t ChecksumOf(const SwapMove& move) const {
    return BlockChecksum(move.key,
                         {At(move.block), static_cast<size_t>(memory_.kv_block_bytes.count())});
  }
  std::byte* HostOf(const SwapMove& move) const {
    return move.memory != nullptr ? move.memory : At(move.slot);
  }

  std::byte* At(BlockId block) const {
    return memory_.kv + (memory_.kv_block_bytes * block.value()).count();
  }
  std::byte* At(SwapSlot slot) const {
    return arena_.get() + (memory_.kv_block_bytes * slot.value()).count();
  }

  const ModelMemory memory_;
  const int layers_;
  const std::unique_ptr<std::byte[]> arena_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_HOST_SWAP_COPIER_H_
