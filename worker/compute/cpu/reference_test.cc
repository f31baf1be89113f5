// A real model against the outputs of Hugging Face transformers, which ran the same checkpoint in
// float32 (tests/data/smollm2/reference.json).
#include <pwd.h>
#include <sys/types.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "worker/compute/cpu/cpu_runner.h"
#include "worker/compute/cpu/test_model.h"
#include "worker/model/image_builder.h"
#include "worker/model/safetensors.h"

namespace palimpsest {
namespace {

constexpr char kReference[] = "tests/data/smollm2/reference.json";
constexpr int32_t kBlockTokens = 16;

// Bound on the error of a logit. Measured: 0.112 over the top-10 logits of all cases, the same with
// any build of the kernels. The reference's weights are float32, ours are rounded to bfloat16, and
// so are keys and values.
constexpr double kLogitError = 0.15;

std::string ModelFolder() {
  if (const char* folder = std::getenv("PALIMPSEST_TEST_MODEL")) return folder;
  const char* cache = std::getenv("PALIMPSEST_CACHE");
  if (cache != nullptr) return std::string(cache) + "/models/SmolLM2-135M-Instruct";
  const char* home = std::getenv("HOME");
  if (home == nullptr) home = getpwuid(getuid())->pw_dir;
  return std::string(home) + "/.cache/palimpsest/models/SmolLM2-135M-Instruct";
}

class ReferenceModel : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    const std::string folder = ModelFolder();
    absl::StatusOr<ModelConfig> config = ReadModelConfig(folder);
    ASSERT_TRUE(config.ok()) << config.status() << "\nThe model is not in " << folder
                             << ". Run tools/setup to install it.";
    config_ = *std::move(config);
    layout_ = LayOutImage(config_, MiB(2)).value();
    absl::StatusOr<Checkpoint> checkpoint = Checkpoint::Open(folder);
    ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
    ASSERT_TRUE(CheckTensors(*checkpoint, config_, layout_).ok());
    image_ = std::make_unique<Region>(layout_.total.count());
    ASSERT_TRUE(
        BuildImage(*checkpoint, config_, layout_, {image_->data(), size_t(image_->size())}).ok());
  }

  static void TearDownTestSuite() { image_.reset(); }

  void SetUp() override {
    ASSERT_NE(image_, nullptr);
    for (uint32_t b = 1; b < 16; ++b) blocks_.push_back(BlockId(b));
    request_.params.temperature = 0;
    runner_ = CpuRunner::Create(config_, layout_, {image_->data(), kv_.data(), kv_.block_bytes()},
                                nullptr, {.block_tokens = kBlockTokens})
                  .value();
  }

  TokenId Run(absl::Span<const TokenId> tokens, int32_t position) {
    StepPlan plan;
    plan.chunks.push_back({tokens, position, blocks_, &request_});
    EXPECT_TRUE(runner_->Submit(plan).ok());
    return runner_->Wait().value().sampled[0]->token;
  }

  static inline ModelConfig config_;
  static inline ImageLayout layout_;
  static inline std::unique_ptr<Region> image_;

  TestKv kv_{config_, kBlockTokens, 16};
  std::vector<BlockId> blocks_;
  SamplingRequest request_;
  std::unique_ptr<CpuRunner> runner_;
};

TEST_F(ReferenceModel, GreedyTokensAndTopLogitsMatchTransformers) {
  std::ifstream file(kReference);
  const nlohmann::json reference = nlohmann::json::parse(file);
  double largest_error = 0;
  int tokens = 0, differing = 0;
  for (const nlohmann::json& reference_case : reference["cases"]) {
    SCOPED_TRACE(reference_case["question"].get<std::string>());
    const auto prompt = reference_case["prompt_ids"].get<std::vector<TokenId>>();
    const auto greedy = reference_case["greedy_ids"].get<std::vector<TokenId>>();
    const double margin = reference_case["min_margin"];
    auto position = static_cast<int32_t>(prompt.size());
    TokenId next = Run(prompt, 0);
    for (const auto& [id, logit] :
         reference_case["first_top10"].get<std::vector<std::pair<TokenId, double>>>()) {
      const double error = std::abs(runner_->logits(0)[id] - logit);
      largest_error = std::max(largest_error, error);
      EXPECT_LT(error, kLogitError) << "logit of token " << id;
    }
    // Each token is predicted from the reference's tokens before it, so all of them count.
    for (const TokenId expected : greedy) {
      ++tokens;
      if (next != expected) {
        ++differing;
        EXPECT_LT(margin, 2 * kLogitError) << "token " << next << " instead of " << expected;
        EXPECT_LT(runner_->logits(0)[next] - runner_->logits(0)[expected], 2 * kLogitError);
      }
      next = Run({&expected, 1}, position++);
    }
  }
  std::cout << "largest logit error " << largest_error << "; " << differing << " of " << tokens
            << " tokens differ\n";
  RecordProperty("largest_logit_error", std::to_string(largest_error));
}

}  // namespace
}  // namespace palimpsest
