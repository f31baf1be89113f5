// What is refused before a GPU is needed.
#include "worker/compute/cuda/cuda_compute.h"

#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

ModelConfig SmallModel() {
  ModelConfig model;
  model.num_layers = 2;
  model.hidden_size = 256;
  model.num_heads = 4;
  model.num_kv_heads = 2;
  model.head_dim = 64;
  model.intermediate_size = 512;
  model.vocab_size = 1000;
  model.max_position = 512;
  return model;
}

CudaComputeOptions SmallSteps(std::vector<int> gpus) {
  CudaComputeOptions options;
  options.gpus = std::move(gpus);
  options.max_step_tokens = 256;
  options.max_sequences = 8;
  return options;
}

// With a workspace of 1 MiB on each of `memories` GPUs.
absl::Status Refusal(const ModelConfig& model, const CudaComputeOptions& options, size_t memories) {
  const ImageLayout layout = LayOutImage(model, MiB(2), WeightFormat::kRowMajor).value();
  ModelMemory memory;
  memory.kv_block_bytes = model.KvBytes(options.block_tokens);
  memory.workspace_bytes = MiB(1);
  const std::vector<ModelMemory> all(memories, memory);
  return MakeCudaCompute(model, layout, all, nullptr, options).status();
}

TEST(CudaCompute, TooSmallAWorkspaceIsRefusedWithTheSettingsThatRepairIt) {
  const absl::Status status = Refusal(SmallModel(), SmallSteps({0}), 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("is 1 MiB"), HasSubstr("`workspace: "),
                    HasSubstr("engine.max_step_tokens"), HasSubstr("256 tokens and 8 sequences")));
}

TEST(CudaCompute, OtherGpusThanThePoolHasAreRefused) {
  const absl::Status status = Refusal(SmallModel(), SmallSteps({0, 1}), 1);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("engine.gpus names 2 GPUs"));
}

TEST(CudaCompute, AModelThatTheGpusCannotDivideIsRefused) {
  const absl::Status status = Refusal(SmallModel(), SmallSteps({0, 1, 2}), 3);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("num_attention_heads"));
}

}  // namespace
}  // namespace palimpsest
