// The GPU back-end: runs step plans of one model on one NVIDIA GPU (sm_80 and newer).
//
// Decode steps are replayed as CUDA graphs, one for each of a ladder of batch sizes; their padding
// rows live in the null block. Steps with prompt chunks run kernel by kernel. Two steps may be in
// flight: the host prepares one while the GPU runs the other. A step costs one copy to the GPU
// (one more for a prefill's plan), one copy back and one event; nothing is allocated.
//
// Rotating layers are copied as rotating_layers.h says. Graphs of a new rotation are built by a
// thread while steps run kernel by kernel, as they would in the graph; the ranks of a
// tensor-parallel model build them between steps, when one is needed first, so that all replay the
// same. Graphs without rotation are kept.
//
// Determinism: the same plans in the same order, on the same kind of GPU with the same file of GEMM
// algorithms, give the same tokens and log-probabilities bit for bit, pipelined or not. A row's
// numbers may depend on the number of rows in its step, for which other algorithms may be used.
//
// Memory: everything but the CUDA context and the graphs lies in ModelMemory::workspace. Block ids
// beyond the KV region address the workspace, whose first whole block is the null block.
//
// An error of a kernel is final: Wait returns it and so does every later call. A rank of a
// tensor-parallel model aborts its collective then, since the others would wait for it.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_RUNNER_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_RUNNER_H_

#include <cuda_runtime_api.h>

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/bytes.h"
#include "worker/compute/cuda/attention.h"
#include "worker/compute/cuda/cuda_runner_options.h"
#include "worker/compute/cuda/decode_graphs.h"
#include "worker/compute/cuda/forward.h"
#include "worker/compute/cuda/gemm.h"
#include "worker/compute/cuda/rotating_layers.h"
#include "worker/compute/cuda/step_packer.h"
#include "worker/core/model_runner.h"
#include "worker/core/step_plan.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest::cuda {

// Counts since the start.
struct CudaRunnerStats {
  int64_t graph_steps = 0;
  int64_t eager_steps = 0;
  // Rows of decode steps that were padding.
  int64_t padding_rows = 0;
  // For steps without rotating layers, and for the present rotation.
  DecodeGraphs::Stats graphs;
  DecodeGraphs::Stats rotation_graphs;
};

class CudaRunner final : public ModelRunner {
 public:
  // What ModelMemory::workspace must hold, the null block included.
  static Bytes WorkspaceBytes(const ModelConfig& config, Bytes kv_block_bytes,
                              const CudaRunnerOptions& options);

  // InvalidArgument if the model's shape is one that the kernels do not take, or the memory is too
  // small or its weights are not row-major; NotFound without GPU or cuBLASLt. Does not read
  // parameters. `gate` may be null: everything is readable. All but the options must outlive it.
  static absl::StatusOr<std::unique_ptr<CudaRunner>> Create(const ModelConfig& config,
                                                            const ImageLayout& layout,
                                                            const ModelMemory& memory,
                                                            ParameterGate* gate,
                                                            const CudaRunnerOptions& options);
  // Waits for the steps in flight.
  ~CudaRunner() override;

  int pipeline_depth() const override { return kMaxPipelineDepth; }
  absl::Status Submit(const StepPlan& plan) override;
  absl::StatusOr<StepResult> Wait() override;
  // Waits for copies of the layers that rotated before, and for a graph that is being built.
  // FailedPrecondition while a step is in flight, which changes nothing, or without an image;
  // InvalidArgument for stages that cannot rotate.
  absl::Status SetRotation(const Rotation& rotation) override;

  // Logits that a chunk of the last step was sampled from, vocab_size floats; for checks. Only
  // while no step is in flight.
  absl::StatusOr<std::vector<float>> Logits(size_t chunk) const;

  // Times each step on the GPU from now on, which keeps steps from following each other closely; or
  // as options.timing_interval says.
  void SetTiming(bool every_step) { timing_interval_ = every_step ? 1 : options_.timing_interval; }

  CudaRunnerStats stats() const;
  const GemmLibrary& gemms() const { return forward_->gemms(); }
  BlockId null_block() const { return BlockId(static_cast<uint32_t>(packer_options_.null_block)); }

 private:
  // A step in flight, or the memory for one.
  struct Flight {
    std::byte* staging = nullptr;  // pinned, as are the others
    std::byte* prefill_ints = nullptr;
    std::byte* results = nullptr;
    std::byte* heads = nullptr;  // a sample, shares, then effects; null: none are taken
    cudaEvent_t begin = nullptr;
    cudaEvent_t sampling = nullptr;
    cudaEvent_t done = nullptr;
    PackedStep step;
    std::vector<int32_t> logprobs;  // alternatives wanted, by chunk
    Bytes rotated;
    bool graph = false;
    bool timed = false;
    bool sampling_timed = false;
    absl::Status status;
  };
  class StepHooks;
  class CaptureHooks;

  CudaRunner(const ModelConfig& config, ParameterGate* gate, const CudaRunnerOptions& options);

  absl::Status Prepare(const ImageLayout& layout, const ModelMemory& memory);
  absl::Status AllocateHost();
  std::vector<DecodeGraphs::Key> GraphKeys() const;
  absl::StatusOr<cudaGraph_t> Capture(const DecodeGraphs::Key& key, ForwardHooks& hooks,
                                      cudaStream_t stream) const;
  absl::Status MakeGraphs();
  absl::Status MakeRotationGraphs();

  // Rows of the graph that a step is replayed by, or run as; 0: none.
  int32_t GraphRows(const StepPlan& plan) const;
  absl::Status AwaitOnStream(int stage);
  // Has the other ranks end what they do, if `status` is an error.
  void TellRanks(const absl::Status& status) const;
  absl::Status Launch(Flight& flight, int32_t graph_rows);
  absl::Status CopyStep(const Flight& flight) const;
  absl::Status LaunchGraph(cudaGraphExec_t executable);
  absl::Status LaunchEager(Flight& flight);
  bool SamplesHeads() const { return options_.head_sampling.every > 0; }
  // Of a step with prompt chunks.
  void ChooseHeadSample(const StepPlan& plan, PackedStep& step);
  size_t heads() const {
    return static_cast<size_t>(config_.num_layers) * static_cast<size_t>(config_.num_kv_heads);
  }
  StepResult ReadResult(const Flight& flight) const;
  // Since the step before it.
  absl::Duration ReadStall(const Flight& flight);
  absl::StatusOr<StepTimes> ReadTimes(const Flight& flight) const;

  const ModelConfig config_;
  ParameterGate* const gate_;
  const CudaRunnerOptions options_;
  PackerOptions packer_options_;
  std::unique_ptr<StepPacker> packer_;
  std::unique_ptr<Forward> forward_;
  cudaStream_t stream_ = nullptr;
  std::vector<int32_t> ladder_;  // sizes of graphs
  std::unique_ptr<RotatingLayers> rotating_;
  std::unique_ptr<DecodeGraphs> graphs_;           // null: every step runs kernel by kernel
  std::unique_ptr<DecodeGraphs> rotation_graphs_;  // the same, while layers rotate
  HeadSampler head_sampler_;
  std::array<Flight, kMaxPipelineDepth> flights_;
  int64_t submitted_ = 0;
  int64_t finished_ = 0;
  // Whether the step being submitted found the gate closed, as it did on all ranks.
  bool refused_ = false;
  int32_t timing_interval_ = 0;
  absl::Status rotation_status_;  // of the last SetRotation
  uint64_t waited_ = 0;           // the clock of rotating layers, when it was read last
  CudaRunnerStats stats_;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_CUDA_RUNNER_H_
