// Swaps KV blocks between GPUs and pinned host memory, on streams of its own.
//
// KV that returns comes in stripes of a few layers: of many blocks, where they are neighbours on
// both sides, by one strided copy, and otherwise of more layers at a time. An event ends each
// layer, for steps that follow behind. Takes no memory of a block store.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_SWAP_COPIER_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_SWAP_COPIER_H_

#include <array>
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
#include "worker/memory/threaded_swap_copier.h"

namespace palimpsest {

class CudaSwapCopier final : public ThreadedSwapCopier {
 public:
  // A GPU and what the worker has on it.
  struct Rank {
    CudaContextPtr context;
    ModelMemory memory;
  };

  // Blocks consist of `layers` equal parts. Takes the arena's memory: `slots` blocks for each GPU.
  // KV that returns awaits its turns at `pacer`, if there is one.
  static absl::StatusOr<std::unique_ptr<CudaSwapCopier>> Create(std::vector<Rank> ranks,
                                                                int32_t slots, int layers,
                                                                LinkPacer* pacer = nullptr);
  ~CudaSwapCopier() override;

  // A parameter event is waited for here.
  absl::Status LayerEvents(int layer, absl::Span<void*> events) override;

 private:
  // Blocks that are neighbours, and so are their slots.
  struct Run {
    BlockId block;
    SwapSlot slot;
    size_t blocks = 0;
  };

  struct FreePinned {
    CudaContextPtr context;
    void operator()(std::byte* memory) const;
  };

  struct Gpu {
    Rank rank;
    std::unique_ptr<std::byte, FreePinned> arena;
    CudaStream out;
    // Copies alternate between them: one begins while the other's last bytes are on their way.
    std::array<CudaStream, 2> in;
    CudaEvent beside;  // of in[1]'s part of a stripe
    CudaEvent left;
    std::vector<CudaEvent> layers;  // of the transfer that returns
  };

  CudaSwapCopier(int layers, LinkPacer* pacer) : ThreadedSwapCopier(pacer), layers_(layers) {}

  absl::Status Open(Rank rank, int32_t slots);
  absl::Status CopyOut(const SwapTransfer& transfer, std::vector<uint64_t>& checksums) override;
  absl::Status CopyIn(const SwapTransfer& transfer, int32_t& intact) override;
  absl::Status QueueOut(const Gpu& gpu, absl::Span<const Run> runs) const;
  // Layers first .. last - 1.
  absl::Status QueueStripe(const Gpu& gpu, int first, int last, absl::Span<const Run> runs) const;
  // Of a transfer of so many blocks.
  int StripeLayers(size_t blocks, size_t runs) const;
  static std::vector<Run> RunsOf(const SwapTransfer& transfer);

  const int layers_;
  std::vector<Gpu> gpus_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_SWAP_COPIER_H_
