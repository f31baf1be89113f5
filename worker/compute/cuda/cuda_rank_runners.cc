#include "worker/compute/cuda/cuda_rank_runners.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/compute/cuda/rank_meeting.h"
#include "worker/compute/cuda/tensor_parallel_runner.h"

namespace palimpsest::cuda {

absl::StatusOr<RankedRunner> MakeRankedRunner(const ModelConfig& rank_config,
                                              const ImageLayout& layout,
                                              absl::Span<const ModelMemory> memory,
                                              ParameterGate* gate, const CudaRunnerOptions& options,
                                              const GpuCollectivesOptions& collectives) {
  if (memory.size() != collectives.devices.size()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "there is memory on ", memory.size(), " GPUs for ", collectives.devices.size(), " ranks"));
  }
  auto meeting = std::make_unique<RankMeeting>(static_cast<int>(memory.size()));
  auto group = GpuCollectives::Create(collectives, meeting.get());
  if (!group.ok()) return group.status();
  RankedRunner made;
  auto runner = TensorParallelRunner::Create(
      std::move(meeting), *std::move(group), gate,
      [&](Collective& collective,
          ParameterGate* rank_gate) -> absl::StatusOr<std::unique_ptr<ModelRunner>> {
        const int rank = collective.rank();
        CudaRunnerOptions own = options;
        own.device = collectives.devices[static_cast<size_t>(rank)];
        own.collective = &collective;
        if (rank > 0 && !own.gemm_cache_file.empty()) {
          absl::StrAppend(&own.gemm_cache_file, ".rank", rank);
        }
        auto runner = CudaRunner::Create(rank_config, layout, memory[static_cast<size_t>(rank)],
                                         rank_gate, own);
        if (!runner.ok()) return runner.status();
        if (rank == 0) made.first = runner->get();
        return *std::move(runner);
      });
  if (!runner.ok()) return runner.status();
  made.runner = *std::move(runner);
  return made;
}

}  // namespace palimpsest::cuda
