#include "worker/model/model_config.h"

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::nlohmann::json;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

json Llama3() {
  return json::parse(R"({
    "architectures": ["LlamaForCausalLM"], "attention_bias": false, "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009], "hidden_act": "silu", "hidden_size": 4096,
    "intermediate_size": 14336, "max_position_embeddings": 131072, "mlp_bias": false,
    "num_attention_heads": 32, "num_hidden_layers": 32, "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05, "rope_theta": 500000.0, "tie_word_embeddings": false,
    "rope_scaling": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                     "original_max_position_embeddings": 8192, "rope_type": "llama3"},
    "vocab_size": 128256})");
}

json Qwen2() {
  return json::parse(R"({
    "architectures": ["Qwen2ForCausalLM"], "bos_token_id": 151643, "eos_token_id": 151643,
    "hidden_act": "silu", "hidden_size": 896, "intermediate_size": 4864,
    "max_position_embeddings": 131072, "max_window_layers": 24, "num_attention_heads": 14,
    "num_hidden_layers": 24, "num_key_value_heads": 2, "rms_norm_eps": 1e-06,
    "rope_theta": 1000000.0, "sliding_window": 131072, "tie_word_embeddings": true,
    "use_sliding_window": false, "vocab_size": 151936})");
}

json Mistral() {
  return json::parse(R"({
    "architectures": ["MistralForCausalLM"], "bos_token_id": 1, "eos_token_id": 2,
    "hidden_act": "silu", "hidden_size": 4096, "intermediate_size": 14336,
    "max_position_embeddings": 32768, "num_attention_heads": 32, "num_hidden_layers": 32,
    "num_key_value_heads": 8, "rms_norm_eps": 1e-05, "rope_theta": 10000.0,
    "sliding_window": 4096, "tie_word_embeddings": false, "vocab_size": 32000})");
}

ModelConfig Parsed(const json& document, const std::string& generation = "") {
  auto config = ParseModelConfig(document.dump(), generation);
  EXPECT_TRUE(config.ok()) << config.status();
  return config.value_or(ModelConfig());
}

std::string Refusal(const json& document, const std::string& generation = "") {
  auto config = ParseModelConfig(document.dump(), generation);
  if (config.ok()) return "accepted";
  EXPECT_EQ(config.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(config.status().message());
}

TEST(ParseModelConfig, ReadsLlama3WithScaledRope) {
  const ModelConfig config = Parsed(Llama3());
  EXPECT_EQ(config.num_layers, 32);
  EXPECT_EQ(config.head_dim, 128);
  EXPECT_EQ(config.num_kv_heads, 8);
  EXPECT_EQ(config.max_position, 131072);
  EXPECT_FLOAT_EQ(config.rms_norm_eps, 1e-5f);
  EXPECT_DOUBLE_EQ(config.rope_theta, 500000.0);
  ASSERT_TRUE(config.rope_scaling.has_value());
  EXPECT_EQ(config.rope_scaling->kind, RopeScaling::Kind::kLlama3);
  EXPECT_DOUBLE_EQ(config.rope_scaling->factor, 8.0);
  EXPECT_DOUBLE_EQ(config.rope_scaling->high_freq_factor, 4.0);
  EXPECT_EQ(config.rope_scaling->original_max_position, 8192);
  EXPECT_EQ(config.bos_token_id, 128000);
  EXPECT_THAT(config.eos_token_ids, ElementsAre(128001, 128008, 128009));
  EXPECT_FALSE(config.qkv_bias || config.o_bias || config.mlp_bias);
  // 128 KiB of KV per token, as published for this model.
  EXPECT_EQ(config.KvBytes(3), KiB(3 * 128));
}

TEST(ParseModelConfig, ReadsOldAndNewNamesOfRopeScaling) {
  json document = Llama3();
  document["rope_scaling"] = {{"type", "linear"}, {"factor", 2}};
  EXPECT_EQ(Parsed(document).rope_scaling->kind, RopeScaling::Kind::kLinear);
  document["rope_scaling"] = {{"rope_type", "default"}};
  EXPECT_FALSE(Parsed(document).rope_scaling.has_value());
  document["rope_scaling"] = nullptr;
  EXPECT_FALSE(Parsed(document).rope_scaling.has_value());
  document.erase("rope_theta");
  document["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 250000.0}};
  EXPECT_DOUBLE_EQ(Parsed(document).rope_theta, 250000.0);
}

TEST(ParseModelConfig, RefusesRopeScalingItDoesNotKnow) {
  json document = Llama3();
  document["rope_scaling"] = {{"type", "yarn"}, {"factor", 4.0}};
  EXPECT_THAT(Refusal(document), HasSubstr("rope_scaling: type: expected \"default\""));
  document["rope_scaling"] = {{"type", "linear"}};
  EXPECT_THAT(Refusal(document), HasSubstr("factor"));
  document["rope_scaling"] = {{"type", "linear"}, {"factor", -1}};
  EXPECT_THAT(Refusal(document), HasSubstr("factor"));
  document["rope_scaling"] = "linear";
  EXPECT_THAT(Refusal(document), HasSubstr("expected a JSON object"));
  document = Llama3();
  document["rope_scaling"]["high_freq_factor"] = 1.0;
  EXPECT_THAT(Refusal(document), HasSubstr("high_freq_factor"));
}

TEST(ParseModelConfig, TakesLlamaBiasesAndExplicitHeadDim) {
  json document = Llama3();
  document["attention_bias"] = true;
  document["mlp_bias"] = true;
  document["head_dim"] = 64;
  document.erase("num_key_value_heads");
  const ModelConfig config = Parsed(document);
  EXPECT_TRUE(config.qkv_bias && config.o_bias && config.mlp_bias);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.num_kv_heads, 32);
}

TEST(ParseModelConfig, ReadsQwen2) {
  const ModelConfig config = Parsed(Qwen2());
  EXPECT_TRUE(config.qkv_bias);
  EXPECT_FALSE(config.o_bias);
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_EQ(config.head_dim, 64);
  EXPECT_EQ(config.sliding_window, std::nullopt);
}

TEST(ParseModelConfig, AppliesQwen2WindowToAllLayersOrNone) {
  json document = Qwen2();
  document["use_sliding_window"] = true;
  EXPECT_EQ(Parsed(document).sliding_window, std::nullopt);
  document["max_window_layers"] = 0;
  EXPECT_EQ(Parsed(document).sliding_window, 131072);
  document["max_window_layers"] = 12;
  EXPECT_THAT(Refusal(document), HasSubstr("mix of full and sliding-window"));
}

TEST(ParseModelConfig, RefusesMixedLayerTypes) {
  json document = Qwen2();
  document["layer_types"] = std::vector<std::string>(24, "full_attention");
  EXPECT_EQ(Parsed(document).sliding_window, std::nullopt);
  document["layer_types"][3] = "sliding_attention";
  EXPECT_THAT(Refusal(document), HasSubstr("layer_types"));
}

TEST(ParseModelConfig, ReadsMistralWindowWhichMayBeNull) {
  json document = Mistral();
  EXPECT_EQ(Parsed(document).sliding_window, 4096);
  document["sliding_window"] = nullptr;
  EXPECT_EQ(Parsed(document).sliding_window, std::nullopt);
  document["sliding_window"] = 0;
  EXPECT_THAT(Refusal(document), HasSubstr("sliding_window"));
}

TEST(ParseModelConfig, UnitesEosOfBothFiles) {
  EXPECT_THAT(Parsed(Mistral(), R"({"eos_token_id": [5, 2, 7]})").eos_token_ids,
              ElementsAre(2, 5, 7));
  EXPECT_THAT(Parsed(Mistral(), R"({"eos_token_id": 9})").eos_token_ids, ElementsAre(2, 9));
  json document = Mistral();
  document["eos_token_id"] = nullptr;
  document.erase("bos_token_id");
  EXPECT_THAT(Parsed(document).eos_token_ids, IsEmpty());
  EXPECT_EQ(Parsed(document).bos_token_id, std::nullopt);
  EXPECT_THAT(Refusal(Mistral(), R"({"eos_token_id": 32000})"),
              HasSubstr("generation_config.json: eos_token_id"));
  document["eos_token_id"] = {1, "x"};
  EXPECT_THAT(Refusal(document), HasSubstr("eos_token_id"));
}

TEST(ParseModelConfig, RefusesWhatItCannotRun) {
  struct {
    const char* key;
    json value;
  } cases[] = {{"architectures", {"GPT2LMHeadModel"}},
               {"architectures", json::array()},
               {"architectures", nullptr},
               {"hidden_act", "gelu"},
               {"quantization_config", {{"quant_method", "gptq"}}},
               {"partial_rotary_factor", 0.5},
               {"tie_word_embeddings", 1}};
  for (const auto& c : cases) {
    json document = Llama3();
    document[c.key] = c.value;
    EXPECT_THAT(Refusal(document), HasSubstr(c.key));
  }
}

TEST(ParseModelConfig, BoundsEverySize) {
  for (const char* key :
       {"num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads",
        "intermediate_size", "vocab_size", "max_position_embeddings", "head_dim"}) {
    for (const json& value : {json(0), json(-1), json(1.5), json("8"), json(int64_t{1} << 40),
                              json(~uint64_t{0}), json::array({1})}) {
      json document = Llama3();
      document[key] = value;
      EXPECT_THAT(Refusal(document), HasSubstr(std::string(key) + ": expected")) << value;
    }
  }
  for (const json& value : {json(0), json(-1e-5), json("x"), json(2.0)}) {
    json document = Llama3();
    document["rms_norm_eps"] = value;
    EXPECT_THAT(Refusal(document), HasSubstr("rms_norm_eps"));
  }
}

TEST(ParseModelConfig, RefusesHeadsThatDoNotDivide) {
  json document = Llama3();
  document["num_key_value_heads"] = 5;
  EXPECT_THAT(Refusal(document), HasSubstr("num_key_value_heads: expected a divisor"));
  document = Llama3();
  document["hidden_size"] = 4097;
  EXPECT_THAT(Refusal(document), HasSubstr("head_dim"));
  document = Llama3();
  document["head_dim"] = 127;
  EXPECT_THAT(Refusal(document), HasSubstr("even"));
}

TEST(ParseModelConfig, RefusesWhatIsNoConfig) {
  EXPECT_FALSE(ParseModelConfig("", "").ok());
  EXPECT_FALSE(ParseModelConfig("[]", "").ok());
  EXPECT_FALSE(ParseModelConfig("{}", "").ok());
  EXPECT_FALSE(ParseModelConfig(Llama3().dump(), "[").ok());
}

TEST(ReadModelConfig, ReadsFolderWithAndWithoutGenerationConfig) {
  std::string folder = ::testing::TempDir() + "/model_config_XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  EXPECT_EQ(ReadModelConfig(folder).status().code(), absl::StatusCode::kNotFound);
  std::ofstream(folder + "/config.json") << Mistral().dump();
  EXPECT_THAT(ReadModelConfig(folder)->eos_token_ids, ElementsAre(2));
  std::ofstream(folder + "/generation_config.json") << R"({"eos_token_id": 3})";
  EXPECT_THAT(ReadModelConfig(folder)->eos_token_ids, ElementsAre(2, 3));
  std::ofstream(folder + "/config.json") << std::string(2 << 20, ' ');
  EXPECT_THAT(std::string(ReadModelConfig(folder).status().message()), HasSubstr("at most"));
  std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace palimpsest
