#include "worker/compute/cuda/cuda_compute.h"

#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "common/cuda/context.h"
#include "common/cuda/driver.h"
#include "worker/compute/cuda/cuda_block_copier.h"
#include "worker/compute/cuda/cuda_rank_runners.h"
#include "worker/compute/cuda/cuda_runner.h"
#include "worker/compute/cuda/cuda_swap_copier.h"
#include "worker/model/tensor_parallel.h"

namespace palimpsest {
namespace {

absl::Status CheckWorkspace(const ModelConfig& model, const ModelMemory& memory,
                            const cuda::CudaRunnerOptions& options) {
  const Bytes needed = cuda::CudaRunner::WorkspaceBytes(model, memory.kv_block_bytes, options);
  if (memory.workspace_bytes >= needed) return absl::OkStatus();
  const int64_t mebibytes = CeilDiv(needed, MiB(1));
  return absl::FailedPreconditionError(absl::StrCat(
      "the tenant's workspace is ", memory.workspace_bytes.ToString(), ", but steps of ",
      options.max_step_tokens, " tokens and ", options.max_sequences, " sequences need ", mebibytes,
      " MiB: set `workspace: ", mebibytes,
      " MiB` or more for the tenant at the broker, or lower engine.max_step_tokens or "
      "engine.max_batch_sequences"));
}

absl::StatusOr<std::unique_ptr<CudaBlockCopier>> MakeCopier(absl::Span<const ModelMemory> memory,
                                                            const CudaComputeOptions& options) {
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver.ok()) return driver.status();
  std::vector<CudaBlockCopier::Rank> ranks;
  for (size_t i = 0; i < memory.size(); ++i) {
    absl::StatusOr<CudaContextPtr> context = CudaContext::Open(**driver, options.gpus[i]);
    if (!context.ok()) return context.status();
    ranks.push_back({*std::move(context), memory[i]});
  }
  return CudaBlockCopier::Create(std::move(ranks));
}

}  // namespace

absl::StatusOr<CudaCompute> MakeCudaCompute(const ModelConfig& model, const ImageLayout& layout,
                                            absl::Span<const ModelMemory> memory,
                                            ParameterGate* gate,
                                            const CudaComputeOptions& options) {
  const auto ranks = static_cast<int32_t>(options.gpus.size());
  if (memory.size() != options.gpus.size()) {
    return absl::FailedPreconditionError(
        absl::StrCat("engine.gpus names ", ranks, " GPUs, but the broker's pool is one of ",
                     memory.size(), ": name the GPUs of the pool, in its order"));
  }
  const absl::StatusOr<ModelConfig> rank_config = RankConfig(model, ranks);
  if (!rank_config.ok()) return rank_config.status();
  cuda::CudaRunnerOptions runner_options;
  runner_options.device = options.gpus[0];
  runner_options.block_tokens = options.block_tokens;
  runner_options.max_step_tokens = options.max_step_tokens;
  runner_options.max_sequences = options.max_sequences;
  runner_options.gemm_cache_file = options.gemm_cache_file;
  runner_options.head_sampling = options.head_sampling;
  if (absl::Status status = CheckWorkspace(*rank_config, memory[0], runner_options); !status.ok()) {
    return status;
  }
  absl::StatusOr<std::unique_ptr<CudaBlockCopier>> copier = MakeCopier(memory, options);
  if (!copier.ok()) return copier.status();
  if (ranks > 1) {
    cuda::GpuCollectivesOptions collectives;
    collectives.devices = options.gpus;
    auto ranked =
        cuda::MakeRankedRunner(*rank_config, layout, memory, gate, runner_options, collectives);
    if (!ranked.ok()) return ranked.status();
    return CudaCompute{std::move(ranked->runner), *std::move(copier)};
  }
  auto runner = cuda::CudaRunner::Create(model, layout, memory[0], gate, runner_options);
  if (!runner.ok()) return runner.status();
  return CudaCompute{*std::move(runner), *std::move(copier)};
}

absl::StatusOr<std::unique_ptr<SwapCopier>> MakeCudaSwapCopier(absl::Span<const ModelMemory> memory,
                                                               const CudaSwapOptions& options) {
  const absl::StatusOr<const CudaDriver*> driver = CudaDriver::Load();
  if (!driver.ok()) return driver.status();
  std::vector<CudaSwapCopier::Rank> ranks;
  for (size_t i = 0; i < memory.size(); ++i) {
    absl::StatusOr<CudaContextPtr> context = CudaContext::Open(**driver, options.gpus[i]);
    if (!context.ok()) return context.status();
    ranks.push_back({*std::move(context), memory[i]});
  }
  return CudaSwapCopier::Create(std::move(ranks), {.slots = options.slots,
                                                   .layers = options.layers,
                                                   .block_store = options.block_store,
                                                   .pacer = options.pacer});
}

}  // namespace palimpsest
