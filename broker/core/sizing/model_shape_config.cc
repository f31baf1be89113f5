// ParseModelShape: reading config.json.
#include <algorithm>
#include <initializer_list>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "broker/core/sizing/model_family.h"
#include "broker/core/sizing/model_layers.h"
#include "broker/core/sizing/model_shape.h"
#include "common/json_fields.h"
#include "common/json_text.h"

namespace palimpsest {
namespace {

using nlohmann::json;

constexpr size_t kMostConfigBytes = 1 << 20;
constexpr int64_t kMostLayers = 1024;
constexpr int64_t kMostHeads = 4096;
constexpr int64_t kMostHeadDim = 1 << 14;
constexpr int64_t kMostHidden = 1 << 20;
constexpr int64_t kMostState = 1 << 14;
constexpr int64_t kMostKernel = 256;
constexpr int64_t kMostPosition = 1 << 30;

using Names = std::initializer_list<absl::string_view>;

// By which of its names a config gives a size; the first one if by none.
absl::string_view Spelled(const JsonFields& fields, Names names) {
  for (const absl::string_view name : names) {
    if (fields.Find(name) != nullptr) return name;
  }
  return *names.begin();
}

constexpr Names kLayers = {"num_hidden_layers", "n_layer", "n_layers", "num_layers"};

// Python writes numbers that JSON does not have, such as the Infinity of a "time_step_limit". No
// size is one: they become null.
std::string WithoutNonNumbers(absl::string_view text) {
  std::string json;
  bool quoted = false;
  while (!text.empty()) {
    if (text.front() == '"') quoted = !quoted;
    const size_t escaped = quoted && text.front() == '\\' && text.size() > 1 ? 2 : 1;
    if (!quoted && (absl::ConsumePrefix(&text, "-Infinity") ||
                    absl::ConsumePrefix(&text, "Infinity") || absl::ConsumePrefix(&text, "NaN"))) {
      json += "null";
      continue;
    }
    json.append(text.data(), escaped);
    text.remove_prefix(escaped);
  }
  return json;
}

// The object that describes the text model of a multimodal one.
const json& TextModel(const json& config) {
  constexpr int kMostNested = 3;
  const json* model = &config;
  for (int depth = 0; depth < kMostNested && model->is_object(); ++depth) {
    const JsonFields fields("", *model);
    if (fields.Find(Spelled(fields, kLayers)) != nullptr) break;
    const json* nested = fields.Find(
        Spelled(fields, {"text_config", "llm_config", "language_config", "thinker_config"}));
    if (nested == nullptr || !nested->is_object()) break;
    model = nested;
  }
  return *model;
}

// Keys that make layers differ in ways that are not modelled here.
void RefuseUnknownLayers(JsonFields& fields) {
  for (const char* key :
       {"block_configs", "compress_ratios", "global_head_dim", "hybrid_layer_pattern",
        "linear_attn_config", "num_global_key_value_heads"}) {
    if (fields.Find(key) != nullptr) fields.Fail(key, "none (KV of such layers is not known)");
  }
  if (fields.BoolOr("is_encoder_decoder", false)) {
    fields.Fail("is_encoder_decoder", "false (only decoders have the KV that is sized here)");
  }
}

int32_t ReadKvHeads(JsonFields& fields, const ModelFamily& family, int32_t heads) {
  if (fields.BoolOr("multi_query", false) && !fields.BoolOr("new_decoder_architecture", false)) {
    return 1;
  }
  if (fields.BoolOr("multi_query_attention", false)) {
    return fields.Int("multi_query_group_num", 1, heads);
  }
  if (const json* nested = fields.Find("attn_config"); nested != nullptr && nested->is_object()) {
    JsonFields attention("config.json: attn_config", *nested);
    const int32_t kv_heads = attention.IntOr("kv_n_heads", 1, heads, heads);
    if (!attention.status().ok()) fields.Fail("attn_config", attention.status().message());
    return kv_heads;
  }
  const int32_t fallback = family.kv_heads > 0 ? std::min(family.kv_heads, heads) : heads;
  return fields.IntOr(Spelled(fields, {"num_key_value_heads", "num_kv_heads", "n_kv_heads"}), 1,
                      heads, fallback);
}

int32_t ReadHeadDim(JsonFields& fields, const ModelFamily& family, int32_t heads, int32_t hidden) {
  const absl::string_view key = Spelled(fields, {"head_dim", "attention_head_dim", "kv_channels"});
  if (fields.Find(key) != nullptr) return fields.Int(key, 1, kMostHeadDim);
  if (family.head_dim > 0) return family.head_dim;
  if (hidden == 0 || hidden % heads != 0 || hidden / heads > kMostHeadDim) {
    fields.Fail("head_dim",
                absl::StrCat("a value, since hidden_size / num_attention_heads = ", hidden, " / ",
                             heads, " is not a whole number up to ", kMostHeadDim));
    return 1;
  }
  return hidden / heads;
}

AttentionShape ReadAttention(JsonFields& fields, const ModelFamily& family, int32_t hidden) {
  AttentionShape shape;
  const absl::string_view heads = Spelled(fields, {"num_attention_heads", "n_head", "n_heads"});
  shape.heads = fields.Find(heads) == nullptr && family.heads > 0
                    ? family.heads
                    : fields.Int(heads, 1, kMostHeads);
  shape.index_dim = fields.IntOr("index_head_dim", 1, kMostHeadDim, 0);
  if (fields.Find("kv_lora_rank") != nullptr) {
    shape.kv_heads = 1;
    shape.latent_dim = fields.Int("kv_lora_rank", 1, kMostHeadDim) +
                       fields.Int("qk_rope_head_dim", 1, kMostHeadDim);
    shape.key_dim = fields.Int("qk_nope_head_dim", 1, kMostHeadDim);
    shape.value_dim = fields.IntOr("v_head_dim", 1, kMostHeadDim, shape.key_dim);
    return shape;
  }
  shape.kv_heads = ReadKvHeads(fields, family, shape.heads);
  if (shape.heads % shape.kv_heads != 0) {
    fields.Fail("num_key_value_heads",
                absl::StrCat("a divisor of num_attention_heads = ", shape.heads));
  }
  shape.key_dim = ReadHeadDim(fields, family, shape.heads, hidden);
  shape.value_dim = fields.IntOr("v_head_dim", 1, kMostHeadDim, shape.key_dim);
  return shape;
}

// Inputs before the present one that a convolution reads.
int64_t ConvInputs(JsonFields& fields, Names names, int32_t fallback) {
  return fields.IntOr(Spelled(fields, names), 1, kMostKernel, fallback) - 1;
}

void RequireWholeGroups(JsonFields& fields, absl::string_view key, const RecurrentShape& shape) {
  if (shape.heads % shape.groups != 0) {
    fields.Fail(key, absl::StrCat("a divisor of the number of heads, ", shape.heads));
  }
}

// Gated delta rule (Yang et al., arXiv:2412.06464): a matrix of key by value dimensions for each
// value head; queries, keys and values go through the convolution.
RecurrentShape ReadGatedDelta(JsonFields& fields) {
  RecurrentShape shape;
  shape.heads = fields.Int("linear_num_value_heads", 1, kMostHeads);
  shape.groups = fields.Int("linear_num_key_heads", 1, kMostHeads);
  RequireWholeGroups(fields, "linear_num_key_heads", shape);
  const int64_t key = fields.Int("linear_key_head_dim", 1, kMostHeadDim);
  const int64_t value = fields.Int("linear_value_head_dim", 1, kMostHeadDim);
  const int64_t inputs = ConvInputs(fields, {"linear_conv_kernel_dim"}, 4);
  shape.state_per_head = key * value;
  shape.conv_per_head = value * inputs;
  shape.conv_per_group = 2 * key * inputs;
  return shape;
}

// Mamba-2 (Dao and Gu, arXiv:2405.21060): B and C are shared by the heads of a group.
RecurrentShape ReadMamba2(JsonFields& fields) {
  RecurrentShape shape;
  const auto read = [&](Names names, int64_t most) {
    return fields.Int(Spelled(fields, names), 1, most);
  };
  shape.heads =
      read({"mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads"}, kMostHeads);
  const absl::string_view groups = Spelled(fields, {"mamba_n_groups", "mamba_ngroups", "n_groups"});
  shape.groups = fields.IntOr(groups, 1, kMostHeads, 1);
  RequireWholeGroups(fields, groups, shape);
  const int64_t dim =
      read({"mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim"}, kMostHeadDim);
  const int64_t state = read({"mamba_d_state", "ssm_state_size", "state_size"}, kMostState);
  const int64_t inputs = ConvInputs(fields, {"mamba_d_conv", "conv_kernel"}, 4);
  shape.state_per_head = dim * state;
  shape.conv_per_head = dim * inputs;
  shape.conv_per_group = 2 * state * inputs;
  return shape;
}

// One channel each: RG-LRU (De et al., arXiv:2402.19427), Mamba (Gu and Dao, arXiv:2312.00752), or
// a convolution alone.
RecurrentShape ReadChannels(JsonFields& fields, const ModelFamily& family, int32_t hidden) {
  RecurrentShape shape;
  if (family.name == "recurrentgemma" || fields.Find("lru_width") != nullptr) {
    shape.heads = fields.IntOr("lru_width", 1, kMostHidden, hidden);
    shape.state_per_head = 1;
    shape.conv_per_head = ConvInputs(fields, {"conv1d_width"}, 4);
  } else if (fields.Find("conv_L_cache") != nullptr) {
    shape.heads = hidden;
    shape.conv_per_head = ConvInputs(fields, {"conv_L_cache"}, 1);
  } else {
    const int64_t expand = fields.IntOr("mamba_expand", 1, 64, 0);
    shape.heads = expand > 0 ? static_cast<int32_t>(expand * hidden)
                             : fields.Int("intermediate_size", 1, kMostHidden);
    shape.state_per_head =
        fields.Int(Spelled(fields, {"mamba_d_state", "state_size"}), 1, kMostState);
    shape.conv_per_head = ConvInputs(fields, {"mamba_d_conv", "conv_kernel"}, 4);
  }
  return shape;
}

RecurrentShape ReadRecurrent(JsonFields& fields, const ModelFamily& family, int32_t hidden) {
  const absl::string_view mamba_heads =
      Spelled(fields, {"mamba_num_heads", "mamba_n_heads", "n_mamba_heads"});
  RecurrentShape shape;
  if (fields.Find("linear_num_value_heads") != nullptr) {
    shape = ReadGatedDelta(fields);
  } else if (family.name == "mamba2" || fields.Find(mamba_heads) != nullptr) {
    shape = ReadMamba2(fields);
  } else {
    shape = ReadChannels(fields, family, hidden);
  }
  const std::string dtype = fields.StringOr("mamba_ssm_dtype", "float32");
  if (dtype != "float32" && dtype != "bfloat16" && dtype != "float16") {
    fields.Fail("mamba_ssm_dtype", "\"float32\", \"bfloat16\" or \"float16\"");
  }
  shape.state_bytes = dtype == "float32" ? 4 : 2;
  return shape;
}

}  // namespace

absl::StatusOr<ModelShape> ParseModelShape(absl::string_view config_json) {
  auto document = ParseJson(WithoutNonNumbers(config_json.substr(0, kMostConfigBytes + 1)),
                            {.max_bytes = kMostConfigBytes});
  if (!document.ok()) {
    return absl::InvalidArgumentError(absl::StrCat("config.json: ", document.status().message()));
  }
  JsonFields whole("config.json", *document);
  RefuseUnknownLayers(whole);
  if (!whole.status().ok()) return whole.status();
  const json& text = TextModel(*document);
  JsonFields fields(&text == &*document ? "config.json" : "config.json, its text model", text);
  RefuseUnknownLayers(fields);
  const int32_t layers = fields.Int(Spelled(fields, kLayers), 1, kMostLayers);
  if (!fields.status().ok()) return fields.status();
  const bool named =
      fields.Find("model_type") != nullptr || fields.Find("architectures") != nullptr;
  const ModelFamily& family = FindModelFamily(named ? fields : whole);
  ModelShape model;
  model.model_type = (named ? fields : whole).StringOr("model_type", family.name);
  model.hidden_size = fields.IntOr(Spelled(fields, {"hidden_size", "n_embd", "n_embed", "d_model"}),
                                   1, kMostHidden, 0);
  model.max_position = fields.OptionalInt(
      Spelled(fields, {"max_position_embeddings", "n_positions", "max_seq_len", "seq_length"}), 1,
      kMostPosition);
  model.layers = ReadLayers(fields, family, layers);
  if (!fields.status().ok()) return fields.status();
  const auto any = [&model](bool LayerShape::*part) {
    return std::any_of(model.layers.begin(), model.layers.end(),
                       [part](const LayerShape& layer) { return layer.*part; });
  };
  if (any(&LayerShape::attention)) {
    model.attention = ReadAttention(fields, family, model.hidden_size);
  }
  if (any(&LayerShape::recurrent)) {
    if (model.hidden_size == 0) {
      fields.Fail("hidden_size", absl::StrCat("an integer from 1 to ", kMostHidden));
    }
    if (!fields.status().ok()) return fields.status();
    model.recurrent = ReadRecurrent(fields, family, model.hidden_size);
  }
  if (!fields.status().ok()) return fields.status();
  return model;
}

}  // namespace palimpsest
