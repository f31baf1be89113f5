// Swaps KV blocks between GPUs and host memory, on streams of its own: an arena of pinned memory,
// or a block store's, where the parts of a block lie as common/stored_block.h says.
//
// KV that steps follow behind comes in stripes of a few layers: of many blocks, where they are
// neighbours on both sides, by one strided copy, and otherwise of more layers at a time. An event
// ends each layer. KV that nobody follows comes in whole blocks, a group after the other.
//
// The GPUs hash what goes to a block store and what came from one, beside the copies; the last
// layer of what came is let through when its checksums are right.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_SWAP_COPIER_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_SWAP_COPIER_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/bytes.h"
#include "common/cuda/context.h"
#include "worker/core/model_runner.h"
#include "worker/memory/cuda/block_hasher.h"
#include "worker/memory/threaded_swap_copier.h"

namespace palimpsest {

class CudaSwapCopier final : public ThreadedSwapCopier {
 public:
  // A GPU and what the worker has on it.
  struct Rank {
    CudaContextPtr context;
    ModelMemory memory;
  };

  struct Options {
    // Blocks of the arena, of each GPU's.
    int32_t slots = 0;
    // Equal parts that a block consists of.
    int layers = 1;
    // Whether transfers of a block store will come.
    bool block_store = false;
    // KV that returns awaits its turns there, if it is not null.
    LinkPacer* pacer = nullptr;
  };

  // Takes the arena's memory.
  static absl::StatusOr<std::unique_ptr<CudaSwapCopier>> Create(std::vector<Rank> ranks,
                                                                const Options& options);
  ~CudaSwapCopier() override;

  // A parameter event is waited for here.
  absl::Status LayerEvents(int layer, absl::Span<void*> events) override;

 private:
  using Moves = absl::Span<const SwapMove>;

  // Blocks that are neighbours, and so are their places in host memory.
  struct Run {
    BlockId block;
    std::byte* host = nullptr;
    size_t blocks = 0;
  };

  struct FreePinned {
    CudaContextPtr context;
    void operator()(std::byte* memory) const;
  };

  // Hashes blocks, on a stream of its own.
  struct Checker {
    CudaStream stream;
    CudaEvent copied;  // what it waits for
    CudaEvent hashed;
    std::unique_ptr<BlockHasher> hasher;  // null without a block store
  };

  struct Gpu {
    Rank rank;
    size_t index = 0;
    std::unique_ptr<std::byte, FreePinned> arena;
    CudaStream out;
    Checker out_check;
    CudaEvent left;
    // Copies alternate between them: one begins while the other's last bytes are on their way.
    std::array<CudaStream, 2> in;
    Checker in_check;
    CudaEvent beside;  // of in[1]'s part of a stripe or group
    CudaEvent arrived;
    std::vector<CudaEvent> layers;  // of the transfer that returns
  };

  explicit CudaSwapCopier(const Options& options)
      : ThreadedSwapCopier(options.pacer), layers_(options.layers) {}

  absl::Status Open(Rank rank, const Options& options);
  absl::Status CopyOut(const SwapTransfer& transfer, std::vector<uint64_t>& checksums) override;
  absl::Status CopyIn(const SwapTransfer& transfer, int32_t& intact) override;

  absl::Status QueueOut(const Gpu& gpu, const SwapTransfer& transfer) const;
  absl::Status CopyInStripes(const SwapTransfer& transfer);
  // Layers first .. last - 1.
  absl::Status QueueStripe(const Gpu& gpu, int first, int last, const SwapTransfer& transfer,
                           absl::Span<const Run> runs) const;
  absl::Status CopyInGroups(const SwapTransfer& transfer);
  // Moves first .. first + count - 1.
  absl::Status QueueGroup(const Gpu& gpu, const SwapTransfer& transfer, size_t first,
                          size_t count) const;
  // in[0] waits for what in[1] has.
  absl::Status JoinIn(const Gpu& gpu) const;
  // Hashes those moves' blocks when what is in the stream so far is done.
  absl::Status QueueHashes(const Checker& checker, Moves moves, size_t first, CUstream after) const;
  absl::Status AwaitIn(absl::Status status) const;
  absl::Status Verify(const SwapTransfer& transfer, int32_t& intact) const;

  // Of a transfer of so many blocks.
  int StripeLayers(size_t blocks, size_t runs) const;
  std::byte* HostOf(const Gpu& gpu, const SwapMove& move) const;
  // From a block's place in host memory to its neighbour's.
  Bytes HostStride(const SwapTransfer& transfer) const;
  std::vector<Run> RunsOf(const Gpu& gpu, const SwapTransfer& transfer, Moves moves) const;
  Bytes block_bytes() const { return gpus_.front().rank.memory.kv_block_bytes; }
  uint64_t ChecksumOf(const BlockKey& key, size_t index, Checker Gpu::*checker) const;

  const int layers_;
  std::vector<Gpu> gpus_;
  mutable std::atomic<bool> refused_ = false;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_SWAP_COPIER_H_
