// The shapes of public models, as their config.json has them (testdata, which fuzzing starts from
// too), and what the engine here makes of those that it runs.
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "broker/core/sizing/kv_sizing.h"
#include "broker/core/sizing/model_shape.h"
#include "common/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/model_config.h"
#include "worker/model/tensor_parallel.h"

namespace palimpsest {
namespace {

constexpr int64_t kBlockTokens = 16;
constexpr char kConfigs[] = "broker/core/sizing/testdata/model_shape_fuzz/";

std::string ReadText(const std::string& path) {
  auto text = ReadFile(path, MiB(16));
  EXPECT_TRUE(text.ok()) << text.status();
  return text.value_or("");
}

struct Plan {
  KvSizing sizing;
  KvSizing multi_head;
};

Plan PlanOf(const std::string& name, const ShardOptions& options = {}) {
  const auto shape = ParseModelShape(ReadText(kConfigs + name + ".json"));
  EXPECT_TRUE(shape.ok()) << name << ": " << shape.status();
  const auto sizing = [](absl::StatusOr<std::vector<KvGroup>> groups) {
    return *KvSizing::Create(*std::move(groups), kBlockTokens);
  };
  return {sizing(KvGroups(*shape, options)), sizing(MultiHeadGroups(*shape, options))};
}

Bytes TokenLayerBytes(const KvSizing& sizing) {
  Bytes most;
  for (const KvGroup& group : sizing.groups()) most = std::max(most, group.token_bytes);
  return most;
}

struct PublicModel {
  const char* name;
  int64_t token_layer;             // bytes in an attention layer, bf16
  int64_t multi_head_token_layer;  // if each query head had its own key and value
  int64_t sequence;                // bytes of 8,192 tokens
};

// Gemma 2 and 3, Mistral 0.1 and gpt-oss have windows, the last five states.
constexpr PublicModel kPublicModels[] = {
    {"llama-2-7b", 16384, 16384, 4294967296},
    {"llama-2-13b", 20480, 20480, 6710886400},
    {"llama-2-70b", 4096, 32768, 2684354560},
    {"llama-3-8b", 4096, 16384, 1073741824},
    {"llama-3-70b", 4096, 32768, 2684354560},
    {"llama-3.1-405b", 4096, 65536, 4227858432},
    {"llama-3.2-1b", 2048, 8192, 268435456},
    {"llama-3.2-3b", 4096, 12288, 939524096},
    {"qwen2.5-0.5b", 512, 3584, 100663296},
    {"qwen2.5-7b", 2048, 14336, 469762048},
    {"qwen2.5-32b", 4096, 20480, 2147483648},
    {"qwen2.5-72b", 4096, 32768, 2684354560},
    {"qwen3-0.6b", 4096, 8192, 939524096},
    {"qwen3-8b", 4096, 16384, 1207959552},
    {"qwen3-32b", 4096, 32768, 2147483648},
    {"qwen3-30b-a3b", 2048, 16384, 805306368},
    {"qwen3-235b-a22b", 2048, 32768, 1577058304},
    {"mistral-7b-v0.1", 4096, 16384, 538968064},
    {"mistral-7b-v0.3", 4096, 16384, 1073741824},
    {"mixtral-8x7b", 4096, 16384, 1073741824},
    {"mistral-nemo-12b", 4096, 16384, 1342177280},
    {"mistral-large-2407", 4096, 49152, 2952790016},
    {"gemma-2b", 1024, 8192, 150994944},
    {"gemma-2-2b", 4096, 8192, 655163392},
    {"gemma-2-9b", 8192, 16384, 2116681728},
    {"gemma-2-27b", 8192, 16384, 2318270464},
    {"gemma-3-1b", 1024, 4096, 45449216},
    {"gemma-3-4b", 4096, 8192, 291307520},
    {"gemma-3-12b", 8192, 16384, 877658112},
    {"gemma-3-27b", 8192, 16384, 1114112000},
    {"deepseek-v2-lite", 1152, 8192, 254803968},
    {"deepseek-v2", 1152, 65536, 566231040},
    {"deepseek-v3", 1152, 65536, 575668224},
    {"opt-125m", 3072, 3072, 301989888},
    {"opt-1.3b", 8192, 8192, 1610612736},
    {"opt-6.7b", 16384, 16384, 4294967296},
    {"opt-13b", 20480, 20480, 6710886400},
    {"opt-30b", 28672, 28672, 11274289152},
    {"opt-66b", 36864, 36864, 19327352832},
    {"falcon-7b", 256, 18176, 67108864},
    {"falcon-40b", 2048, 32768, 1006632960},
    {"starcoder", 512, 24576, 167772160},
    {"gpt2", 3072, 3072, 301989888},
    {"gpt-oss-20b", 2048, 16384, 204865536},
    {"llama-4-scout", 4096, 20480, 1610612736},
    {"mamba-2.8b", 0, 10240, 22937600},
    {"mamba-codestral-7b", 0, 16384, 272367616},
    {"jamba-v0.1", 4096, 16384, 150274048},
    {"recurrentgemma-2b", 1024, 10240, 17369088},
    {"qwen3-next-80b-a3b", 2048, 16384, 278593536},
};

TEST(PublicModels, AreSizedToTheByte) {
  for (const PublicModel& model : kPublicModels) {
    const Plan plan = PlanOf(model.name);
    EXPECT_EQ(TokenLayerBytes(plan.sizing), Bytes(model.token_layer)) << model.name;
    EXPECT_EQ(TokenLayerBytes(plan.multi_head), Bytes(model.multi_head_token_layer)) << model.name;
    EXPECT_EQ(plan.sizing.BytesFor(8192).count(), model.sequence) << model.name;
  }
}

TEST(PublicModels, EachConfigIsInTheTable) {
  size_t files = 0;
  for (const auto& entry : std::filesystem::directory_iterator(kConfigs)) {
    files += entry.path().extension() == ".json";
  }
  EXPECT_EQ(files, std::size(kPublicModels));
}

TEST(PublicModels, DeepSeekV3KeepsA57thOfMultiHeadAttention) {
  const Plan plan = PlanOf("deepseek-v3");
  EXPECT_NEAR(static_cast<double>(plan.multi_head.BytesFor(131072).count()) /
                  static_cast<double>(plan.sizing.BytesFor(131072).count()),
              56.9, 0.05);
}

TEST(PublicModels, FourteenSequencesOfLlama3InsteadOfOne) {
  const Plan plan = PlanOf("llama-3-70b");
  constexpr int64_t kTokens = 131072;
  constexpr Bytes kMemory(640'000'000'000);
  EXPECT_EQ(plan.sizing.BytesFor(kTokens), GiB(40));
  EXPECT_EQ(plan.multi_head.BytesFor(kTokens), GiB(320));
  EXPECT_EQ(plan.sizing.MaxBatch(kTokens, kMemory), 14);
  EXPECT_EQ(plan.multi_head.MaxBatch(kTokens, kMemory), 1);
}

TEST(PublicModels, HalfOfGemma2AndASixthOfGemma3Grow) {
  const auto growth = [](const char* name) {
    const KvSizing sizing = PlanOf(name).sizing;
    return (sizing.BytesFor(32768) - sizing.BytesFor(16384)) / Bytes(16384);
  };
  EXPECT_EQ(growth("gemma-2-9b"), 21 * 8192);
  EXPECT_EQ(growth("gemma-3-27b"), 10 * 8192);
}

// The engine keeps one group: a block of its own holds a block of each group here.
void ExpectSameBlocks(const std::string& config_json, int& compared) {
  const auto engine = ParseModelConfig(config_json, "");
  if (!engine.ok()) return;
  const auto shape = ParseModelShape(config_json);
  ASSERT_TRUE(shape.ok()) << shape.status();
  ASSERT_EQ(shape->layers.size(), static_cast<size_t>(engine->num_layers));
  for (int32_t layer = 0; layer < engine->num_layers; ++layer) {
    const KvReach& reach = shape->layers[static_cast<size_t>(layer)].reach;
    EXPECT_EQ(engine->WindowOf(layer),
              reach.kind == KvReach::Kind::kAll ? INT32_MAX : reach.tokens);
  }
  for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp8E4m3}) {
    for (const int32_t ranks : {1, 2, 4, 8, 16}) {
      auto rank = RankConfig(*engine, ranks);
      if (!rank.ok()) continue;
      rank->kv_dtype = dtype;
      const auto groups =
          KvGroups(*shape, {.format = *FindKvFormat(KvDtypeName(dtype)), .ranks = ranks});
      ASSERT_TRUE(groups.ok()) << groups.status();
      Bytes block;
      for (const KvGroup& group : *groups) block += group.BlockBytes(kBlockTokens);
      EXPECT_EQ(block, rank->KvBytes(kBlockTokens)) << ranks << " ranks";
      ++compared;
    }
  }
}

TEST(PublicModels, EngineHasTheSameBlocks) {
  int compared = 0;
  for (const auto& entry : std::filesystem::directory_iterator("tests/data/models")) {
    if (entry.path().extension() != ".json") continue;
    SCOPED_TRACE(entry.path());
    const auto reference = nlohmann::json::parse(ReadText(entry.path()));
    ExpectSameBlocks(reference["config"].dump(), compared);
  }
  EXPECT_GE(compared, 9 * 2) << "each of the reference models runs on one rank at least";
  for (const PublicModel& model : kPublicModels) {
    SCOPED_TRACE(model.name);
    auto config = nlohmann::json::parse(ReadText(std::string(kConfigs) + model.name + ".json"));
    const std::string type = config["model_type"];
    // What the engine wants to know besides shapes.
    static const std::pair<const char*, const char*> kArchitectures[] = {
        {"llama", "LlamaForCausalLM"}, {"mistral", "MistralForCausalLM"},
        {"qwen2", "Qwen2ForCausalLM"}, {"qwen3", "Qwen3ForCausalLM"},
        {"gemma", "GemmaForCausalLM"}, {"gemma2", "Gemma2ForCausalLM"},
        {"opt", "OPTForCausalLM"},     {"deepseek_v3", "DeepseekV3ForCausalLM"}};
    for (const auto& [known, architecture] : kArchitectures) {
      if (type != known) continue;
      config["architectures"] = {architecture};
      config["vocab_size"] = 32000;
      config["intermediate_size"] = config["ffn_dim"] = 4096;
      config["first_k_dense_replace"] = config["num_hidden_layers"];
      const bool gemma = type == "gemma" || type == "gemma2";
      config["hidden_act"] = gemma ? "gelu_pytorch_tanh" : "silu";
      config["activation_function"] = "relu";
      const int before = compared;
      ExpectSameBlocks(config.dump(), compared);
      EXPECT_GT(compared, before) << "the engine refuses it";
    }
  }
}

}  // namespace
}  // namespace palimpsest
