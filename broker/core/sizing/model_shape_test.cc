#include "broker/core/sizing/model_shape.h"

#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::nlohmann::json;
using ::testing::HasSubstr;

json Llama() {
  return {{"model_type", "llama"},    {"num_hidden_layers", 6},
          {"hidden_size", 4096},      {"num_attention_heads", 32},
          {"num_key_value_heads", 8}, {"max_position_embeddings", 8192}};
}

json With(json config, const json& changes) {
  if (!changes.empty()) config.update(changes);
  return config;
}

ModelShape Parsed(const json& config) {
  auto shape = ParseModelShape(config.dump());
  EXPECT_TRUE(shape.ok()) << shape.status();
  return shape.value_or(ModelShape());
}

std::string Refusal(const json& config) {
  const auto shape = ParseModelShape(config.dump());
  EXPECT_FALSE(shape.ok());
  return std::string(shape.status().message());
}

// One letter a layer: a(ll tokens), w(indow), c(hunk), r(ecurrent), b(oth), - neither.
std::string Layers(const json& config) {
  std::string letters;
  for (const LayerShape& layer : Parsed(config).layers) {
    const char reach = "awc"[static_cast<int>(layer.reach.kind)];
    const char attention = layer.recurrent ? 'b' : reach;
    letters += layer.attention ? attention : layer.recurrent ? 'r' : '-';
  }
  return letters;
}

std::vector<KvGroup> Groups(const json& config, const ShardOptions& options = {}) {
  auto groups = KvGroups(Parsed(config), options);
  EXPECT_TRUE(groups.ok()) << groups.status();
  return groups.value_or(std::vector<KvGroup>());
}

Bytes TokenBytes(const json& config, const ShardOptions& options = {}) {
  const std::vector<KvGroup> groups = Groups(config, options);
  return groups.empty() ? Bytes(-1) : groups.front().token_bytes;
}

TEST(ParseModelShape, KnowsTheNamesOfOtherFamilies) {
  const json gpt = {{"n_layer", 2}, {"n_head", 12}, {"n_embd", 768}};
  EXPECT_EQ(TokenBytes(gpt), Bytes(4 * 768));
  EXPECT_EQ(TokenBytes(With(gpt, {{"multi_query", true}})), Bytes(4 * 64));
  const json falcon = {
      {"multi_query", true}, {"new_decoder_architecture", true}, {"num_kv_heads", 4}};
  EXPECT_EQ(TokenBytes(With(gpt, falcon)), Bytes(4 * 4 * 64));
  const json chatglm = {{"num_layers", 2},
                        {"num_attention_heads", 32},
                        {"hidden_size", 4096},
                        {"multi_query_attention", true},
                        {"multi_query_group_num", 2},
                        {"kv_channels", 96}};
  EXPECT_EQ(TokenBytes(chatglm), Bytes(4 * 2 * 96));
  const json dbrx = {
      {"n_layers", 2}, {"n_heads", 48}, {"d_model", 6144}, {"attn_config", {{"kv_n_heads", 8}}}};
  EXPECT_EQ(TokenBytes(dbrx), Bytes(4 * 8 * 128));
}

TEST(ParseModelShape, ValuesMayBeNarrowerThanKeys) {
  EXPECT_EQ(TokenBytes(With(Llama(), {{"v_head_dim", 64}})), Bytes(8 * 2 * (128 + 64)));
}

TEST(ParseModelShape, AFamilySaysWhatTheFileLeavesOut) {
  const json bare = {{"num_hidden_layers", 6}, {"hidden_size", 2560}};
  EXPECT_EQ(TokenBytes(With(bare, {{"model_type", "gemma3_text"}})), Bytes(4 * 4 * 256));
  EXPECT_EQ(TokenBytes(With(bare, {{"architectures", {"Gemma2ForCausalLM"}}})), Bytes(4 * 4 * 256));
  EXPECT_THAT(Refusal(bare), HasSubstr("num_attention_heads: expected an integer"));
}

TEST(ParseModelShape, AnIndexerKeepsAKeyOfItsOwn) {
  json config = With(Llama(), {{"kv_lora_rank", 512},
                               {"qk_rope_head_dim", 64},
                               {"qk_nope_head_dim", 128},
                               {"v_head_dim", 128}});
  EXPECT_EQ(TokenBytes(config), Bytes(1152));
  EXPECT_EQ(TokenBytes(With(config, {{"index_head_dim", 128}})), Bytes(1152 + 256));
  config.erase("qk_rope_head_dim");
  EXPECT_THAT(Refusal(config), HasSubstr("qk_rope_head_dim"));
}

TEST(ParseModelShape, WindowsAreWhereEachFamilyHasThem) {
  const auto of = [](absl::string_view type, const json& changes) {
    return Layers(With(With(Llama(), {{"model_type", type}, {"sliding_window", 64}}), changes));
  };
  EXPECT_EQ(of("mistral", {}), "wwwwww");
  EXPECT_EQ(of("mistral", {{"sliding_window", nullptr}}), "aaaaaa");
  EXPECT_EQ(of("gemma2", {}), "wawawa");
  EXPECT_EQ(of("gemma3_text", {}), "wwwwwa");
  EXPECT_EQ(of("gemma3_text", {{"sliding_window_pattern", 3}}), "wwawwa");
  EXPECT_EQ(of("exaone4", {{"sliding_window_pattern", "LG"}}), "wawawa");
  EXPECT_EQ(of("qwen2", {}), "aaaaaa");
  EXPECT_EQ(of("qwen2", {{"use_sliding_window", true}, {"max_window_layers", 4}}), "aaaaww");
  EXPECT_EQ(of("other", {{"use_sliding_window", false}}), "aaaaaa");
  const json types = {"full_attention",    "sliding_attention", "sliding_attention",
                      "sliding_attention", "full_attention",    "full_attention"};
  EXPECT_EQ(of("other", {{"layer_types", types}}), "awwwaa");
  EXPECT_EQ(of("gemma3n_text", {{"layer_types", types}, {"num_kv_shared_layers", 2}}), "awww--");
}

TEST(ParseModelShape, RefusesAWindowThatBindsNobodyKnowsWhom) {
  EXPECT_THAT(Refusal(With(Llama(), {{"model_type", "other"}, {"sliding_window", 64}})),
              HasSubstr("layer_types: expected which layers sliding_window binds"));
  const json types(6, "sliding_attention");
  EXPECT_THAT(Refusal(With(Llama(), {{"layer_types", types}})),
              HasSubstr("sliding_window: expected the window"));
}

TEST(ParseModelShape, ChunksAreOfLayersWithRotaryEmbedding) {
  const json chunks = {{"attention_chunk_size", 8192}};
  EXPECT_EQ(Layers(With(Llama(), chunks)), "cccacc");
  EXPECT_EQ(Layers(With(With(Llama(), chunks), {{"no_rope_layers", {1, 0, 1, 0, 1, 0}}})),
            "cacaca");
  EXPECT_THAT(Refusal(With(With(Llama(), chunks), {{"no_rope_layers", {1, 0}}})),
              HasSubstr("no_rope_layers"));
}

TEST(ParseModelShape, RecurrentLayersAreListedInManyWays) {
  const json mamba = {{"mamba_d_state", 16}, {"mamba_expand", 2}};
  const auto of = [&](const json& changes) { return Layers(With(With(Llama(), mamba), changes)); };
  EXPECT_EQ(of({{"attn_layer_period", 3}, {"attn_layer_offset", 1}}), "rarrar");
  EXPECT_EQ(of({{"attn_layer_indices", {0, 5}}}), "arrrra");
  EXPECT_EQ(of({{"block_types", {"recurrent", "attention"}}}), "rarara");
  EXPECT_EQ(of({{"full_attention_interval", 3}}), "rrarra");
  EXPECT_EQ(of({{"layers_block_type", {"mamba", "mamba", "hybrid", "mamba", "mamba", "hybrid"}}}),
            "rrbrrb");
  EXPECT_EQ(of({{"hybrid_override_pattern", "M-M*-E"}}), "r-ra--");
  EXPECT_EQ(of({{"model_type", "falcon_h1"}}), "bbbbbb");
  EXPECT_EQ(of({{"attn_type_list", json(6, 1)}}), "aaaaaa");
  EXPECT_THAT(Refusal(With(Llama(), {{"attn_type_list", {1, 1, 1, 1, 1, 0}}})),
              HasSubstr("attn_type_list"));
}

TEST(ParseModelShape, RefusesListsThatAreNone) {
  const std::pair<const char*, json> refused[] = {{"layer_types", json::array({"full_attention"})},
                                                  {"layer_types", "full_attention"},
                                                  {"layers_block_type", json(6, 1)},
                                                  {"block_types", json::array()},
                                                  {"hybrid_override_pattern", "M*"},
                                                  {"hybrid_override_pattern", "MMMMMx"},
                                                  {"attn_layer_indices", json::array({6})},
                                                  {"attn_layer_indices", json::array({-1})},
                                                  {"attn_layer_period", 0}};
  for (const auto& [key, value] : refused) {
    EXPECT_THAT(Refusal(With(Llama(), {{key, value}})), HasSubstr(std::string(key) + ": expected"));
  }
  EXPECT_THAT(Refusal(With(Llama(), {{"layer_types", json(6, "lightning")}})),
              HasSubstr("full_attention, sliding_attention"));
}

TEST(ParseModelShape, NumbersThatJsonLacksAreNoSizes) {
  std::string text = With(Llama(), {{"note", "\"NaN"}, {"limit", {0, 1, 2}}}).dump();
  text.replace(text.find("[0,1,2]"), 7, "[NaN,-Infinity, Infinity]");
  const auto shape = ParseModelShape(text);
  ASSERT_TRUE(shape.ok()) << shape.status();
  EXPECT_EQ(shape->layers.size(), 6u);
  text.replace(text.find("4096"), 4, "Infinity");
  EXPECT_FALSE(ParseModelShape(text).ok());
}

TEST(ParseModelShape, StatesOfEachKindOfRecurrence) {
  const auto state = [](const json& config, int32_t ranks = 1) {
    return Groups(config, {.format = {}, .ranks = ranks}).front().state_bytes.count();
  };
  const json layers = {{"num_hidden_layers", 2}, {"hidden_size", 64}};
  const json mamba = With(layers, {{"model_type", "mamba"},
                                   {"intermediate_size", 128},
                                   {"state_size", 16},
                                   {"conv_kernel", 4}});
  EXPECT_EQ(state(mamba), 128 * (16 * 4 + 3 * 2));
  EXPECT_EQ(state(mamba, 4), 32 * (16 * 4 + 3 * 2));
  EXPECT_EQ(state(With(mamba, {{"mamba_ssm_dtype", "bfloat16"}})), 128 * (16 * 2 + 3 * 2));
  const json mamba2 = With(layers, {{"model_type", "mamba2"},
                                    {"num_heads", 8},
                                    {"head_dim", 16},
                                    {"n_groups", 2},
                                    {"state_size", 32},
                                    {"conv_kernel", 4}});
  EXPECT_EQ(state(mamba2), 8 * 16 * 32 * 4 + (8 * 16 + 2 * 2 * 32) * 3 * 2);
  EXPECT_EQ(state(mamba2, 2), state(mamba2) / 2);
  EXPECT_EQ(state(mamba2, 4), 2 * 16 * 32 * 4 + (2 * 16 + 2 * 32) * 3 * 2)
      << "two ranks have the same group";
  const json delta = With(layers, {{"layer_types", {"linear_attention", "linear_attention"}},
                                   {"linear_num_value_heads", 8},
                                   {"linear_num_key_heads", 4},
                                   {"linear_key_head_dim", 16},
                                   {"linear_value_head_dim", 32}});
  EXPECT_EQ(state(delta), 8 * 16 * 32 * 4 + (8 * 32 + 2 * 4 * 16) * 3 * 2);
  const json lru = With(layers, {{"layer_types", {"recurrent", "recurrent"}}, {"lru_width", 96}});
  EXPECT_EQ(state(lru), 96 * (4 + 3 * 2));
  const json conv = With(layers, {{"layer_types", {"conv", "conv"}}, {"conv_L_cache", 3}});
  EXPECT_EQ(state(conv), 64 * 2 * 2);
  EXPECT_THAT(Refusal(With(layers, {{"layer_types", {"linear_attention", "mamba"}}})),
              HasSubstr("expected an integer"));
}

TEST(ParseModelShape, RefusesWhatItCannotSize) {
  EXPECT_FALSE(ParseModelShape("").ok());
  EXPECT_FALSE(ParseModelShape("[]").ok());
  EXPECT_THAT(Refusal(json::object()), HasSubstr("num_hidden_layers"));
  EXPECT_THAT(Refusal(With(Llama(), {{"is_encoder_decoder", true}})),
              HasSubstr("is_encoder_decoder"));
  EXPECT_THAT(Refusal(With(Llama(), {{"block_configs", json::array()}})),
              HasSubstr("block_configs: expected none"));
  EXPECT_THAT(Refusal(With(Llama(), {{"num_key_value_heads", 5}})), HasSubstr("a divisor of"));
  EXPECT_THAT(Refusal(With(Llama(), {{"hidden_size", 100}})), HasSubstr("head_dim"));
  const json text = {{"text_config", {{"num_hidden_layers", 0}}}};
  EXPECT_THAT(Refusal(text), HasSubstr("its text model: num_hidden_layers"));
  EXPECT_FALSE(ParseModelShape(std::string(2 << 20, ' ')).ok());
}

TEST(ParseModelShape, BoundsEverySize) {
  for (const char* key : {"num_hidden_layers", "num_attention_heads", "num_key_value_heads",
                          "hidden_size", "head_dim", "max_position_embeddings"}) {
    for (const json& value : {json(0), json(-1), json(1.5), json("8"), json(int64_t{1} << 40),
                              json(~uint64_t{0}), json::array({1})}) {
      EXPECT_THAT(Refusal(With(Llama(), {{key, value}})),
                  HasSubstr(std::string(key) + ": expected"))
          << value;
    }
  }
}

TEST(KvGroups, LayersThatAreAlikeShareAGroup) {
  const json config = With(Llama(), {{"model_type", "gemma2"}, {"sliding_window", 64}});
  const std::vector<KvGroup> groups = Groups(config);
  ASSERT_EQ(groups.size(), 2u);
  EXPECT_EQ(groups[0].layers, 3);
  EXPECT_EQ(groups[0].reach, (KvReach{KvReach::Kind::kWindow, 64}));
  EXPECT_EQ(groups[1].layers, 3);
  EXPECT_EQ(groups[1].reach, KvReach());
}

TEST(KvGroups, RanksDivideHeadsAndKeepThoseTheyShare) {
  const auto heads = [](int32_t heads, int32_t kv_heads, int32_t ranks) {
    const json config =
        With(Llama(),
             {{"num_attention_heads", heads}, {"num_key_value_heads", kv_heads}, {"head_dim", 64}});
    return TokenBytes(config, {.format = {}, .ranks = ranks}).count() / 256;
  };
  EXPECT_EQ(heads(32, 8, 4), 2);
  EXPECT_EQ(heads(32, 8, 16), 1) << "two ranks each";
  EXPECT_EQ(heads(40, 10, 4), 3) << "ten query heads of a rank attend to parts of three groups";
  EXPECT_EQ(heads(12, 4, 6), 2) << "of two query heads, each the last or first of a group";
  EXPECT_EQ(heads(12, 2, 3), 2) << "the middle rank attends to both";
  const auto refused = KvGroups(Parsed(Llama()), {.format = {}, .ranks = 5});
  EXPECT_THAT(std::string(refused.status().message()),
              HasSubstr("num_attention_heads is 32, expected a multiple of 5"));
  EXPECT_FALSE(KvGroups(Parsed(Llama()), {.format = {}, .ranks = 0}).ok());
}

TEST(KvGroups, LatentVectorsAreOnEveryRank) {
  const json config = With(Llama(), {{"kv_lora_rank", 512},
                                     {"qk_rope_head_dim", 64},
                                     {"qk_nope_head_dim", 128},
                                     {"v_head_dim", 128}});
  EXPECT_EQ(TokenBytes(config, {.format = {}, .ranks = 8}), Bytes(1152));
}

TEST(KvGroups, QuantisedRowsBringTheirScales) {
  const auto bytes = [](absl::string_view format) {
    return TokenBytes(Llama(), {.format = *FindKvFormat(format)});
  };
  EXPECT_EQ(bytes("fp8_e4m3"), Bytes(2 * 8 * 128));
  EXPECT_EQ(bytes("int8"), Bytes(2 * 8 * (128 + 4)));
  EXPECT_EQ(bytes("nvfp4"), Bytes(2 * 8 * (64 + 8)));
}

}  // namespace
}  // namespace palimpsest
