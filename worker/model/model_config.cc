#include "worker/model/model_config.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "common/json_text.h"

namespace palimpsest {
namespace {

using nlohmann::json;

constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHidden = 1 << 17;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxIntermediate = 1 << 20;
constexpr int64_t kMaxVocab = 1 << 22;
constexpr int64_t kMaxPosition = 1 << 24;
constexpr size_t kMaxConfigBytes = 1 << 20;

// Typed access to the keys of one JSON object. The first error sticks; later reads give defaults.
// A key that is absent or null counts as not given.
class Fields {
 public:
  Fields(std::string where, const json& object) : where_(std::move(where)), object_(object) {
    if (!object_.is_object()) {
      status_ = absl::InvalidArgumentError(absl::StrCat(where_, ": expected a JSON object"));
    }
  }

  const absl::Status& status() const { return status_; }

  void Fail(absl::string_view key, absl::string_view expected) {
    if (!status_.ok()) return;
    const json* value = Raw(key);
    std::string got = value == nullptr ? "nothing" : value->dump();
    if (got.size() > 80) got = got.substr(0, 77) + "...";
    status_ = absl::InvalidArgumentError(
        absl::StrCat(where_, ": ", key, ": expected ", expected, ", got ", got));
  }

  // The value as written (null included), or nullptr if the key is absent.
  const json* Raw(absl::string_view key) const {
    if (!object_.is_object()) return nullptr;
    auto it = object_.find(std::string(key));
    return it == object_.end() ? nullptr : &*it;
  }
  const json* Find(absl::string_view key) const {
    const json* value = Raw(key);
    return value == nullptr || value->is_null() ? nullptr : value;
  }

  int32_t Int(absl::string_view key, int64_t min, int64_t max) {
    return OptionalInt(key, min, max, /*required=*/true).value_or(min);
  }
  int32_t IntOr(absl::string_view key, int64_t min, int64_t max, int32_t fallback) {
    return OptionalInt(key, min, max, /*required=*/false).value_or(fallback);
  }

  std::optional<int32_t> OptionalInt(absl::string_view key, int64_t min, int64_t max,
                                     bool required = false) {
    const json* value = Find(key);
    if (value == nullptr && !required) return std::nullopt;
    if (value == nullptr || !InRange(*value, min, max)) {
      Fail(key, absl::StrCat("an integer from ", min, " to ", max));
      return std::nullopt;
    }
    return value->get<int32_t>();
  }

  double PositiveOr(absl::string_view key, double max, std::optional<double> fallback) {
    const json* value = Find(key);
    if (value == nullptr && fallback.has_value()) return *fallback;
    if (value == nullptr || !value->is_number() || !(value->get<double>() > 0) ||
        !(value->get<double>() <= max)) {
      Fail(key, absl::StrCat("a number above 0 and at most ", max));
      return 1.0;
    }
    return value->get<double>();
  }

  bool BoolOr(absl::string_view key, bool fallback) {
    const json* value = Find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) {
      Fail(key, "true or false");
      return fallback;
    }
    return value->get<bool>();
  }

  std::string StringOr(absl::string_view key, absl::string_view fallback) {
    const json* value = Find(key);
    if (value == nullptr) return std::string(fallback);
    if (!value->is_string()) {
      Fail(key, "a string");
      return std::string(fallback);
    }
    return value->get<std::string>();
  }

  // One token id or a list of them, each within the vocabulary; appends those that are new.
  void AddTokens(absl::string_view key, int32_t vocab_size, std::vector<TokenId>& out) {
    const json* value = Find(key);
    if (value == nullptr) return;
    const json list = value->is_array() ? *value : json::array({*value});
    for (const json& id : list) {
      if (!InRange(id, 0, vocab_size - 1)) {
        return Fail(key, absl::StrCat("token ids from 0 to ", vocab_size - 1));
      }
      const TokenId token = id.get<TokenId>();
      if (std::find(out.begin(), out.end(), token) == out.end()) out.push_back(token);
    }
  }

 private:
  static bool InRange(const json& value, int64_t min, int64_t max) {
    if (value.is_number_unsigned()) {
      const uint64_t v = value.get<uint64_t>();
      return v <= static_cast<uint64_t>(max) && (min <= 0 || v >= static_cast<uint64_t>(min));
    }
    return value.is_number_integer() && value.get<int64_t>() >= min && value.get<int64_t>() <= max;
  }

  std::string where_;
  const json& object_;
  absl::Status status_;
};

void ReadShape(Fields& fields, ModelConfig& config) {
  config.num_layers = fields.Int("num_hidden_layers", 1, kMaxLayers);
  config.hidden_size = fields.Int("hidden_size", 1, kMaxHidden);
  config.num_heads = fields.Int("num_attention_heads", 1, kMaxHeads);
  config.num_kv_heads =
      config.architecture == "LlamaForCausalLM"
          ? fields.IntOr("num_key_value_heads", 1, config.num_heads, config.num_heads)
          : fields.Int("num_key_value_heads", 1, config.num_heads);
  if (config.num_heads % config.num_kv_heads != 0) {
    fields.Fail("num_key_value_heads",
                absl::StrCat("a divisor of num_attention_heads = ", config.num_heads));
  }
  if (fields.Find("head_dim") != nullptr) {
    config.head_dim = fields.Int("head_dim", 1, kMaxHeadDim);
  } else if (config.hidden_size % config.num_heads != 0 ||
             config.hidden_size / config.num_heads > kMaxHeadDim) {
    fields.Fail("head_dim", absl::StrCat("a value, since hidden_size / num_attention_heads = ",
                                         config.hidden_size, " / ", config.num_heads,
                                         " is not a whole number up to ", kMaxHeadDim));
  } else {
    config.head_dim = config.hidden_size / config.num_heads;
  }
  if (config.head_dim % 2 != 0) {
    fields.Fail("head_dim",
                absl::StrCat("an even size for rotary embedding, not ", config.head_dim));
  }
  config.intermediate_size = fields.Int("intermediate_size", 1, kMaxIntermediate);
  config.vocab_size = fields.Int("vocab_size", 1, kMaxVocab);
  config.max_position = fields.Int("max_position_embeddings", 1, kMaxPosition);
  config.rms_norm_eps = static_cast<float>(fields.PositiveOr("rms_norm_eps", 1.0, 1e-6));
  config.tie_word_embeddings = fields.BoolOr("tie_word_embeddings", false);
}

// `rope` holds the parameters of one scaling: "rope_scaling", or "rope_parameters" as newer
// transformers write it.
void ReadScaling(Fields& rope, ModelConfig& config) {
  const std::string kind = rope.StringOr("rope_type", rope.StringOr("type", "default"));
  if (kind == "default") return;
  RopeScaling scaling;
  scaling.factor = rope.PositiveOr("factor", 1e6, std::nullopt);
  if (kind == "linear") {
    scaling.kind = RopeScaling::Kind::kLinear;
  } else if (kind == "llama3") {
    scaling.kind = RopeScaling::Kind::kLlama3;
    scaling.low_freq_factor = rope.PositiveOr("low_freq_factor", 1e6, std::nullopt);
    scaling.high_freq_factor = rope.PositiveOr("high_freq_factor", 1e6, std::nullopt);
    scaling.original_max_position = rope.Int("original_max_position_embeddings", 1, kMaxPosition);
    if (scaling.low_freq_factor >= scaling.high_freq_factor) {
      rope.Fail("high_freq_factor",
                absl::StrCat("more than low_freq_factor = ", scaling.low_freq_factor));
    }
  } else {
    rope.Fail(rope.Find("rope_type") != nullptr ? "rope_type" : "type",
              "\"default\", \"linear\" or \"llama3\" (no other scaling is supported)");
  }
  config.rope_scaling = scaling;
}

absl::Status ReadRope(Fields& fields, ModelConfig& config) {
  config.rope_theta = fields.PositiveOr("rope_theta", 1e12, 10000.0);
  const json* whole_head = fields.Find("partial_rotary_factor");
  if (whole_head != nullptr && *whole_head != 1) {
    fields.Fail("partial_rotary_factor", "1 (rotating part of a head is not supported)");
  }
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* object = fields.Find(key);
    if (object == nullptr) continue;
    Fields rope(absl::StrCat("config.json: ", key), *object);
    config.rope_theta = rope.PositiveOr("rope_theta", 1e12, config.rope_theta);
    ReadScaling(rope, config);
    if (!rope.status().ok()) return rope.status();
  }
  return fields.status();
}

// The per-layer kinds of attention, where the config lists them, must be `kind` throughout: a mix
// of full and windowed layers would need two groups of KV blocks.
void RequireLayerTypes(Fields& fields, const ModelConfig& config, absl::string_view kind) {
  const json* types = fields.Find("layer_types");
  if (types == nullptr) return;
  const bool same = types->is_array() && types->size() == config.num_layers &&
                    std::all_of(types->begin(), types->end(),
                                [&](const json& t) { return t == std::string(kind); });
  if (!same) {
    fields.Fail("layer_types", absl::StrCat(config.num_layers, " times \"", kind, "\""));
  }
}

void ReadWindow(Fields& fields, ModelConfig& config) {
  if (config.architecture == "MistralForCausalLM") {
    const bool null = fields.Raw("sliding_window") != nullptr && !fields.Find("sliding_window");
    if (!null) config.sliding_window = fields.IntOr("sliding_window", 1, kMaxPosition, 4096);
  } else if (config.architecture == "Qwen2ForCausalLM" &&
             fields.BoolOr("use_sliding_window", false)) {
    const int32_t full_layers = fields.IntOr("max_window_layers", 0, kMaxLayers, 28);
    if (full_layers == 0) {
      config.sliding_window = fields.IntOr("sliding_window", 1, kMaxPosition, 4096);
    } else if (full_layers < config.num_layers) {
      fields.Fail("max_window_layers",
                  absl::StrCat("0, or at least num_hidden_layers = ", config.num_layers,
                               " (a mix of full and sliding-window layers is not supported)"));
    }
  }
  RequireLayerTypes(fields, config,
                    config.sliding_window.has_value() ? "sliding_attention" : "full_attention");
}

void ReadFeatures(Fields& fields, ModelConfig& config) {
  const json* architectures = fields.Find("architectures");
  if (architectures != nullptr && architectures->is_array() && architectures->size() == 1 &&
      (*architectures)[0].is_string()) {
    config.architecture = (*architectures)[0].get<std::string>();
  }
  if (config.architecture != "LlamaForCausalLM" && config.architecture != "Qwen2ForCausalLM" &&
      config.architecture != "MistralForCausalLM") {
    fields.Fail("architectures",
                R"(["LlamaForCausalLM"], ["Qwen2ForCausalLM"] or ["MistralForCausalLM"])");
  }
  if (fields.StringOr("hidden_act", "silu") != "silu") {
    fields.Fail("hidden_act", "\"silu\" (no other activation is supported)");
  }
  if (fields.Find("quantization_config") != nullptr) {
    fields.Fail("quantization_config", "none (only bf16, f16 and f32 weights are supported)");
  }
  if (config.architecture == "LlamaForCausalLM") {
    config.qkv_bias = config.o_bias = fields.BoolOr("attention_bias", false);
    config.mlp_bias = fields.BoolOr("mlp_bias", false);
  } else {
    config.qkv_bias = config.architecture == "Qwen2ForCausalLM";
  }
}

absl::StatusOr<json> ParseNamed(absl::string_view name, absl::string_view text) {
  auto document = ParseJson(text, {.max_bytes = kMaxConfigBytes});
  if (document.ok()) return document;
  return absl::InvalidArgumentError(absl::StrCat(name, ": ", document.status().message()));
}

absl::StatusOr<std::string> ReadText(const std::filesystem::path& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) return absl::NotFoundError(absl::StrCat(path.string(), ": cannot be opened"));
  std::string text(kMaxConfigBytes + 1, '\0');
  file.read(text.data(), static_cast<std::streamsize>(text.size()));
  if (file.bad()) return absl::UnavailableError(absl::StrCat(path.string(), ": cannot be read"));
  text.resize(static_cast<size_t>(file.gcount()));
  return text;
}

}  // namespace

Bytes ModelConfig::KvBytes(int64_t tokens) const {
  constexpr int64_t kKeyAndValue = 2;
  constexpr int64_t kBf16Bytes = 2;
  return Bytes(kKeyAndValue * kBf16Bytes * num_kv_heads * head_dim * num_layers) * tokens;
}

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view config_json,
                                             absl::string_view generation_config) {
  auto document = ParseNamed("config.json", config_json);
  if (!document.ok()) return document.status();
  Fields fields("config.json", *document);
  ModelConfig config;
  ReadFeatures(fields, config);
  ReadShape(fields, config);
  if (!fields.status().ok()) return fields.status();
  ReadWindow(fields, config);
  if (absl::Status status = ReadRope(fields, config); !status.ok()) return status;
  config.bos_token_id = fields.OptionalInt("bos_token_id", 0, config.vocab_size - 1);
  fields.AddTokens("eos_token_id", config.vocab_size, config.eos_token_ids);
  if (!fields.status().ok()) return fields.status();
  if (!generation_config.empty()) {
    auto generation = ParseNamed("generation_config.json", generation_config);
    if (!generation.ok()) return generation.status();
    Fields extra("generation_config.json", *generation);
    extra.AddTokens("eos_token_id", config.vocab_size, config.eos_token_ids);
    if (!extra.status().ok()) return extra.status();
  }
  return config;
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder) {
  const std::filesystem::path base(folder);
  auto config = ReadText(base / "config.json");
  if (!config.ok()) return config.status();
  auto generation = ReadText(base / "generation_config.json");
  if (!generation.ok() && !absl::IsNotFound(generation.status())) return generation.status();
  auto parsed = ParseModelConfig(*config, generation.value_or(""));
  if (parsed.ok()) return parsed;
  return absl::Status(parsed.status().code(),
                      absl::StrCat(folder, ": ", parsed.status().message()));
}

}  // namespace palimpsest
