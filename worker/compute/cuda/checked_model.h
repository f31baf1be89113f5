// What the checks of the GPU runner share: a model, a prompt, its blocks. A failure ends the
// process.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_CHECKED_MODEL_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_CHECKED_MODEL_H_

#include <cstdint>
#include <cstdlib>
#include <iostream>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "worker/compute/cuda/gpu_model.h"
#include "worker/core/sampling.h"
#include "worker/core/step_plan.h"

namespace palimpsest::cuda {

using Json = nlohmann::ordered_json;

[[noreturn]] inline void Die(const absl::Status& status) {
  std::cerr << "gpu_check: " << status << "\n";
  std::exit(EXIT_FAILURE);
}

template <typename T>
T ValueOrDie(absl::StatusOr<T> value) {
  if (!value.ok()) Die(value.status());
  return *std::move(value);
}

inline void OkOrDie(const absl::Status& status) {
  if (!status.ok()) Die(status);
}

inline SamplingRequest Greedy() {
  SamplingRequest request;
  request.params.temperature = 0;
  return request;
}

class CheckedModel {
 public:
  // `tokens` are the prompt.
  CheckedModel(GpuModel& model, std::vector<TokenId> tokens, int32_t block_tokens)
      : model_(model), tokens_(std::move(tokens)), block_tokens_(block_tokens) {}

 protected:
  // Submits and waits; returns the chunks' tokens.
  static std::vector<SampledToken> Step(GpuRunner& runner, const StepPlan& plan) {
    OkOrDie(runner.Submit(plan));
    const StepResult result = ValueOrDie(runner.Wait());
    std::vector<SampledToken> tokens;
    for (const auto& sampled : result.sampled) tokens.push_back(sampled.value_or(SampledToken()));
    return tokens;
  }

  // Blocks for a sequence of so many tokens.
  std::vector<BlockId> Open(int32_t tokens) { return TakeBlocks(tokens, block_tokens_, &next_); }
  void CloseAll() { next_ = 1; }

  GpuModel& model_;
  const std::vector<TokenId> tokens_;

 private:
  const int32_t block_tokens_;
  uint32_t next_ = 1;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_CHECKED_MODEL_H_
