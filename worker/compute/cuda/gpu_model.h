// A model with its own GPU memory, without a broker: for checks and benchmarks on the GPU machine.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_GPU_MODEL_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_GPU_MODEL_H_

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/ids.h"
#include "worker/compute/cuda/cuda_runner.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest::cuda {

class GpuModel {
 public:
  // Room for `kv_tokens` tokens of KV cache and for a runner with these options.
  static absl::StatusOr<std::unique_ptr<GpuModel>> Create(const ModelConfig& config,
                                                          int64_t kv_tokens,
                                                          const CudaRunnerOptions& options);
  ~GpuModel();

  // Random weights that depend on the seed alone; norm weights about 1.
  absl::Status FillRandom(uint64_t seed);
  // The weights of a Hugging Face folder.
  absl::Status LoadFolder(const std::string& folder);
  // Random keys and values, so that a sequence may be continued without its prompt.
  absl::Status FillKv(uint64_t seed);
  absl::Status FillNullBlock(int byte);

  absl::StatusOr<std::unique_ptr<CudaRunner>> NewRunner() const;

  const ModelConfig& config() const { return config_; }
  // Blocks 1 .. blocks() are free to use.
  int32_t blocks() const { return blocks_; }
  Bytes parameter_bytes() const { return layout_.total; }

 private:
  GpuModel(const ModelConfig& config, const ImageLayout& layout, const CudaRunnerOptions& options)
      : config_(config), layout_(layout), options_(options) {}

  const ModelConfig config_;
  const ImageLayout layout_;
  const CudaRunnerOptions options_;
  ModelMemory memory_;
  void* parameters_ = nullptr;
  int32_t blocks_ = 0;
};

// The next blocks for a sequence of `tokens` tokens, counted up from *next.
std::vector<BlockId> TakeBlocks(int32_t tokens, int32_t block_tokens, uint32_t* next);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_GPU_MODEL_H_
