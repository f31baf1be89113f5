// What is refused before a GPU is needed.
#include "worker/compute/cuda/cuda_compute.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

TEST(CudaCompute, TooSmallAWorkspaceIsRefusedWithTheSettingsThatRepairIt) {
  ModelConfig model;
  model.num_layers = 2;
  model.hidden_size = 256;
  model.num_heads = 4;
  model.num_kv_heads = 2;
  model.head_dim = 64;
  model.intermediate_size = 512;
  model.vocab_size = 1000;
  model.max_position = 512;
  const ImageLayout layout = LayOutImage(model, MiB(2), WeightFormat::kRowMajor).value();
  CudaComputeOptions options;
  options.max_step_tokens = 256;
  options.max_sequences = 8;
  ModelMemory memory;
  memory.kv_block_bytes = model.KvBytes(options.block_tokens);
  memory.workspace_bytes = MiB(1);
  const auto compute = MakeCudaCompute(model, layout, {memory}, nullptr, options);
  EXPECT_EQ(compute.status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(compute.status().message()),
              AllOf(HasSubstr("is 1 MiB"), HasSubstr("`workspace: "),
                    HasSubstr("engine.max_step_tokens"), HasSubstr("256 tokens and 8 sequences")));
}

}  // namespace
}  // namespace palimpsest
