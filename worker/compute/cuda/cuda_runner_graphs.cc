// Which decode steps are captured as graphs, and how.
#include <memory>
#include <utility>
#include <vector>

#include "common/cuda/status.h"
#include "worker/compute/cuda/cuda_runner.h"

namespace palimpsest::cuda {

// Around the stages of a step that is captured.
class CudaRunner::CaptureHooks final : public ForwardHooks {
 public:
  CaptureHooks(const RotatingLayers& rotating, RotatingLayers::Capture& capture,
               cudaStream_t stream)
      : rotating_(rotating), capture_(capture), stream_(stream) {}

  absl::Status BeginStage(int stage) override { return capture_.Begin(stage, stream_); }
  absl::Status EndStage(int stage) override { return capture_.End(stage, stream_); }
  bool Rotates(int stage) const override { return rotating_.Rotates(stage); }

 private:
  const RotatingLayers& rotating_;
  RotatingLayers::Capture& capture_;
  cudaStream_t stream_;
};

absl::StatusOr<cudaGraph_t> CudaRunner::Capture(const DecodeGraphs::Key& key, ForwardHooks& hooks,
                                                cudaStream_t stream) const {
  PackedStep step;
  step.counts = packer_->CountsOfGraph(key.rows);
  step.layout = StagingLayout::For(step.counts);
  step.latent_grid = packer_->LatentGridOf(step.counts);
  step.split = key.split;
  step.kernel = key.kernel;
  absl::Status status = CudaStatus(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal),
                                   "begin a capture");
  if (!status.ok()) return status;
  status = forward_->Enqueue(step, {}, nullptr, hooks, stream);
  cudaGraph_t graph = nullptr;
  status.Update(CudaStatus(cudaStreamEndCapture(stream, &graph), "end a capture"));
  if (status.ok()) return graph;
  if (graph != nullptr) cudaGraphDestroy(graph);
  return status;
}

std::vector<DecodeGraphs::Key> CudaRunner::GraphKeys() const {
  std::vector<DecodeGraphs::Key> keys;
  for (const int32_t rows : ladder_) {
    for (const DecodeKernel kernel : forward_->decode_kernels()) {
      for (const bool split : {false, true}) {
        const bool cuts_itself = packer_options_.fused_decode && kernel == DecodeKernel::kCudaCores;
        if (split && (cuts_itself || packer_options_.latent_heads > 0)) continue;
        keys.push_back({rows, kernel, split});
      }
    }
  }
  return keys;
}

absl::Status CudaRunner::MakeGraphs() {
  auto graphs = DecodeGraphs::Create(options_.device, GraphKeys(),
                                     [this](const DecodeGraphs::Key& key, cudaStream_t stream) {
                                       ForwardHooks none;
                                       return Capture(key, none, stream);
                                     });
  if (!graphs.ok()) return graphs.status();
  graphs_ = *std::move(graphs);
  return graphs_->BuildAll();
}

absl::Status CudaRunner::MakeRotationGraphs() {
  auto made = rotating_->NewCapture();
  if (!made.ok()) return made.status();
  const std::shared_ptr<RotatingLayers::Capture> capture = *std::move(made);
  auto graphs =
      DecodeGraphs::Create(options_.device, GraphKeys(),
                           [this, capture](const DecodeGraphs::Key& key, cudaStream_t stream) {
                             CaptureHooks hooks(*rotating_, *capture, stream);
                             return Capture(key, hooks, stream);
                           });
  if (!graphs.ok()) return graphs.status();
  rotation_graphs_ = *std::move(graphs);
  if (options_.collective == nullptr) rotation_graphs_->BuildBehind();
  return absl::OkStatus();
}

}  // namespace palimpsest::cuda
