// The shape of a model, read from a Hugging Face folder's config.json (and generation_config.json).
#ifndef PALIMPSEST_WORKER_MODEL_MODEL_CONFIG_H_
#define PALIMPSEST_WORKER_MODEL_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/bytes.h"
#include "common/ids.h"

namespace palimpsest {

// Scaling of rotary frequencies for long contexts ("rope_scaling" of config.json).
struct RopeScaling {
  enum class Kind { kLinear, kLlama3 };
  Kind kind = Kind::kLinear;
  double factor = 1.0;
  // kLlama3 only.
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  int32_t original_max_position = 8192;
};

// A decoder of the Llama family: RMSNorm, rotary embedding, grouped-query attention, gated SiLU
// MLP.
struct ModelConfig {
  std::string architecture;  // "LlamaForCausalLM", "Qwen2ForCausalLM", "MistralForCausalLM"
  int32_t num_layers = 0;
  int32_t hidden_size = 0;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;
  int32_t head_dim = 0;
  int32_t intermediate_size = 0;
  int32_t vocab_size = 0;
  int32_t max_position = 0;  // longest sequence in tokens
  float rms_norm_eps = 1e-5f;
  double rope_theta = 10000.0;
  std::optional<RopeScaling> rope_scaling;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  std::optional<int32_t>
      sliding_window;  // a token sees itself and the sliding_window - 1 before it
  std::optional<TokenId> bos_token_id;
  std::vector<TokenId> eos_token_ids;

  // KV bytes of `tokens` tokens over all layers: 2 (K and V) * num_kv_heads * head_dim * 2 (bf16)
  // per token and layer.
  Bytes KvBytes(int64_t tokens) const;
};

// Parses and validates config.json's text; `generation_config` (may be empty) adds eos ids. Every
// size is bounded, so that products of them cannot overflow. Errors name the key, what was expected
// and what came.
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view config_json,
                                             absl::string_view generation_config);

// Reads both files of a model folder.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_MODEL_CONFIG_H_
