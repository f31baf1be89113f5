#include "worker/model/model_config.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/json_fields.h"
#include "common/json_text.h"
#include "common/kv_format.h"

namespace palimpsest {
namespace {

using nlohmann::json;

constexpr int64_t kMaxLayers = 1024;
constexpr int64_t kMaxHidden = 1 << 17;
constexpr int64_t kMaxHeads = 4096;
constexpr int64_t kMaxHeadDim = 1024;
constexpr int64_t kMaxLatent = 1 << 14;
// Latent attention's tensors are placed head by head (tensor_plan.h).
constexpr int32_t kMaxLatentHeads = 512;
constexpr int64_t kMaxIntermediate = 1 << 20;
constexpr int64_t kMaxVocab = 1 << 22;
constexpr int64_t kMaxPosition = 1 << 24;
constexpr double kMaxRopeNumber = 1e6;
constexpr double kMaxSoftcap = 1e6;
constexpr size_t kMaxConfigBytes = 1 << 20;

// torch.nn.LayerNorm's epsilon, which OPT leaves at its default.
constexpr float kLayerNormEpsilon = 1e-5f;
constexpr int32_t kOptPositionOffset = 2;

// What config.json's keys mean depends on the family.
struct Family {
  absl::string_view architecture;
  void (*read)(JsonFields&, ModelConfig&);
  absl::string_view intermediate_key = "intermediate_size";
  bool ties_by_default = false;
  std::optional<int32_t> head_dim = std::nullopt;  // where config.json leaves it out
};

void RequireActivation(JsonFields& fields, absl::string_view key, absl::string_view name) {
  if (fields.StringOr(key, name) != name) {
    fields.Fail(key, absl::StrCat("\"", name, "\" (no other activation is supported)"));
  }
}

void ReadHeads(JsonFields& fields, bool kv_heads_optional, ModelConfig& config) {
  config.num_kv_heads =
      kv_heads_optional ? fields.IntOr("num_key_value_heads", 1, config.num_heads, config.num_heads)
                        : fields.Int("num_key_value_heads", 1, config.num_heads);
  if (config.num_heads % config.num_kv_heads != 0) {
    fields.Fail("num_key_value_heads",
                absl::StrCat("a divisor of num_attention_heads = ", config.num_heads));
  }
}

// `window` of the layers for which `windowed` is true, unless "layer_types" says which.
template <typename Windowed>
void SetWindows(JsonFields& fields, std::optional<int32_t> window, Windowed windowed,
                ModelConfig& config) {
  std::vector<int32_t> windows(static_cast<size_t>(config.num_layers));
  for (int32_t i = 0; i < config.num_layers; ++i) {
    if (window.has_value() && windowed(i)) windows[static_cast<size_t>(i)] = *window;
  }
  if (const json* types = fields.Find("layer_types"); types != nullptr) {
    bool known = types->is_array() && types->size() == windows.size();
    for (size_t i = 0; known && i < windows.size(); ++i) {
      const bool sliding = (*types)[i] == "sliding_attention";
      known = (sliding && window.has_value()) || (*types)[i] == "full_attention";
      windows[i] = sliding ? window.value_or(0) : 0;
    }
    if (!known) {
      fields.Fail("layer_types",
                  absl::StrCat(config.num_layers, " times \"full_attention\"",
                               window.has_value() ? " or \"sliding_attention\"" : ""));
      return;
    }
  }
  const auto full = std::count(windows.begin(), windows.end(), 0);
  if (full == 0) {
    config.sliding_window = window;
  } else if (full < config.num_layers) {
    config.layer_windows = std::move(windows);
  }
}

void NoWindows(JsonFields& fields, ModelConfig& config) {
  SetWindows(
      fields, std::nullopt, [](int32_t) { return false; }, config);
}

void ReadLlama(JsonFields& fields, ModelConfig& config) {
  ReadHeads(fields, /*kv_heads_optional=*/true, config);
  RequireActivation(fields, "hidden_act", "silu");
  config.qkv_bias = config.o_bias = fields.BoolOr("attention_bias", false);
  config.mlp_bias = fields.BoolOr("mlp_bias", false);
  NoWindows(fields, config);
}

void ReadMistral(JsonFields& fields, ModelConfig& config) {
  ReadHeads(fields, /*kv_heads_optional=*/false, config);
  RequireActivation(fields, "hidden_act", "silu");
  std::optional<int32_t> window;
  const bool null = fields.Raw("sliding_window") != nullptr && !fields.Find("sliding_window");
  if (!null) window = fields.IntOr("sliding_window", 1, kMaxPosition, 4096);
  SetWindows(
      fields, window, [](int32_t) { return true; }, config);
}

// The first max_window_layers layers see everything.
void ReadQwenWindows(JsonFields& fields, ModelConfig& config) {
  if (!fields.BoolOr("use_sliding_window", false)) return NoWindows(fields, config);
  const int32_t full = fields.IntOr("max_window_layers", 0, kMaxLayers, 28);
  const int32_t window = fields.IntOr("sliding_window", 1, kMaxPosition, 4096);
  SetWindows(
      fields, window, [full](int32_t layer) { return layer >= full; }, config);
}

void ReadQwen2(JsonFields& fields, ModelConfig& config) {
  ReadHeads(fields, /*kv_heads_optional=*/false, config);
  RequireActivation(fields, "hidden_act", "silu");
  config.qkv_bias = true;
  ReadQwenWindows(fields, config);
}

void ReadQwen3(JsonFields& fields, ModelConfig& config) {
  ReadHeads(fields, /*kv_heads_optional=*/false, config);
  RequireActivation(fields, "hidden_act", "silu");
  config.qkv_bias = config.o_bias = fields.BoolOr("attention_bias", false);
  config.qk_norm = true;
  ReadQwenWindows(fields, config);
}

void ReadGemmaParts(JsonFields& fields, ModelConfig& config) {
  ReadHeads(fields, /*kv_heads_optional=*/false, config);
  // Early configs say "gelu" for models that were trained with the tanh form.
  if (fields.StringOr("hidden_act", "") != "gelu") {
    RequireActivation(fields, "hidden_act", "gelu_pytorch_tanh");
  }
  RequireActivation(fields, "hidden_activation", "gelu_pytorch_tanh");
  if (fields.BoolOr("use_bidirectional_attention", false)) {
    fields.Fail("use_bidirectional_attention", "false (attention here is causal)");
  }
  config.activation = Activation::kGeluTanhGated;
  config.norm_weight_offset = 1.0f;
  config.embedding_scale = std::sqrt(static_cast<float>(config.hidden_size));
  config.qkv_bias = config.o_bias = fields.BoolOr("attention_bias", false);
}

void ReadGemma(JsonFields& fields, ModelConfig& config) {
  ReadGemmaParts(fields, config);
  NoWindows(fields, config);
}

// Absent: `fallback`; null: none.
float ReadSoftcap(JsonFields& fields, absl::string_view key, double fallback) {
  const bool null = fields.Raw(key) != nullptr && fields.Find(key) == nullptr;
  return null ? 0.0f : static_cast<float>(fields.PositiveOr(key, kMaxSoftcap, fallback));
}

void ReadGemma2(JsonFields& fields, ModelConfig& config) {
  ReadGemmaParts(fields, config);
  config.post_norms = true;
  config.attention_softcap = ReadSoftcap(fields, "attn_logit_softcapping", 50.0);
  config.logit_softcap = ReadSoftcap(fields, "final_logit_softcapping", 30.0);
  config.query_scalar = static_cast<float>(fields.PositiveOr("query_pre_attn_scalar", 1e6, 256.0));
  SetWindows(
      fields, fields.IntOr("sliding_window", 1, kMaxPosition, 4096),
      [](int32_t layer) { return layer % 2 == 0; }, config);
}

void ReadOpt(JsonFields& fields, ModelConfig& config) {
  config.num_kv_heads = config.num_heads;
  RequireActivation(fields, "activation_function", "relu");
  const auto require = [&fields](absl::string_view key, bool value, absl::string_view why) {
    if (fields.BoolOr(key, value) != value) {
      fields.Fail(key, absl::StrCat(value ? "true" : "false", " (", why, ")"));
    }
  };
  require("do_layer_norm_before", true, "norms behind the residual sum are not supported");
  require("_remove_final_layer_norm", false, "the last norm is part of the model here");
  require("layer_norm_elementwise_affine", true, "norms without weights are not supported");
  if (fields.IntOr("word_embed_proj_dim", 1, kMaxHidden, config.hidden_size) !=
      config.hidden_size) {
    fields.Fail("word_embed_proj_dim", absl::StrCat("hidden_size = ", config.hidden_size,
                                                    " (projected embeddings are not supported)"));
  }
  config.norm = NormKind::kLayer;
  config.rms_norm_eps = kLayerNormEpsilon;
  config.activation = Activation::kRelu;
  config.position_table_offset = kOptPositionOffset;
  config.qkv_bias = config.o_bias = config.mlp_bias = fields.BoolOr("enable_bias", true);
  NoWindows(fields, config);
}

void RequireDenseLayers(JsonFields& fields, const ModelConfig& config) {
  const bool no_experts =
      fields.Raw("n_routed_experts") != nullptr && fields.Find("n_routed_experts") == nullptr;
  if (!no_experts && fields.IntOr("first_k_dense_replace", 0, kMaxLayers, 0) < config.num_layers) {
    fields.Fail("first_k_dense_replace",
                absl::StrCat("at least num_hidden_layers = ", config.num_layers,
                             " (layers with routed experts are not supported)"));
  }
}

void ReadDeepSeek(JsonFields& fields, ModelConfig& config) {
  RequireDenseLayers(fields, config);
  RequireActivation(fields, "hidden_act", "silu");
  if (config.num_heads > kMaxLatentHeads) {
    fields.Fail("num_attention_heads", absl::StrCat("at most ", kMaxLatentHeads));
  }
  for (const char* key : {"attention_bias", "mlp_bias"}) {
    if (fields.BoolOr(key, false)) fields.Fail(key, "false (latent attention has no biases here)");
  }
  LatentAttention latent;
  latent.q_lora_rank = fields.IntOr("q_lora_rank", 1, kMaxLatent, 0);
  latent.kv_lora_rank = fields.Int("kv_lora_rank", 1, kMaxLatent);
  latent.qk_nope_head_dim = fields.Int("qk_nope_head_dim", 1, kMaxHeadDim);
  latent.qk_rope_head_dim = fields.Int("qk_rope_head_dim", 1, kMaxHeadDim);
  latent.v_head_dim = fields.Int("v_head_dim", 1, kMaxHeadDim);
  latent.interleaved_pairs = fields.BoolOr("rope_interleave", true);
  config.num_kv_heads = 1;
  config.head_dim = latent.qk_nope_head_dim + latent.qk_rope_head_dim;
  config.latent = latent;
  NoWindows(fields, config);
}

constexpr Family kFamilies[] = {
    {"LlamaForCausalLM", ReadLlama},
    {"MistralForCausalLM", ReadMistral},
    {"Qwen2ForCausalLM", ReadQwen2},
    {"Qwen3ForCausalLM", ReadQwen3, "intermediate_size", false, 128},
    {"GemmaForCausalLM", ReadGemma, "intermediate_size", true, 256},
    {"Gemma2ForCausalLM", ReadGemma2, "intermediate_size", true, 256},
    {"OPTForCausalLM", ReadOpt, "ffn_dim", true},
    {"DeepseekV2ForCausalLM", ReadDeepSeek},
    {"DeepseekV3ForCausalLM", ReadDeepSeek},
};

const Family* FindFamily(JsonFields& fields) {
  const json* names = fields.Find("architectures");
  if (names != nullptr && names->is_array() && names->size() == 1) {
    for (const Family& family : kFamilies) {
      if ((*names)[0] == std::string(family.architecture)) return &family;
    }
  }
  fields.Fail("architectures",
              absl::StrCat("a list of one of ", absl::StrJoin(SupportedArchitectures(), ", ")));
  return nullptr;
}

void ReadHeadDim(JsonFields& fields, const Family& family, ModelConfig& config) {
  if (fields.Find("head_dim") != nullptr) {
    config.head_dim = fields.Int("head_dim", 1, kMaxHeadDim);
  } else if (family.head_dim.has_value()) {
    config.head_dim = *family.head_dim;
  } else if (config.hidden_size % config.num_heads != 0 ||
             config.hidden_size / config.num_heads > kMaxHeadDim) {
    fields.Fail("head_dim", absl::StrCat("a value, since hidden_size / num_attention_heads = ",
                                         config.hidden_size, " / ", config.num_heads,
                                         " is not a whole number up to ", kMaxHeadDim));
  } else {
    config.head_dim = config.hidden_size / config.num_heads;
  }
}

void ReadShape(JsonFields& fields, const Family& family, ModelConfig& config) {
  if (fields.Find("quantization_config") != nullptr) {
    fields.Fail("quantization_config", "none (only bf16, f16 and f32 weights are supported)");
  }
  config.num_layers = fields.Int("num_hidden_layers", 1, kMaxLayers);
  config.hidden_size = fields.Int("hidden_size", 1, kMaxHidden);
  config.num_heads = fields.Int("num_attention_heads", 1, kMaxHeads);
  config.intermediate_size = fields.Int(family.intermediate_key, 1, kMaxIntermediate);
  config.vocab_size = fields.Int("vocab_size", 1, kMaxVocab);
  config.max_position = fields.Int("max_position_embeddings", 1, kMaxPosition);
  config.rms_norm_eps = static_cast<float>(fields.PositiveOr("rms_norm_eps", 1.0, 1e-6));
  config.tie_word_embeddings = fields.BoolOr("tie_word_embeddings", family.ties_by_default);
}

// By how much YaRN raises scores that are spread over `factor` times the context.
double YarnMagnitude(double factor, double m) {
  return factor <= 1 ? 1.0 : 0.1 * m * std::log(factor) + 1.0;
}

void ReadYarn(JsonFields& rope, RopeScaling& scaling) {
  scaling.kind = RopeScaling::Kind::kYarn;
  scaling.original_max_position = rope.Int("original_max_position_embeddings", 1, kMaxPosition);
  scaling.beta_fast = rope.PositiveOr("beta_fast", kMaxRopeNumber, 32.0);
  scaling.beta_slow = rope.PositiveOr("beta_slow", kMaxRopeNumber, 1.0);
  scaling.truncate = rope.BoolOr("truncate", true);
  // 0, which some configs give, means absent.
  const auto number = [&rope](absl::string_view key) {
    const json* value = rope.Find(key);
    return value == nullptr || *value == 0 ? 0.0 : rope.PositiveOr(key, kMaxRopeNumber, 1.0);
  };
  const double m = number("mscale"), all = number("mscale_all_dim");
  const double ratio = m != 0 && all != 0
                           ? YarnMagnitude(scaling.factor, m) / YarnMagnitude(scaling.factor, all)
                           : YarnMagnitude(scaling.factor, 1);
  scaling.magnitude = rope.PositiveOr("attention_factor", kMaxRopeNumber, ratio);
  if (all != 0) {
    scaling.latent_score_scale =
        YarnMagnitude(scaling.factor, all) * YarnMagnitude(scaling.factor, all);
  }
}

// `rope` holds the parameters of one scaling: "rope_scaling", or "rope_parameters" as newer
// transformers write it.
void ReadScaling(JsonFields& rope, ModelConfig& config) {
  const std::string kind = rope.StringOr("rope_type", rope.StringOr("type", "default"));
  if (kind == "default") return;
  RopeScaling scaling;
  scaling.factor = rope.PositiveOr("factor", kMaxRopeNumber, std::nullopt);
  if (kind == "linear") {
    scaling.kind = RopeScaling::Kind::kLinear;
  } else if (kind == "llama3") {
    scaling.kind = RopeScaling::Kind::kLlama3;
    scaling.low_freq_factor = rope.PositiveOr("low_freq_factor", kMaxRopeNumber, std::nullopt);
    scaling.high_freq_factor = rope.PositiveOr("high_freq_factor", kMaxRopeNumber, std::nullopt);
    scaling.original_max_position = rope.Int("original_max_position_embeddings", 1, kMaxPosition);
    if (scaling.low_freq_factor >= scaling.high_freq_factor) {
      rope.Fail("high_freq_factor",
                absl::StrCat("more than low_freq_factor = ", scaling.low_freq_factor));
    }
  } else if (kind == "yarn") {
    ReadYarn(rope, scaling);
  } else {
    rope.Fail(rope.Find("rope_type") != nullptr ? "rope_type" : "type",
              "\"default\", \"linear\", \"llama3\" or \"yarn\" (no other scaling is supported)");
  }
  config.rope_scaling = scaling;
}

absl::Status ReadRope(JsonFields& fields, ModelConfig& config) {
  if (config.rotary_dim() % 2 != 0) {
    fields.Fail(config.latent ? "qk_rope_head_dim" : "head_dim",
                absl::StrCat("an even size for rotary embedding, not ", config.rotary_dim()));
  }
  config.rope_theta = fields.PositiveOr("rope_theta", 1e12, 10000.0);
  const json* whole_head = fields.Find("partial_rotary_factor");
  if (whole_head != nullptr && *whole_head != 1) {
    fields.Fail("partial_rotary_factor", "1 (rotating part of a head is not supported)");
  }
  for (const char* key : {"rope_scaling", "rope_parameters"}) {
    const json* object = fields.Find(key);
    if (object == nullptr) continue;
    JsonFields rope(absl::StrCat("config.json: ", key), *object);
    config.rope_theta = rope.PositiveOr("rope_theta", 1e12, config.rope_theta);
    ReadScaling(rope, config);
    if (!rope.status().ok()) return rope.status();
  }
  return fields.status();
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

std::vector<absl::string_view> SupportedArchitectures() {
  std::vector<absl::string_view> names;
  for (const Family& family : kFamilies) names.push_back(family.architecture);
  return names;
}

absl::string_view KvDtypeName(KvDtype dtype) {
  return dtype == KvDtype::kFp8E4m3 ? "fp8_e4m3" : "bf16";
}

absl::StatusOr<KvDtype> ParseKvDtype(absl::string_view name) {
  for (const KvDtype dtype : {KvDtype::kBf16, KvDtype::kFp8E4m3}) {
    if (name == KvDtypeName(dtype)) return dtype;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("kv_dtype: expected bf16 or fp8_e4m3, got '", name.substr(0, 80), "'"));
}

int32_t ModelConfig::WindowOf(int32_t layer) const {
  const int32_t window = layer_windows.empty() ? sliding_window.value_or(0)
                                               : layer_windows[static_cast<size_t>(layer)];
  return window == 0 ? INT32_MAX : window;
}

float ModelConfig::AttentionScale() const {
  const float scale = 1.0f / std::sqrt(query_scalar.value_or(static_cast<float>(head_dim)));
  const bool scaled = latent.has_value() && rope_scaling.has_value();
  return scaled ? scale * static_cast<float>(rope_scaling->latent_score_scale) : scale;
}

int32_t ModelConfig::head_rows() const {
  if (ranks == 1) return vocab_size;
  // So that the columns of every rank's logits start at an address that kernels like.
  constexpr int32_t kMultiple = 8;
  return (vocab_size + ranks * kMultiple - 1) / (ranks * kMultiple) * kMultiple;
}

Bytes ModelConfig::KvTokenBytes() const {
  constexpr int64_t kKeyAndValue = 2;
  const KvFormat format = {.bits = 8 * KvElementBytes(kv_dtype)};
  if (latent.has_value()) return format.RowBytes(latent->cache_width());
  return format.RowBytes(head_dim) * num_kv_heads * kKeyAndValue;
}

Bytes ModelConfig::KvBytes(int64_t tokens) const { return KvTokenBytes() * num_layers * tokens; }

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view config_json,
                                             absl::string_view generation_config) {
  auto document = ParseNamed("config.json", config_json);
  if (!document.ok()) return document.status();
  JsonFields fields("config.json", *document);
  const Family* family = FindFamily(fields);
  if (family == nullptr) return fields.status();
  ModelConfig config;
  config.architecture = std::string(family->architecture);
  ReadShape(fields, *family, config);
  if (!fields.status().ok()) return fields.status();
  family->read(fields, config);
  if (!config.latent.has_value()) ReadHeadDim(fields, *family, config);
  if (!fields.status().ok()) return fields.status();
  if (config.rotary()) {
    if (absl::Status status = ReadRope(fields, config); !status.ok()) return status;
  }
  config.bos_token_id = fields.OptionalInt("bos_token_id", 0, config.vocab_size - 1);
  fields.AddTokens("eos_token_id", config.vocab_size, config.eos_token_ids);
  if (!fields.status().ok()) return fields.status();
  if (!generation_config.empty()) {
    auto generation = ParseNamed("generation_config.json", generation_config);
    if (!generation.ok()) return generation.status();
    JsonFields extra("generation_config.json", *generation);
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
