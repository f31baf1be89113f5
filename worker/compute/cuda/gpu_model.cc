#include "worker/compute/cuda/gpu_model.h"

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <utility>

#include "common/cuda/status.h"
#include "worker/compute/cuda/cuda_rank_runners.h"
#include "worker/compute/cuda/kernels.h"
#include "worker/model/image_builder.h"
#include "worker/model/tensor_parallel.h"

namespace palimpsest::cuda {
namespace {

// As trained models are initialised.
constexpr float kDeviation = 0.02f;

}  // namespace

absl::StatusOr<std::unique_ptr<GpuModel>> GpuModel::Create(const ModelConfig& config,
                                                           int64_t kv_tokens,
                                                           const CudaRunnerOptions& options,
                                                           int32_t ranks, Bytes slab_bytes) {
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver.ok()) return driver.status();
  const absl::StatusOr<ModelConfig> rank_config = RankConfig(config, ranks);
  if (!rank_config.ok()) return rank_config.status();
  auto layout = LayOutImage(*rank_config, slab_bytes, WeightFormat::kRowMajor);
  if (!layout.ok()) return layout.status();
  std::unique_ptr<GpuModel> model(new GpuModel(config, *rank_config, *layout, options));
  model->driver_ = *driver;
  model->memory_.resize(static_cast<size_t>(ranks));
  model->images_.resize(static_cast<size_t>(ranks));
  model->blocks_ = static_cast<int32_t>(kv_tokens / options.block_tokens);
  const Bytes block = rank_config->KvBytes(options.block_tokens);
  absl::Status status = model->Allocate(
      block, RoundUp(block * (model->blocks_ + 1), slab_bytes),
      RoundUp(CudaRunner::WorkspaceBytes(*rank_config, block, options), slab_bytes));
  if (!status.ok()) return status;
  return model;
}

absl::Status GpuModel::EachRank(absl::FunctionRef<absl::Status(int rank)> call) const {
  for (int rank = 0; rank < ranks(); ++rank) {
    absl::Status status = CudaStatus(cudaSetDevice(options_.device + rank), "choose the GPU");
    if (status.ok()) status = call(rank);
    if (!status.ok()) return status;
  }
  return CudaStatus(cudaSetDevice(options_.device), "choose the GPU");
}

absl::StatusOr<GpuModel::Slabs> GpuModel::MakeSlabs(int owner, int user, Bytes total) const {
  auto range = CudaAddressRange::Reserve(*driver_, user, total);
  if (!range.ok()) return range.status();
  Slabs slabs{*std::move(range), {}};
  for (int64_t i = 0; i < total / layout_.slab_bytes; ++i) {
    auto slab = CudaAllocation::Create(*driver_, owner, layout_.slab_bytes);
    if (!slab.ok()) return slab.status();
    slabs.memory.push_back(*std::move(slab));
    absl::Status status =
        slabs.range.Map(layout_.slab_bytes * i, layout_.slab_bytes, slabs.memory.back());
    if (!status.ok()) return status;
  }
  absl::Status status = slabs.range.Open(Bytes(0), total);
  if (!status.ok()) return status;
  return slabs;
}

absl::Status GpuModel::Allocate(Bytes kv_block, Bytes kv, Bytes workspace) {
  return EachRank([&](int rank) {
    const int gpu = options_.device + rank;
    auto parameters = MakeSlabs(gpu, gpu, layout_.total);
    if (!parameters.ok()) return parameters.status();
    parameters_.push_back(*std::move(parameters));
    auto steps = MakeSlabs(gpu, gpu, kv + workspace);
    if (!steps.ok()) return steps.status();
    steps_.push_back(*std::move(steps));
    ModelMemory& memory = memory_[rank];
    memory.parameters = reinterpret_cast<const std::byte*>(parameters_.back().range.base());
    memory.kv = reinterpret_cast<std::byte*>(steps_.back().range.base());
    memory.kv_block_bytes = kv_block;
    memory.workspace = memory.kv + kv.count();
    memory.workspace_bytes = workspace;
    memory.slab_bytes = layout_.slab_bytes;
    // 0xff bytes are NaN: reading what was not written shows.
    return CudaStatus(cudaMemset(memory.kv, 0xff, static_cast<size_t>(kv.count())),
                      "fill the KV cache");
  });
}

GpuModel::~GpuModel() {
  for (const auto* regions : {&parameters_, &steps_}) {
    for (const Slabs& slabs : *regions) (void)slabs.range.Unmap(Bytes(0), slabs.range.size());
  }
  for (const Image& image : images_) {
    if (image.host != nullptr) cudaFreeHost(image.host);
    if (!image.slabs.memory.empty()) (void)image.slabs.range.Unmap(Bytes(0), layout_.total);
  }
}

absl::Status GpuModel::MakeImage(ImagePlace place) {
  return EachRank([&](int rank) { return CopyToImage(place, rank); });
}

absl::Status GpuModel::CopyToImage(ImagePlace place, int rank) {
  const auto size = static_cast<size_t>(layout_.total.count());
  Image& image = images_[static_cast<size_t>(rank)];
  std::byte* data = nullptr;
  if (place == ImagePlace::kHost) {
    absl::Status status = CudaStatus(cudaMallocHost(&image.host, size), "host memory of the image");
    if (!status.ok()) return status;
    data = static_cast<std::byte*>(image.host);
  } else {
    const int gpu = options_.device + rank;
    auto slabs = MakeSlabs(place == ImagePlace::kOwnGpu ? gpu : options_.device + ranks(), gpu,
                           layout_.total);
    if (!slabs.ok()) return slabs.status();
    image.slabs = *std::move(slabs);
    data = reinterpret_cast<std::byte*>(image.slabs.range.base());
  }
  memory_[static_cast<size_t>(rank)].image = {{data, layout_.total}};
  return CudaStatus(
      cudaMemcpy(data, memory_[static_cast<size_t>(rank)].parameters, size, cudaMemcpyDefault),
      "copy the parameters to the image");
}

Bytes GpuModel::StageBegin(int stage) const {
  return layout_.slab_bytes * layout_.stages[static_cast<size_t>(stage)].first_slab;
}

Bytes GpuModel::StageBytes(int stage) const {
  return layout_.slab_bytes * layout_.stages[static_cast<size_t>(stage)].slab_count;
}

absl::Status GpuModel::UnmapStage(int rank, int stage) const {
  return parameters_[static_cast<size_t>(rank)].range.Unmap(StageBegin(stage), StageBytes(stage));
}

absl::Status GpuModel::MapStage(int rank, int stage, int whose) {
  const Slabs& slabs = parameters_[static_cast<size_t>(rank)];
  const StagePlacement& at = layout_.stages[static_cast<size_t>(stage)];
  const StagePlacement& source = layout_.stages[static_cast<size_t>(whose)];
  absl::Status status;
  const auto first = static_cast<size_t>(source.first_slab);
  for (int32_t i = 0; i < at.slab_count; ++i) {
    status.Update(slabs.range.Map(layout_.slab_bytes * (at.first_slab + i), layout_.slab_bytes,
                                  slabs.memory[first + static_cast<size_t>(i)]));
  }
  return status.ok() ? slabs.range.Open(StageBegin(stage), StageBytes(stage)) : status;
}

absl::Status GpuModel::Remap(int rank, const Rotation& rotation) {
  const ModelMemory& memory = memory_[static_cast<size_t>(rank)];
  auto* const parameters = const_cast<std::byte*>(memory.parameters);
  absl::Status status;
  // Back to slabs of their own, with nothing in them.
  for (const int32_t stage : rotation_.stages) status.Update(UnmapStage(rank, stage));
  for (const int32_t stage : rotation_.stages) status.Update(MapStage(rank, stage, stage));
  if (!status.ok()) return status;
  const auto rotates = [](const Rotation& r, int32_t stage) {
    return std::find(r.stages.begin(), r.stages.end(), stage) != r.stages.end();
  };
  for (const int32_t stage : rotation_.stages) {
    if (rotates(rotation, stage)) continue;
    const int64_t begin = StageBegin(stage).count();
    status.Update(
        CudaStatus(cudaMemcpy(parameters + begin, memory.image.front().data + begin,
                              static_cast<size_t>(StageBytes(stage).count()), cudaMemcpyDefault),
                   "restore a layer"));
  }
  for (const int32_t stage : rotation.stages) {
    status.Update(CudaStatus(cudaMemset(parameters + StageBegin(stage).count(), 0xff,
                                        static_cast<size_t>(StageBytes(stage).count())),
                             "fill what is taken"));
  }
  status.Update(CudaStatus(cudaDeviceSynchronize(), "change what rotates"));
  for (const int32_t stage : rotation.stages) status.Update(UnmapStage(rank, stage));
  for (size_t i = 0; i < rotation.stages.size(); ++i) {
    const auto slot = static_cast<size_t>(rotation.SlotOf(i));
    status.Update(MapStage(rank, rotation.stages[i], rotation.stages[slot]));
  }
  return status;
}

absl::Status GpuModel::SetRotation(GpuRunner& runner, const Rotation& rotation) {
  absl::Status status = runner.SetRotation(Rotation());
  if (status.ok()) {
    status = EachRank([&](int rank) { return Remap(rank, rotation); });
  }
  if (!status.ok()) return status;
  rotation_ = rotation;
  return runner.SetRotation(rotation);
}

absl::Status GpuModel::FillRandom(uint64_t seed) {
  return EachRank([&](int rank) { return FillRank(seed, rank); });
}

// What all ranks have alike is the same on each.
absl::Status GpuModel::FillRank(uint64_t seed, int rank) {
  auto* base = const_cast<std::byte*>(memory_[rank].parameters);
  absl::Status status;
  const auto fill = [&](Bytes offset, int64_t count, float middle, float spread, bool own = true) {
    if (count == 0) return;
    const uint64_t number = seed++ + (own ? static_cast<uint64_t>(rank) << 32 : 0);
    status.Update(CudaStatus(
        FillUniform(base + offset.count(), count, middle, spread, number, nullptr), "fill"));
  };
  const float spread = kDeviation * std::sqrt(3.0f);
  const auto matrix = [&](const MatrixPlacement& m) {
    fill(m.offset, int64_t{m.rows} * m.cols, 0, spread);
  };
  const auto bias = [&](const VectorPlacement& v) { fill(v.offset, v.size, 0, spread); };
  const auto norm = [&](const VectorPlacement& v) {
    fill(v.offset, v.size, 1 - config_.norm_weight_offset, 0.1f, false);
  };
  for (const MatrixPlacement& m : {layout_.embed, layout_.positions}) {
    fill(m.offset, int64_t{m.rows} * m.cols, 0, spread, false);
  }
  for (const LayerPlacement& layer : layout_.layers) {
    for (const MatrixPlacement& m :
         {layer.qkv, layer.q_up, layer.k_up, layer.v_up, layer.o, layer.gate_up, layer.down}) {
      matrix(m);
    }
    for (const VectorPlacement& v :
         {layer.qkv_bias, layer.o_bias, layer.gate_up_bias, layer.down_bias,
          layer.attention_norm_bias, layer.mlp_norm_bias}) {
      bias(v);
    }
    for (const VectorPlacement& v :
         {layer.attention_norm, layer.mlp_norm, layer.q_norm, layer.k_norm,
          layer.post_attention_norm, layer.post_mlp_norm}) {
      norm(v);
    }
  }
  norm(layout_.final_norm);
  bias(layout_.final_norm_bias);
  if (layout_.lm_head.offset != layout_.embed.offset) matrix(layout_.lm_head);
  status.Update(CudaStatus(cudaDeviceSynchronize(), "fill the parameters"));
  return status;
}

absl::Status GpuModel::LoadDummy(uint64_t seed) {
  const auto size = static_cast<size_t>(layout_.image_bytes().count());
  struct Free {
    void operator()(std::byte* memory) const { std::free(memory); }
  };
  const std::unique_ptr<std::byte, Free> image(
      static_cast<std::byte*>(std::aligned_alloc(4096, size)));
  std::fill_n(image.get(), size, std::byte{0});
  absl::Status status = BuildDummyImage(seed, config_, layout_, absl::MakeSpan(image.get(), size));
  if (!status.ok()) return status;
  return EachRank([&](int rank) {
    const auto part = static_cast<size_t>(layout_.total.count());
    return CudaStatus(cudaMemcpy(const_cast<std::byte*>(memory_[rank].parameters),
                                 image.get() + rank * part, part, cudaMemcpyHostToDevice),
                      "copy the image");
  });
}

absl::Status GpuModel::FillKv(uint64_t seed) {
  return EachRank([&](int rank) {
    const ModelMemory& memory = memory_[rank];
    const int64_t count = (memory.workspace - memory.kv) / KvElementBytes(config_.kv_dtype);
    const auto fill = config_.kv_dtype == KvDtype::kFp8E4m3 ? FillUniformE4m3 : FillUniform;
    absl::Status status =
        CudaStatus(fill(memory.kv, count, 0, 1, seed, nullptr), "fill the KV cache");
    status.Update(CudaStatus(cudaDeviceSynchronize(), "fill the KV cache"));
    return status;
  });
}

absl::Status GpuModel::FillNullBlock(int byte) {
  return EachRank([&](int rank) {
    const ModelMemory& memory = memory_[rank];
    const Bytes block = memory.kv_block_bytes;
    const Bytes first = RoundUp(Bytes(memory.workspace - memory.kv), block);
    return CudaStatus(
        cudaMemset(memory.kv + first.count(), byte, static_cast<size_t>(block.count())),
        "fill the null block");
  });
}

std::vector<int> GpuModel::devices() const {
  std::vector<int> devices;
  for (int rank = 0; rank < ranks(); ++rank) devices.push_back(options_.device + rank);
  return devices;
}

absl::StatusOr<std::unique_ptr<GpuRunner>> GpuModel::NewRunner(ParameterGate* gate) const {
  if (ranks() == 1) {
    auto runner = CudaRunner::Create(config_, layout_, memory_.front(), gate, options_);
    if (!runner.ok()) return runner.status();
    CudaRunner* const first = runner->get();
    return std::make_unique<GpuRunner>(*std::move(runner), first);
  }
  GpuCollectivesOptions collectives = collectives_;
  collectives.devices = devices();
  auto made = MakeRankedRunner(rank_config_, layout_, memory_, gate, options_, collectives);
  if (!made.ok()) return made.status();
  return std::make_unique<GpuRunner>(std::move(made->runner), made->first);
}

std::vector<BlockId> TakeBlocks(int32_t tokens, int32_t block_tokens, uint32_t* next) {
  std::vector<BlockId> blocks;
  for (int32_t t = 0; t < tokens; t += block_tokens) blocks.push_back(BlockId((*next)++));
  return blocks;
}

}  // namespace palimpsest::cuda
