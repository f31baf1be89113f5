// A model on several GPUs: CudaRunners as the ranks of a TensorParallelRunner, with the collectives
// between their GPUs.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_RANK_RUNNERS_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_RANK_RUNNERS_H_

#include <memory>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/compute/cuda/cuda_runner.h"
#include "worker/compute/cuda/gpu_collectives.h"
#include "worker/core/model_runner.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest::cuda {

struct RankedRunner {
  std::unique_ptr<ModelRunner> runner;
  CudaRunner* first = nullptr;  // rank 0's, a part of `runner`
};

// `rank_config` is RankConfig's, `memory` of each rank. Of the options device and collective are
// set for each rank; ranks above 0 keep their algorithms in files of their own beside
// gemm_cache_file. Errors are CudaRunner::Create's, and NotFound without NCCL.
absl::StatusOr<RankedRunner> MakeRankedRunner(const ModelConfig& rank_config,
                                              const ImageLayout& layout,
                                              absl::Span<const ModelMemory> memory,
                                              ParameterGate* gate, const CudaRunnerOptions& options,
                                              const GpuCollectivesOptions& collectives);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_RANK_RUNNERS_H_
