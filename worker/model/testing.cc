#include "worker/model/testing.h"

#include <algorithm>
#include <bit>
#include <cassert>
#include <cmath>
#include <fstream>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/model/float16.h"

namespace palimpsest {
namespace {

using nlohmann::json;

class RandomWeights {
 public:
  explicit RandomWeights(uint64_t seed) : state_(seed) {}

  // Uniform in center - spread .. center + spread.
  void Add(const std::string& name, std::vector<int64_t> shape, float center, float spread) {
    int64_t count = 1;
    for (const int64_t n : shape) count *= n;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = Exact(center + spread * Next());
    tensors_.push_back({name, std::move(shape), std::move(values)});
  }

  void Matrix(const std::string& name, int64_t rows, int64_t cols) {
    // A uniform number in -s .. s has variance s^2 / 3.
    Add(name, {rows, cols}, 0.0f, std::sqrt(3.0f / static_cast<float>(cols)));
  }
  void Vector(const std::string& name, int64_t size, float center) {
    Add(name, {size}, center, 0.25f);
  }

  std::vector<RandomTensor> Take() && { return std::move(tensors_); }

 private:
  // SplitMix64 (Steele, Lea, Flood 2014), as a number in -1 .. 1.
  float Next() {
    uint64_t z = state_ += 0x9e3779b97f4a7c15;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9;
    z = (z ^ (z >> 27)) * 0x94d049bb133111eb;
    z ^= z >> 31;
    return static_cast<float>(static_cast<int32_t>(z >> 40) - (1 << 23)) / (1 << 23);
  }

  // Rounded to bf16; what f16 would hold as a subnormal becomes 0.
  static float Exact(float value) {
    const float rounded = FloatFromBf16(Bf16FromFloat(value));
    return std::abs(rounded) < 0x1p-14f ? 0.0f : rounded;
  }

  uint64_t state_;
  std::vector<RandomTensor> tensors_;
};

// Of a number that f16 holds exactly as a normal number or as 0.
uint16_t F16FromExact(float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t magnitude = bits & 0x7fffffff;
  const uint32_t half = magnitude == 0 ? 0 : (magnitude >> 13) - ((127 - 15) << 10);
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | half);
}

template <typename T>
void AppendBytes(const T& value, std::string& out) {
  out.append(reinterpret_cast<const char*>(&value), sizeof(value));
}

void AppendData(const std::vector<float>& values, const std::string& dtype, std::string& out) {
  for (const float value : values) {
    if (dtype == "BF16") {
      AppendBytes(Bf16FromFloat(value), out);
    } else if (dtype == "F16") {
      AppendBytes(F16FromExact(value), out);
    } else {
      assert(dtype == "F32");
      AppendBytes(value, out);
    }
  }
}

absl::Status WriteFile(const std::string& path, const std::string& bytes) {
  std::ofstream file(path, std::ios::binary);
  file << bytes;
  file.close();
  return file ? absl::OkStatus() : absl::UnavailableError(path + ": cannot be written");
}

}  // namespace

ModelConfig TinyModelConfig() {
  ModelConfig config;
  config.architecture = "LlamaForCausalLM";
  config.num_layers = 2;
  config.hidden_size = 64;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 16;
  config.intermediate_size = 96;
  config.vocab_size = 320;
  config.max_position = 512;
  return config;
}

std::string ModelConfigJson(const ModelConfig& config) {
  json out = {{"architectures", {config.architecture}},
              {"num_hidden_layers", config.num_layers},
              {"hidden_size", config.hidden_size},
              {"num_attention_heads", config.num_heads},
              {"num_key_value_heads", config.num_kv_heads},
              {"head_dim", config.head_dim},
              {"intermediate_size", config.intermediate_size},
              {"vocab_size", config.vocab_size},
              {"max_position_embeddings", config.max_position},
              {"rms_norm_eps", config.rms_norm_eps},
              {"rope_theta", config.rope_theta},
              {"tie_word_embeddings", config.tie_word_embeddings},
              {"attention_bias", config.o_bias},
              {"mlp_bias", config.mlp_bias},
              {"sliding_window", nullptr},
              {"hidden_act", "silu"},
              {"eos_token_id", config.eos_token_ids}};
  if (config.bos_token_id.has_value()) out["bos_token_id"] = *config.bos_token_id;
  if (config.sliding_window.has_value()) {
    out["sliding_window"] = *config.sliding_window;
    out["use_sliding_window"] = true;
    out["max_window_layers"] = 0;
  }
  if (config.rope_scaling.has_value()) {
    const RopeScaling& scaling = *config.rope_scaling;
    out["rope_scaling"] = {{"factor", scaling.factor}, {"rope_type", "linear"}};
    if (scaling.kind == RopeScaling::Kind::kLlama3) {
      out["rope_scaling"] = {{"factor", scaling.factor},
                             {"rope_type", "llama3"},
                             {"low_freq_factor", scaling.low_freq_factor},
                             {"high_freq_factor", scaling.high_freq_factor},
                             {"original_max_position_embeddings", scaling.original_max_position}};
    }
  }
  return out.dump(2);
}

std::vector<RandomTensor> RandomTensors(const ModelConfig& config, uint64_t seed) {
  RandomWeights weights(seed);
  const int64_t hidden = config.hidden_size;
  const int64_t inner = config.intermediate_size;
  const int64_t q = int64_t{config.num_heads} * config.head_dim;
  const int64_t kv = int64_t{config.num_kv_heads} * config.head_dim;
  const auto linear = [&](const std::string& name, int64_t rows, int64_t cols, bool bias) {
    weights.Matrix(name + ".weight", rows, cols);
    if (bias) weights.Vector(name + ".bias", rows, 0.0f);
  };
  weights.Add("model.embed_tokens.weight", {config.vocab_size, hidden}, 0.0f, 1.5f);
  for (int32_t i = 0; i < config.num_layers; ++i) {
    const std::string layer = absl::StrCat("model.layers.", i);
    weights.Vector(layer + ".input_layernorm.weight", hidden, 1.0f);
    linear(layer + ".self_attn.q_proj", q, hidden, config.qkv_bias);
    linear(layer + ".self_attn.k_proj", kv, hidden, config.qkv_bias);
    linear(layer + ".self_attn.v_proj", kv, hidden, config.qkv_bias);
    linear(layer + ".self_attn.o_proj", hidden, q, config.o_bias);
    weights.Vector(layer + ".post_attention_layernorm.weight", hidden, 1.0f);
    linear(layer + ".mlp.gate_proj", inner, hidden, config.mlp_bias);
    linear(layer + ".mlp.up_proj", inner, hidden, config.mlp_bias);
    linear(layer + ".mlp.down_proj", hidden, inner, config.mlp_bias);
  }
  weights.Vector("model.norm.weight", hidden, 1.0f);
  if (!config.tie_word_embeddings) weights.Matrix("lm_head.weight", config.vocab_size, hidden);
  return std::move(weights).Take();
}

absl::Status WriteSafetensors(const std::string& path, const std::string& dtype,
                              const std::vector<RandomTensor>& tensors) {
  json header = {{"__metadata__", {{"format", "pt"}}}};
  std::string data;
  for (const RandomTensor& tensor : tensors) {
    const size_t begin = data.size();
    AppendData(tensor.values, dtype, data);
    header[tensor.name] = {
        {"dtype", dtype}, {"shape", tensor.shape}, {"data_offsets", {begin, data.size()}}};
  }
  const std::string text = header.dump();
  std::string bytes;
  AppendBytes(static_cast<uint64_t>(text.size()), bytes);
  return WriteFile(path, bytes + text + data);
}

absl::Status WriteRandomModel(const std::string& folder, const ModelConfig& config,
                              const RandomModelOptions& options) {
  absl::Status status = WriteFile(folder + "/config.json", ModelConfigJson(config));
  if (!status.ok()) return status;
  const std::vector<RandomTensor> tensors = RandomTensors(config, options.seed);
  if (options.shards <= 1) {
    return WriteSafetensors(folder + "/model.safetensors", options.dtype, tensors);
  }
  json weight_map = json::object();
  for (int shard = 0; shard < options.shards; ++shard) {
    const size_t begin = tensors.size() * shard / options.shards;
    const size_t end = tensors.size() * (shard + 1) / options.shards;
    const std::string file =
        absl::StrCat("model-", shard + 1, "-of-", options.shards, ".safetensors");
    for (size_t i = begin; i < end; ++i) weight_map[tensors[i].name] = file;
    status = WriteSafetensors(absl::StrCat(folder, "/", file), options.dtype,
                              {tensors.begin() + begin, tensors.begin() + end});
    if (!status.ok()) return status;
  }
  return WriteFile(folder + "/model.safetensors.index.json",
                   json({{"weight_map", weight_map}}).dump());
}

}  // namespace palimpsest
