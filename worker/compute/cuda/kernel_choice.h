// Which kernels run a model's steps, and for which sizes they are prepared. Needs no GPU.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_KERNEL_CHOICE_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_KERNEL_CHOICE_H_

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "common/bytes.h"
#include "worker/compute/cuda/cuda_runner_options.h"
#include "worker/compute/cuda/forward_context.h"
#include "worker/compute/cuda/step_packer.h"
#include "worker/model/model_config.h"

namespace palimpsest::cuda {

// Batch sizes that graphs are made for: close enough for padding to waste little; then every 32.
std::vector<int32_t> DecodeLadder(int32_t max_sequences);

// Whether fused_decode.h has a kernel for the model.
bool CanFuseDecode(const ModelConfig& config, const CudaRunnerOptions& options);

// All but what depends on the GPU: multiprocessors, null_block, fused_decode.
PackerOptions MakePackerOptions(const ModelConfig& config, Bytes kv_block_bytes,
                                const CudaRunnerOptions& options);

ForwardOptions MakeForwardOptions(const ModelConfig& config, const PackerOptions& packer,
                                  const CudaRunnerOptions& options, bool hopper);

// InvalidArgument if heads of this model can't be sampled.
absl::Status CheckHeadSampling(const ModelConfig& config, const HeadSampling& sampling);

// Tiles of the largest decode step; 0 with latent attention.
int32_t MaxTiles(const PackerOptions& packer);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_KERNEL_CHOICE_H_
