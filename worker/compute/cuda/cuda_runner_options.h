// Choices of the GPU back-end.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_RUNNER_OPTIONS_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_RUNNER_OPTIONS_H_

#include <cstdint>
#include <string>

#include "worker/compute/cuda/collective.h"
#include "worker/core/head_sampler.h"

namespace palimpsest::cuda {

struct CudaRunnerOptions {
  int device = 0;
  int32_t block_tokens = 16;
  // The largest step: tokens of all its chunks, and chunks.
  int32_t max_step_tokens = 8192;
  int32_t max_sequences = 256;
  bool graphs = true;
  // See SetLaunchOverlap in kernels.h.
  bool overlap_launches = true;
  // Where chosen GEMM algorithms are kept; empty: they are measured at every start.
  std::string gemm_cache_file;
  // Tokens that the decodes of a step attend to, in all, from which their attention runs on tensor
  // cores: below, latency counts, and the other kernel has less of it.
  int32_t tensor_core_tokens = 16384;
  // One step in so many is timed on the GPU, for StepResult::times; 0: none.
  int32_t timing_interval = 32;
  // Whether decodes run in the kernel of fused_decode.h where it can.
  bool fused_decode = true;
  // Steps of up to this many rows use fused products, which Hopper has; up to 32.
  int32_t max_fused_rows = 32;
  // Steps with prompt chunks alone are counted and sampled, so that graphs stay as they are. Not
  // with latent attention or sliding windows; of a rank, its own heads.
  HeadSampling head_sampling;
  // Of a rank of a tensor-parallel model, whose config is then RankConfig's; outlives the runner.
  Collective* collective = nullptr;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_RUNNER_OPTIONS_H_
