// Copies KV blocks that lie in a GPU's memory.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_BLOCK_COPIER_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_BLOCK_COPIER_H_

#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/cuda/context.h"
#include "worker/core/block_copier.h"
#include "worker/core/model_runner.h"

namespace palimpsest {

class CudaBlockCopier final : public BlockCopier {
 public:
  static absl::StatusOr<std::unique_ptr<CudaBlockCopier>> Create(CudaContextPtr context,
                                                                 const ModelMemory& memory);

  // All moves are under way at once; blocks until the last has ended. A GPU that fails is fatal:
  // the process ends, as nobody knows what the blocks hold.
  void Copy(absl::Span<const BlockMove> moves) override;

 private:
  CudaBlockCopier(CudaContextPtr context, CudaStream stream, const ModelMemory& memory)
      : context_(std::move(context)), stream_(std::move(stream)), memory_(memory) {}

  absl::Status Try(absl::Span<const BlockMove> moves) const;
  CUdeviceptr At(BlockId block) const {
    return reinterpret_cast<CUdeviceptr>(memory_.kv +
                                         (memory_.kv_block_bytes * block.value()).count());
  }

  const CudaContextPtr context_;
  const CudaStream stream_;
  const ModelMemory memory_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_BLOCK_COPIER_H_
