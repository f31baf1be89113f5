// Each architecture against Hugging Face transformers: small random models whose weights both sides
// generate (tests/reference/make_reference.py wrote tests/data/models). What counts is the error
// beside the one that transformers itself makes in bfloat16.
#include <algorithm>
#include <cmath>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "worker/compute/cpu/cpu_runner.h"
#include "worker/compute/cpu/test_model.h"
#include "worker/model/dummy_weights.h"
#include "worker/model/image_builder.h"
#include "worker/model/tensor_plan.h"

namespace palimpsest {
namespace {

using nlohmann::json;

constexpr int32_t kBlockTokens = 16;

class ModelReference : public ::testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    std::ifstream file("tests/data/models/" + GetParam() + ".json");
    ASSERT_TRUE(file) << GetParam();
    reference_ = json::parse(file);
    auto config = ParseModelConfig(reference_["config"].dump(), "");
    ASSERT_TRUE(config.ok()) << config.status();
    config_ = *config;
    layout_ = LayOutImage(config_, Bytes(4096)).value();
  }

  struct Error {
    double largest = 0;
    double mean = 0;
  };

  // Runs the reference's weights and prompt as `config` says.
  Error Run(const ModelConfig& config) const {
    Region image(layout_.total.count());
    EXPECT_TRUE(BuildDummyImage(reference_["seed"], config_, layout_,
                                {image.data(), static_cast<size_t>(layout_.total.count())})
                    .ok());
    TestKv kv(config, kBlockTokens, 8);
    auto runner = CpuRunner::Create(config, layout_, {image.data(), kv.data(), kv.block_bytes()},
                                    nullptr, {.threads = 2, .block_tokens = kBlockTokens})
                      .value();
    const auto tokens = reference_["tokens"].get<std::vector<TokenId>>();
    std::vector<BlockId> blocks;
    for (uint32_t b = 1; b < 8; ++b) blocks.push_back(BlockId(8 - b));
    SamplingRequest request;
    request.params.temperature = 0;
    Error error;
    int64_t count = 0;
    int32_t done = 0;
    for (size_t i = 0; i < reference_["positions"].size(); ++i) {
      const int32_t past = reference_["positions"][i].get<int32_t>() + 1;
      StepPlan plan;
      plan.chunks.push_back(
          {absl::MakeConstSpan(tokens).subspan(done, past - done), done, blocks, &request});
      EXPECT_TRUE(runner->Submit(plan).ok());
      EXPECT_TRUE(runner->Wait().ok());
      done = past;
      const auto expected = reference_["logits"][i].get<std::vector<double>>();
      EXPECT_EQ(runner->logits(0).size(), expected.size());
      for (size_t t = 0; t < expected.size(); ++t, ++count) {
        const double difference = std::abs(runner->logits(0)[t] - expected[t]);
        error.largest = std::max(error.largest, difference);
        error.mean += difference;
      }
    }
    error.mean /= static_cast<double>(count);
    return error;
  }

  json reference_;
  ModelConfig config_;
  ImageLayout layout_;
};

INSTANTIATE_TEST_SUITE_P(Models, ModelReference,
                         ::testing::Values("llama3", "mistral", "qwen2", "qwen3", "gemma", "gemma2",
                                           "opt", "deepseek_v2", "deepseek_v3"),
                         [](const auto& info) { return info.param; });

TEST_P(ModelReference, TensorsAreThoseOfTransformers) {
  std::map<std::string, std::vector<int64_t>> planned, expected;
  for (const TensorPiece& piece : PlanTensors(config_, layout_)) {
    planned[piece.tensor] = piece.shape;
  }
  for (const auto& [name, tensor] : reference_["tensors"].items()) {
    expected[name] = tensor["shape"].get<std::vector<int64_t>>();
    const auto first = tensor["first"].get<std::vector<float>>();
    std::vector<float> generated(first.size());
    DummyTensor(reference_["seed"], name, expected[name].size() == 1 ? 0 : expected[name][1],
                config_.norm_weight_offset)
        .ReadFloats(0, absl::MakeSpan(generated));
    EXPECT_EQ(generated, first) << name;
  }
  EXPECT_EQ(planned, expected);
}

TEST_P(ModelReference, LogitErrorIsBelowThatOfBfloat16) {
  const Error error = Run(config_);
  const json& own = reference_["bf16_error"];
  std::cout << GetParam() << ": largest error " << error.largest << " (bfloat16 " << own["max"]
            << "), mean " << error.mean << " (" << own["mean"] << ")\n";
  RecordProperty("largest_logit_error", std::to_string(error.largest));
  // Activations are floats here: what is left is the rounding of the KV cache.
  EXPECT_LT(error.largest, 0.6 * own["max"].get<double>());
  EXPECT_LT(error.mean, 0.6 * own["mean"].get<double>());
}

// A part that the references do not exercise could be wrong unnoticed: without any one of them the
// error is far above the bound.
TEST_P(ModelReference, NoPartOfTheConfigCanBeLeftOut) {
  std::vector<std::pair<std::string, ModelConfig>> spoiled;
  const auto spoil = [&](const char* what, auto change) {
    ModelConfig config = config_;
    change(config);
    spoiled.emplace_back(what, config);
  };
  if (config_.rotary()) spoil("theta", [](auto& c) { c.rope_theta *= 2; });
  if (config_.rope_scaling) {
    spoil("scaling", [](auto& c) { c.rope_scaling->kind = RopeScaling::Kind::kLinear; });
    if (config_.rope_scaling->magnitude != 1) {
      spoil("magnitude", [](auto& c) { c.rope_scaling->magnitude = 1; });
    }
    if (config_.rope_scaling->latent_score_scale != 1) {
      spoil("score scale", [](auto& c) { c.rope_scaling->latent_score_scale = 1; });
    }
  }
  if (config_.sliding_window) spoil("window", [](auto& c) { ++*c.sliding_window; });
  if (!config_.layer_windows.empty()) {
    spoil("windows", [](auto& c) { std::reverse(c.layer_windows.begin(), c.layer_windows.end()); });
  }
  if (config_.activation == Activation::kGeluTanhGated) {
    spoil("activation", [](auto& c) { c.activation = Activation::kSiluGated; });
  }
  if (config_.embedding_scale != 1) spoil("scale", [](auto& c) { c.embedding_scale = 1; });
  if (config_.logit_softcap != 0) spoil("logit cap", [](auto& c) { c.logit_softcap = 0; });
  if (config_.attention_softcap != 0) spoil("cap", [](auto& c) { c.attention_softcap = 0; });
  if (config_.query_scalar) spoil("query scalar", [](auto& c) { c.query_scalar.reset(); });
  if (config_.norm_weight_offset != 0) spoil("offset", [](auto& c) { c.norm_weight_offset = 0; });
  if (config_.position_table_offset) {
    spoil("position offset", [](auto& c) { --*c.position_table_offset; });
  }
  for (const auto& [what, config] : spoiled) {
    EXPECT_GT(Run(config).largest, 1.2 * reference_["bf16_error"]["max"].get<double>()) << what;
  }
}

}  // namespace
}  // namespace palimpsest
