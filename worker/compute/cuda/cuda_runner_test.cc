// What CudaRunner refuses before it needs a GPU. Its results are checked on GPUs by gpu_check.
#include "worker/compute/cuda/cuda_runner.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/compute/cuda/forward_context.h"

namespace palimpsest::cuda {
namespace {

using ::testing::HasSubstr;

class CudaRunnerTest : public ::testing::Test {
 protected:
  CudaRunnerTest() {
    config_.num_layers = 2;
    config_.hidden_size = 256;
    config_.num_heads = 4;
    config_.num_kv_heads = 2;
    config_.head_dim = 64;
    config_.intermediate_size = 512;
    config_.vocab_size = 1000;
    config_.max_position = 512;
    options_.max_step_tokens = 256;
    options_.max_sequences = 8;
  }

  // The refusal, with a workspace that is `missing` too small.
  std::string Refusal(WeightFormat format = WeightFormat::kRowMajor, Bytes missing = Bytes(0)) {
    const ImageLayout layout = LayOutImage(config_, MiB(2), format).value();
    ModelMemory memory;
    memory.kv_block_bytes = config_.KvBytes(options_.block_tokens);
    memory.workspace_bytes =
        CudaRunner::WorkspaceBytes(config_, memory.kv_block_bytes, options_) - missing;
    const auto runner = CudaRunner::Create(config_, layout, memory, nullptr, options_);
    EXPECT_EQ(runner.status().code(), absl::StatusCode::kInvalidArgument) << runner.status();
    return std::string(runner.status().message());
  }

  ModelConfig config_;
  CudaRunnerOptions options_;
};

TEST_F(CudaRunnerTest, RefusesWhatItsKernelsCannotRun) {
  EXPECT_THAT(Refusal(WeightFormat::kCpuPanels), HasSubstr("row-major"));
  EXPECT_THAT(Refusal(WeightFormat::kRowMajor, Bytes(1)), HasSubstr("workspace"));
  config_.head_dim = 96;
  EXPECT_THAT(Refusal(), HasSubstr("head_dim 64, 128 and 256"));
  config_.head_dim = 64;
  config_.attention_softcap = 50;
  EXPECT_THAT(Refusal(), HasSubstr("head_dim 128 and 256 with a soft cap"));
  config_.attention_softcap = 0;
  config_.intermediate_size = 516;
  EXPECT_THAT(Refusal(), HasSubstr("intermediate_size"));
  config_.intermediate_size = 512;
  options_.max_sequences = 300;
  EXPECT_THAT(Refusal(), HasSubstr("max_step_tokens"));
}

TEST_F(CudaRunnerTest, RefusesLatentsThatItsKernelsCannotRun) {
  config_.latent = LatentAttention{.q_lora_rank = 64,
                                   .kv_lora_rank = 512,
                                   .qk_nope_head_dim = 128,
                                   .qk_rope_head_dim = 64,
                                   .v_head_dim = 128};
  config_.num_heads = 16;
  config_.num_kv_heads = 1;
  config_.head_dim = 192;
  // This shape would do.
  EXPECT_THAT(Refusal(WeightFormat::kRowMajor, Bytes(1)), HasSubstr("workspace"));
  config_.latent->kv_lora_rank = 256;
  EXPECT_THAT(Refusal(), HasSubstr("kv_lora_rank 512 and qk_rope_head_dim 64"));
  config_.latent->kv_lora_rank = 512;
  config_.num_heads = 48;
  EXPECT_THAT(Refusal(), HasSubstr("128 heads, the model has 48"));
  config_.num_heads = 16;
  config_.latent->v_head_dim = 100;
  EXPECT_THAT(Refusal(), HasSubstr("v_head_dim"));
  config_.latent->v_head_dim = 128;
  config_.sliding_window = 100;
  EXPECT_THAT(Refusal(), HasSubstr("no window"));
}

TEST_F(CudaRunnerTest, RefusesKvInEightBitsWhereItHasNoKernel) {
  config_.kv_dtype = KvDtype::kFp8E4m3;
  // Nothing is wrong with the model itself.
  EXPECT_THAT(Refusal(WeightFormat::kRowMajor, Bytes(1)), HasSubstr("workspace"));
  config_.head_dim = 256;
  EXPECT_THAT(Refusal(), HasSubstr("fp8_e4m3"));
  config_.head_dim = 128;
  config_.attention_softcap = 50;
  EXPECT_THAT(Refusal(), HasSubstr("set the tenant's kv_dtype: bf16"));
}

// Kernels are chosen over addresses that repeat the workspace's memory: it need not hold a matrix.
TEST_F(CudaRunnerTest, WorkspaceHoldsNoWeights) {
  const Bytes block = config_.KvBytes(options_.block_tokens);
  const Bytes narrow = CudaRunner::WorkspaceBytes(config_, block, options_);
  config_.vocab_size = 128 << 10;
  config_.hidden_size = 4096;
  const Bytes head(int64_t{config_.vocab_size} * config_.hidden_size * 2);
  EXPECT_EQ(LargestMatrix(config_), head);
  const Bytes wide = CudaRunner::WorkspaceBytes(config_, block, options_);
  // Logits, and the residual stream with its norm and gathered rows.
  EXPECT_LE(wide - narrow, Bytes(8 * (128 << 10) * 4 + 4 * 256 * 4096 * 2));
  EXPECT_LT(wide, head);
}

TEST_F(CudaRunnerTest, WorkspaceGrowsWithTheLargestStep) {
  const Bytes block = config_.KvBytes(options_.block_tokens);
  const Bytes small = CudaRunner::WorkspaceBytes(config_, block, options_);
  options_.max_step_tokens = 8192;
  const Bytes large = CudaRunner::WorkspaceBytes(config_, block, options_);
  // Residual stream, its norm, and gate and up with their product.
  const int64_t row = 2 * (2 * config_.hidden_size + 3 * config_.intermediate_size);
  EXPECT_GE(large - small, Bytes((8192 - 256) * row));
}

}  // namespace
}  // namespace palimpsest::cuda
