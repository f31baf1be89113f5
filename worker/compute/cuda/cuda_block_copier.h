// Copies KV blocks that lie in the memory of one GPU or several.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_BLOCK_COPIER_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_BLOCK_COPIER_H_

#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "common/cuda/context.h"
#include "worker/core/block_copier.h"
#include "worker/core/model_runner.h"

namespace palimpsest {

class CudaBlockCopier final : public BlockCopier {
 public:
  // A GPU and what the worker has on it.
  struct Rank {
    CudaContextPtr context;
    ModelMemory memory;
  };

  static absl::StatusOr<std::unique_ptr<CudaBlockCopier>> Create(std::vector<Rank> ranks);

  // All moves are under way at once, on all GPUs; blocks until the last has ended. A GPU that fails
  // is fatal: the process ends, as nobody knows what the blocks hold.
  void Copy(absl::Span<const BlockMove> moves) override;

 private:
  CudaBlockCopier(std::vector<Rank> ranks, std::vector<CudaStream> streams)
      : ranks_(std::move(ranks)), streams_(std::move(streams)) {}

  absl::Status Try(absl::Span<const BlockMove> moves) const;
  static absl::Status Queue(const Rank& rank, absl::Span<const BlockMove> moves, CUstream stream);

  const std::vector<Rank> ranks_;
  const std::vector<CudaStream> streams_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_BLOCK_COPIER_H_
