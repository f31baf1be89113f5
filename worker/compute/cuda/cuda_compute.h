// What computes on a GPU as a worker's process sees it: without a header of CUDA, and there in
// every build. A build without a CUDA toolkit refuses it.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_COMPUTE_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_COMPUTE_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/core/block_copier.h"
#include "worker/core/head_sampler.h"
#include "worker/core/model_runner.h"
#include "worker/core/swap_copier.h"
#include "worker/memory/link_pacer.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest {

struct CudaComputeOptions {
  // One for each rank (worker/model/tensor_parallel.h).
  std::vector<int> gpus = {0};
  int32_t block_tokens = 16;
  // The largest step, as the scheduler makes them.
  int32_t max_step_tokens = 0;
  int32_t max_sequences = 0;
  // Matrix products' algorithms, measured once for all processes that name the same file. Made if
  // it is missing. One process at a time may read, extend and replace it: the caller sees to that.
  std::string gemm_cache_file;
  // Not with latent attention or sliding windows.
  HeadSampling head_sampling;
};

struct CudaCompute {
  std::unique_ptr<ModelRunner> runner;
  std::unique_ptr<BlockCopier> copier;
};

// `model` is the whole model, `layout` that of one rank's part of its image, `memory` what each
// rank has on its GPU; RankConfig(model, gpus.size()) is what a rank computes.
//
// Blocks for seconds while algorithms are measured and graphs captured. `gate` must outlive the
// runner, and the memory both. FailedPrecondition names what is missing (the toolkit when this
// program was built, the driver, the GPU) or, for a workspace that is too small, the settings that
// would repair it; InvalidArgument: a model that the kernels do not take.
absl::StatusOr<CudaCompute> MakeCudaCompute(const ModelConfig& model, const ImageLayout& layout,
                                            absl::Span<const ModelMemory> memory,
                                            ParameterGate* gate, const CudaComputeOptions& options);

struct CudaSwapOptions {
  // One for each rank.
  std::vector<int> gpus = {0};
  // Blocks of the arena of each GPU, in pinned host memory, which is taken at once: seconds for
  // many gigabytes.
  int32_t slots = 0;
  // Parts of a block.
  int layers = 1;
  // Whether transfers of a block store will come; blocks lie there as common/stored_block.h says.
  bool block_store = false;
  // KV that returns awaits its turns there, if it is not null.
  LinkPacer* pacer = nullptr;
};

// What swaps KV blocks between the GPUs and host memory. As MakeCudaCompute; ResourceExhausted: the
// host has no such memory.
absl::StatusOr<std::unique_ptr<SwapCopier>> MakeCudaSwapCopier(absl::Span<const ModelMemory> memory,
                                                               const CudaSwapOptions& options);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_COMPUTE_H_
