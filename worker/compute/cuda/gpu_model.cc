#include "worker/compute/cuda/gpu_model.h"

#include <cuda_runtime_api.h>

#include <cmath>
#include <cstdlib>

#include "common/cuda/status.h"
#include "worker/compute/cuda/kernels.h"
#include "worker/model/image_builder.h"
#include "worker/model/safetensors.h"

namespace palimpsest::cuda {
namespace {

constexpr Bytes kSlab = MiB(32);
// As trained models are initialised.
constexpr float kDeviation = 0.02f;

}  // namespace

absl::StatusOr<std::unique_ptr<GpuModel>> GpuModel::Create(const ModelConfig& config,
                                                           int64_t kv_tokens,
                                                           const CudaRunnerOptions& options) {
  auto layout = LayOutImage(config, kSlab, WeightFormat::kRowMajor);
  if (!layout.ok()) return layout.status();
  std::unique_ptr<GpuModel> model(new GpuModel(config, *layout, options));
  const Bytes block = config.KvBytes(options.block_tokens);
  model->blocks_ = static_cast<int32_t>(kv_tokens / options.block_tokens);
  const Bytes kv = block * (model->blocks_ + 1);
  const Bytes workspace = CudaRunner::WorkspaceBytes(config, block, options);
  void* data = nullptr;
  absl::Status status = CudaStatus(
      cudaMalloc(&model->parameters_, static_cast<size_t>(layout->total.count())), "parameters");
  status.Update(CudaStatus(cudaMalloc(&data, static_cast<size_t>((kv + workspace).count())),
                           "KV cache and workspace"));
  if (!status.ok()) return status;
  model->memory_.parameters = static_cast<std::byte*>(model->parameters_);
  model->memory_.kv = static_cast<std::byte*>(data);
  model->memory_.kv_block_bytes = block;
  model->memory_.workspace = model->memory_.kv + kv.count();
  model->memory_.workspace_bytes = workspace;
  // 0xff bytes are NaN: reading what was not written shows.
  status = CudaStatus(cudaMemset(data, 0xff, static_cast<size_t>(kv.count())), "fill the KV cache");
  if (!status.ok()) return status;
  return model;
}

GpuModel::~GpuModel() {
  cudaFree(parameters_);
  cudaFree(memory_.kv);
}

absl::Status GpuModel::FillRandom(uint64_t seed) {
  auto* base = static_cast<std::byte*>(parameters_);
  absl::Status status;
  const auto fill = [&](Bytes offset, int64_t count, float middle, float spread) {
    if (count == 0) return;
    status.Update(CudaStatus(
        FillUniform(base + offset.count(), count, middle, spread, seed++, nullptr), "fill"));
  };
  const float spread = kDeviation * std::sqrt(3.0f);
  const auto matrix = [&](const MatrixPlacement& m) {
    fill(m.offset, int64_t{m.rows} * m.cols, 0, spread);
  };
  const auto bias = [&](const VectorPlacement& v) { fill(v.offset, v.size, 0, spread); };
  const auto norm = [&](const VectorPlacement& v) { fill(v.offset, v.size, 1, 0.1f); };
  matrix(layout_.embed);
  for (const LayerPlacement& layer : layout_.layers) {
    for (const MatrixPlacement& m : {layer.qkv, layer.o, layer.gate_up, layer.down}) matrix(m);
    for (const VectorPlacement& v :
         {layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias}) {
      bias(v);
    }
    norm(layer.attention_norm);
    norm(layer.mlp_norm);
  }
  norm(layout_.final_norm);
  if (layout_.lm_head.offset != layout_.embed.offset) matrix(layout_.lm_head);
  status.Update(CudaStatus(cudaDeviceSynchronize(), "fill the parameters"));
  return status;
}

absl::Status GpuModel::LoadFolder(const std::string& folder) {
  auto checkpoint = Checkpoint::Open(folder);
  if (!checkpoint.ok()) return checkpoint.status();
  absl::Status status = CheckTensors(*checkpoint, config_, layout_);
  if (!status.ok()) return status;
  const auto size = static_cast<size_t>(layout_.total.count());
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  const std::unique_ptr<std::byte, Free> image(
      static_cast<std::byte*>(std::aligned_alloc(4096, size)));
  std::fill_n(image.get(), size, std::byte{0});
  status = BuildImage(*checkpoint, config_, layout_, absl::MakeSpan(image.get(), size));
  if (!status.ok()) return status;
  return CudaStatus(cudaMemcpy(parameters_, image.get(), size, cudaMemcpyHostToDevice),
                    "copy the image");
}

absl::Status GpuModel::FillKv(uint64_t seed) {
  const int64_t count = (memory_.workspace - memory_.kv) / 2;
  absl::Status status =
      CudaStatus(FillUniform(memory_.kv, count, 0, 1, seed, nullptr), "fill the KV cache");
  status.Update(CudaStatus(cudaDeviceSynchronize(), "fill the KV cache"));
  return status;
}

absl::Status GpuModel::FillNullBlock(int byte) {
  // The workspace begins at a whole block here.
  return CudaStatus(
      cudaMemset(memory_.workspace, byte, static_cast<size_t>(memory_.kv_block_bytes.count())),
      "fill the null block");
}

absl::StatusOr<std::unique_ptr<CudaRunner>> GpuModel::NewRunner() const {
  return CudaRunner::Create(config_, layout_, memory_, nullptr, options_);
}

std::vector<BlockId> TakeBlocks(int32_t tokens, int32_t block_tokens, uint32_t* next) {
  std::vector<BlockId> blocks;
  for (int32_t t = 0; t < tokens; t += block_tokens) blocks.push_back(BlockId((*next)++));
  return blocks;
}

}  // namespace palimpsest::cuda
