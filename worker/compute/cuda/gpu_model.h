// A model with its own GPU memory, without a broker: for checks and benchmarks on the GPU machine.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_GPU_MODEL_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_GPU_MODEL_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "common/cuda/virtual_memory.h"
#include "common/ids.h"
#include "common/rotation.h"
#include "worker/compute/cuda/cuda_runner.h"
#include "worker/compute/cuda/gpu_collectives.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest::cuda {

// A runner of one GPU or of several, with what checks look at: that of rank 0.
class GpuRunner final : public ModelRunner {
 public:
  // `first` is a part of `runner`, or itself.
  GpuRunner(std::unique_ptr<ModelRunner> runner, CudaRunner* first)
      : runner_(std::move(runner)), first_(first) {}

  int pipeline_depth() const override { return runner_->pipeline_depth(); }
  absl::Status Submit(const StepPlan& plan) override { return runner_->Submit(plan); }
  absl::StatusOr<StepResult> Wait() override { return runner_->Wait(); }

  absl::StatusOr<std::vector<float>> Logits(size_t chunk) const { return first_->Logits(chunk); }
  absl::Status SetRotation(const Rotation& rotation) override {
    return runner_->SetRotation(rotation);
  }
  void SetTiming(bool on) { first_->SetTiming(on); }
  CudaRunnerStats stats() const { return first_->stats(); }
  const GemmLibrary& gemms() const { return first_->gemms(); }

 private:
  const std::unique_ptr<ModelRunner> runner_;
  CudaRunner* const first_;
};

// Where rotating layers are copied from: pinned memory of the host, the GPU's own, or that of
// another GPU, the one behind the last rank's.
enum class ImagePlace { kHost, kOwnGpu, kPeerGpu };
// As flags of programs name them.
inline const std::map<std::string, ImagePlace> kImagePlaces = {
    {"host", ImagePlace::kHost}, {"own", ImagePlace::kOwnGpu}, {"peer", ImagePlace::kPeerGpu}};

class GpuModel {
 public:
  // Room for `kv_tokens` tokens of KV cache and for a runner with these options. `ranks` above 1:
  // on GPUs options.device and up. Parameters lie in slabs.
  static absl::StatusOr<std::unique_ptr<GpuModel>> Create(const ModelConfig& config,
                                                          int64_t kv_tokens,
                                                          const CudaRunnerOptions& options,
                                                          int32_t ranks = 1,
                                                          Bytes slab_bytes = MiB(32));
  ~GpuModel();

  // Random weights that depend on the seed alone; norm weights about 1. Those of several ranks are
  // not the parts of one model's.
  absl::Status FillRandom(uint64_t seed);
  // The weights of `load_format: dummy`, as transformers has them in tests/reference.
  absl::Status LoadDummy(uint64_t seed);
  // Random keys and values, so that a sequence may be continued without its prompt.
  absl::Status FillKv(uint64_t seed);
  absl::Status FillNullBlock(int byte);

  // How the collectives of the next NewRunner go; the devices are the model's own.
  void SetCollectives(const GpuCollectivesOptions& options) { collectives_ = options; }
  // Keeps a copy of the parameters from which layers may rotate; once, before NewRunner.
  absl::Status MakeImage(ImagePlace place);
  // Has layers rotate, or none, as a worker does for its broker. No step may be in flight. Memory
  // that is taken from layers is filled with NaN; the slots are of it.
  absl::Status SetRotation(GpuRunner& runner, const Rotation& rotation);

  // `gate` may be null; otherwise it outlives the runner.
  absl::StatusOr<std::unique_ptr<GpuRunner>> NewRunner(ParameterGate* gate = nullptr) const;

  const ModelConfig& config() const { return config_; }
  const ModelMemory& memory(int rank) const { return memory_[static_cast<size_t>(rank)]; }
  int32_t ranks() const { return layout_.ranks; }
  // The GPU of each rank.
  std::vector<int> devices() const;
  // Blocks 1 .. blocks() are free to use.
  int32_t blocks() const { return blocks_; }
  // On each GPU.
  Bytes parameter_bytes() const { return layout_.total; }
  const ImageLayout& layout() const { return layout_; }

 private:
  GpuModel(const ModelConfig& config, const ModelConfig& rank_config, const ImageLayout& layout,
           const CudaRunnerOptions& options)
      : config_(config), rank_config_(rank_config), layout_(layout), options_(options) {}

  // A region of one GPU.
  struct Slabs {
    CudaAddressRange range;
    std::vector<CudaAllocation> memory;
  };
  // What a copy of the parameters lies in.
  struct Image {
    void* host = nullptr;
    Slabs slabs;
  };

  absl::Status Allocate(Bytes kv_block, Bytes kv, Bytes workspace);
  // Slabs on GPU `owner`, mapped for GPU `user`.
  absl::StatusOr<Slabs> MakeSlabs(int owner, int user, Bytes total) const;
  absl::Status CopyToImage(ImagePlace place, int rank);
  // Maps slabs at a stage's addresses: its own, or another's.
  absl::Status MapStage(int rank, int stage, int whose);
  absl::Status UnmapStage(int rank, int stage) const;
  // The addresses of a stage of one GPU.
  Bytes StageBegin(int stage) const;
  Bytes StageBytes(int stage) const;
  absl::Status Remap(int rank, const Rotation& rotation);
  absl::Status FillRank(uint64_t seed, int rank);
  // With the rank's GPU current.
  absl::Status EachRank(absl::FunctionRef<absl::Status(int rank)> call) const;

  const ModelConfig config_;
  const ModelConfig rank_config_;
  const ImageLayout layout_;
  const CudaRunnerOptions options_;
  GpuCollectivesOptions collectives_;
  const CudaDriver* driver_ = nullptr;
  std::vector<Slabs> parameters_;  // by rank
  std::vector<Slabs> steps_;       // by rank: KV cache and workspace
  std::vector<Image> images_;      // by rank
  Rotation rotation_;
  std::vector<ModelMemory> memory_;
  int32_t blocks_ = 0;
};

// The next blocks for a sequence of `tokens` tokens, counted up from *next.
std::vector<BlockId> TakeBlocks(int32_t tokens, int32_t block_tokens, uint32_t* next);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_GPU_MODEL_H_
