#include "worker/model/model_config.h"

#include <cmath>
#include <cstdint>
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

TEST(ModelConfig, KvInEightBitsTakesHalf) {
  ModelConfig config = Parsed(Llama3());
  const Bytes before = config.KvBytes(16);
  config.kv_dtype = KvDtype::kFp8E4m3;
  EXPECT_EQ(config.KvTokenBytes(), Bytes(2 * 8 * 128));
  EXPECT_EQ(config.KvBytes(16) * 2, before);
}

TEST(KvDtype, NamesComeBack) {
  for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp8E4m3}) {
    const auto parsed = ParseKvDtype(KvDtypeName(dtype));
    ASSERT_TRUE(parsed.ok());
    EXPECT_EQ(*parsed, dtype);
  }
  for (const absl::string_view name : {"", "fp8", "bf16 ", "FP8_E4M3"}) {
    EXPECT_EQ(ParseKvDtype(name).status().code(), absl::StatusCode::kInvalidArgument) << name;
  }
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
  document["rope_scaling"] = {{"type", "longrope"}, {"factor", 4.0}};
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
  EXPECT_THAT(Parsed(document).layer_windows, IsEmpty());
}

TEST(ParseModelConfig, ReadsWindowsOfSomeLayers) {
  json document = Qwen2();
  document["use_sliding_window"] = true;
  document["max_window_layers"] = 20;
  const ModelConfig config = Parsed(document);
  // Full layers need all of the KV, so that none is given up.
  EXPECT_EQ(config.sliding_window, std::nullopt);
  EXPECT_EQ(config.WindowOf(19), INT32_MAX);
  EXPECT_EQ(config.WindowOf(20), 131072);
  document["layer_types"] = std::vector<std::string>(24, "full_attention");
  document["layer_types"][3] = "sliding_attention";
  EXPECT_EQ(Parsed(document).WindowOf(3), 131072);
  EXPECT_EQ(Parsed(document).WindowOf(20), INT32_MAX);
  document["layer_types"][3] = "chunked_attention";
  EXPECT_THAT(Refusal(document), HasSubstr("layer_types"));
  document["layer_types"] = {"full_attention"};
  EXPECT_THAT(Refusal(document), HasSubstr("24 times"));
  document = Qwen2();
  document["layer_types"] = std::vector<std::string>(24, "full_attention");
  EXPECT_EQ(Parsed(document).sliding_window, std::nullopt);
  document["layer_types"][3] = "sliding_attention";
  EXPECT_THAT(Refusal(document), HasSubstr("layer_types")) << "there is no window";
}

TEST(ParseModelConfig, ReadsMistralWindowWhichMayBeNull) {
  json document = Mistral();
  EXPECT_EQ(Parsed(document).sliding_window, 4096);
  document["sliding_window"] = nullptr;
  EXPECT_EQ(Parsed(document).sliding_window, std::nullopt);
  document["sliding_window"] = 0;
  EXPECT_THAT(Refusal(document), HasSubstr("sliding_window"));
}

TEST(ParseModelConfig, ReadsQwen3) {
  json document = Qwen2();
  document["architectures"] = {"Qwen3ForCausalLM"};
  document["rope_scaling"] = {
      {"rope_type", "yarn"}, {"factor", 4.0}, {"original_max_position_embeddings", 32768}};
  const ModelConfig config = Parsed(document);
  EXPECT_EQ(config.head_dim, 128) << "the family's, not hidden_size / heads";
  EXPECT_FALSE(config.qkv_bias || config.o_bias);
  EXPECT_TRUE(config.qk_norm);
  EXPECT_EQ(config.rope_scaling->kind, RopeScaling::Kind::kYarn);
  EXPECT_NEAR(config.rope_scaling->magnitude, 1.1386294, 1e-6) << "0.1 ln 4 + 1";
  document["attention_bias"] = true;
  EXPECT_TRUE(Parsed(document).qkv_bias && Parsed(document).o_bias);
}

json Gemma2() {
  return json::parse(R"({
    "architectures": ["Gemma2ForCausalLM"], "attn_logit_softcapping": 50.0, "bos_token_id": 2,
    "eos_token_id": 1, "final_logit_softcapping": 30.0, "hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 4608, "intermediate_size": 36864, "max_position_embeddings": 8192,
    "num_attention_heads": 32, "num_hidden_layers": 46, "num_key_value_heads": 16,
    "query_pre_attn_scalar": 144, "rms_norm_eps": 1e-06, "rope_theta": 10000.0,
    "head_dim": 128, "sliding_window": 4096, "vocab_size": 256000})");
}

TEST(ParseModelConfig, ReadsGemma2) {
  const ModelConfig config = Parsed(Gemma2());
  EXPECT_TRUE(config.tie_word_embeddings) << "the family's default";
  EXPECT_TRUE(config.post_norms && config.gated());
  EXPECT_EQ(config.norm_weight_offset, 1.0f);
  EXPECT_FLOAT_EQ(config.embedding_scale, 67.88225f);
  EXPECT_FLOAT_EQ(config.AttentionScale(), 1.0f / 12);
  EXPECT_EQ(config.WindowOf(0), 4096);
  EXPECT_EQ(config.WindowOf(1), INT32_MAX);
  EXPECT_EQ(config.attention_softcap, 50.0f);
  EXPECT_EQ(config.logit_softcap, 30.0f);
  EXPECT_EQ(config.KvTokenBytes(), KiB(8)) << "all layers keep all KV";
  json document = Gemma2();
  document["attn_logit_softcapping"] = nullptr;
  EXPECT_EQ(Parsed(document).attention_softcap, 0.0f);
  document["hidden_activation"] = "relu";
  EXPECT_THAT(Refusal(document), HasSubstr("hidden_activation"));
  document = Gemma2();
  document["use_bidirectional_attention"] = true;
  EXPECT_THAT(Refusal(document), HasSubstr("use_bidirectional_attention"));
  document["use_bidirectional_attention"] = nullptr;
  document["architectures"] = {"GemmaForCausalLM"};
  document["hidden_act"] = "gelu";
  const ModelConfig gemma = Parsed(document);
  EXPECT_EQ(gemma.activation, Activation::kGeluTanhGated);
  EXPECT_EQ(gemma.norm_weight_offset, 1.0f);
  EXPECT_FLOAT_EQ(gemma.embedding_scale, 67.88225f);
  EXPECT_FALSE(gemma.post_norms || gemma.query_scalar.has_value());
}

json Opt() {
  return json::parse(R"({
    "_remove_final_layer_norm": false, "activation_function": "relu",
    "architectures": ["OPTForCausalLM"], "bos_token_id": 2, "do_layer_norm_before": true,
    "eos_token_id": 2, "ffn_dim": 3072, "hidden_size": 768, "max_position_embeddings": 2048,
    "num_attention_heads": 12, "num_hidden_layers": 12, "vocab_size": 50272,
    "word_embed_proj_dim": 768})");
}

TEST(ParseModelConfig, ReadsOpt) {
  const ModelConfig config = Parsed(Opt());
  EXPECT_EQ(config.intermediate_size, 3072);
  EXPECT_EQ(config.num_kv_heads, 12);
  EXPECT_EQ(config.position_table_offset, 2);
  EXPECT_FALSE(config.rotary() || config.gated());
  EXPECT_TRUE(config.tie_word_embeddings);
  EXPECT_TRUE(config.qkv_bias && config.o_bias && config.mlp_bias);
  EXPECT_EQ(config.norm, NormKind::kLayer);
  EXPECT_FLOAT_EQ(config.rms_norm_eps, 1e-5f);
  const json refused = {
      {"do_layer_norm_before", false},          {"_remove_final_layer_norm", true},
      {"layer_norm_elementwise_affine", false}, {"word_embed_proj_dim", 512},
      {"activation_function", "gelu"},          {"ffn_dim", 0}};
  for (const auto& [key, value] : refused.items()) {
    json document = Opt();
    document[key] = value;
    EXPECT_THAT(Refusal(document), HasSubstr(key + ": expected"));
  }
}

json DeepSeekV3() {
  return json::parse(R"({
    "architectures": ["DeepseekV3ForCausalLM"], "attention_bias": false, "bos_token_id": 0,
    "eos_token_id": 1, "first_k_dense_replace": 61, "hidden_act": "silu", "hidden_size": 7168,
    "intermediate_size": 18432, "kv_lora_rank": 512, "max_position_embeddings": 163840,
    "n_routed_experts": 256, "num_attention_heads": 128, "num_hidden_layers": 61,
    "num_key_value_heads": 128, "q_lora_rank": 1536, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "rms_norm_eps": 1e-06, "rope_theta": 10000, "v_head_dim": 128,
    "rope_scaling": {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1.0,
                     "mscale_all_dim": 1.0, "original_max_position_embeddings": 4096,
                     "type": "yarn"},
    "tie_word_embeddings": false, "vocab_size": 129280})");
}

TEST(ParseModelConfig, ReadsDenseDeepSeek) {
  const ModelConfig config = Parsed(DeepSeekV3());
  ASSERT_TRUE(config.latent.has_value());
  EXPECT_EQ(config.head_dim, 192);
  EXPECT_EQ(config.rotary_dim(), 64);
  EXPECT_EQ(config.latent->cache_width(), 576);
  EXPECT_TRUE(config.latent->interleaved_pairs);
  EXPECT_EQ(config.KvTokenBytes(), Bytes(1152));
  EXPECT_EQ(config.KvBytes(16), Bytes(1152 * 61 * 16));
  EXPECT_EQ(config.rope_scaling->magnitude, 1.0);
  // (0.1 ln 40 + 1)^2 / sqrt(192)
  EXPECT_NEAR(config.AttentionScale(), 0.13523379, 1e-7);
  json document = DeepSeekV3();
  document["q_lora_rank"] = nullptr;
  document["rope_scaling"]["mscale_all_dim"] = 0;
  EXPECT_EQ(Parsed(document).latent->q_lora_rank, 0);
  EXPECT_NEAR(Parsed(document).rope_scaling->magnitude, 1.3688879, 1e-6);
  EXPECT_FLOAT_EQ(Parsed(document).AttentionScale(), 0.072168783f);
}

TEST(ParseModelConfig, KvSizesAreThePublishedOnes) {
  json llama_70b = Llama3();
  llama_70b["num_hidden_layers"] = 80;
  llama_70b["hidden_size"] = 8192;
  llama_70b["num_attention_heads"] = 64;
  EXPECT_EQ(Parsed(llama_70b).KvBytes(131072), GiB(40));
  llama_70b["num_key_value_heads"] = 64;
  EXPECT_EQ(Parsed(llama_70b).KvBytes(131072), GiB(320)) << "without groups";
  for (const json& document : {Llama3(), Mistral(), Gemma2(), Opt(), DeepSeekV3()}) {
    const ModelConfig config = Parsed(document);
    for (const int64_t tokens : {0, 1, 16, 4095}) {
      EXPECT_EQ(config.KvBytes(tokens), config.KvTokenBytes() * config.num_layers * tokens);
    }
  }
}

TEST(ParseModelConfig, RefusesExpertsOfDeepSeek) {
  json document = DeepSeekV3();
  document["first_k_dense_replace"] = 3;
  EXPECT_THAT(Refusal(document), HasSubstr("first_k_dense_replace: expected at least"));
  document.erase("first_k_dense_replace");
  EXPECT_THAT(Refusal(document), HasSubstr("routed experts are not supported"));
  document["n_routed_experts"] = nullptr;
  EXPECT_TRUE(Parsed(document).latent.has_value());
  document["attention_bias"] = true;
  EXPECT_THAT(Refusal(document), HasSubstr("attention_bias"));
  for (const char* key : {"kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"}) {
    json lacking = DeepSeekV3();
    lacking.erase(key);
    EXPECT_THAT(Refusal(lacking), HasSubstr(key));
  }
  document = DeepSeekV3();
  document["num_attention_heads"] = 1024;
  EXPECT_THAT(Refusal(document), HasSubstr("num_attention_heads"));
  document = DeepSeekV3();
  document["qk_rope_head_dim"] = 63;
  EXPECT_THAT(Refusal(document), HasSubstr("qk_rope_head_dim: expected an even size"));
}

TEST(ModelConfig, LlamaIsWhatTheDefaultsLeave) {
  for (const json& document : {Llama3(), Qwen2(), Mistral()}) {
    const ModelConfig config = Parsed(document);
    EXPECT_EQ(config.norm, NormKind::kRms);
    EXPECT_EQ(config.activation, Activation::kSiluGated);
    EXPECT_FALSE(config.post_norms || config.qk_norm || config.latent.has_value());
    EXPECT_FLOAT_EQ(config.AttentionScale() * std::sqrt(static_cast<float>(config.head_dim)), 1);
  }
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
