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
  enum class Kind { kLinear, kLlama3, kYarn };
  Kind kind = Kind::kLinear;
  double factor = 1.0;
  // kLlama3 only.
  double low_freq_factor = 1.0;
  double high_freq_factor = 4.0;
  // kLlama3 and kYarn.
  int32_t original_max_position = 8192;
  // kYarn only (Peng et al., arXiv:2309.00071): the pairs between beta_fast and beta_slow turns
  // within the original context are blended.
  double beta_fast = 32.0;
  double beta_slow = 1.0;
  bool truncate = true;             // the borders of the blend are whole pairs
  double magnitude = 1.0;           // multiplies cosines and sines
  double latent_score_scale = 1.0;  // multiplies the scores of latent attention (DeepSeek's mscale)
};

// Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434). The cache holds one vector per token
// and layer: the normed latent of kv_lora_rank numbers, then the rotated key of qk_rope_head_dim
// numbers that all heads share. A query head has qk_nope_head_dim numbers that meet the latent
// through the head's part of kv_b_proj, then qk_rope_head_dim rotated ones.
struct LatentAttention {
  int32_t q_lora_rank = 0;  // 0: queries are projected from the hidden state in one step
  int32_t kv_lora_rank = 0;
  int32_t qk_nope_head_dim = 0;
  int32_t qk_rope_head_dim = 0;
  int32_t v_head_dim = 0;
  // The checkpoint's rotary pairs are neighbours (2i, 2i + 1). Images always hold them as halves
  // (i, i + n/2), which gives the same scores.
  bool interleaved_pairs = true;

  int32_t cache_width() const { return kv_lora_rank + qk_rope_head_dim; }
};

enum class NormKind {
  kRms,    // x / sqrt(mean(x^2) + eps) * (offset + weight)
  kLayer,  // (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias
};

// How numbers of the KV cache are stored.
enum class KvDtype { kBf16, kFp8E4m3 };

// "bf16" and "fp8_e4m3"; InvalidArgument for any other name.
absl::string_view KvDtypeName(KvDtype dtype);
absl::StatusOr<KvDtype> ParseKvDtype(absl::string_view name);
constexpr int32_t KvElementBytes(KvDtype dtype) { return dtype == KvDtype::kFp8E4m3 ? 1 : 2; }

enum class Activation {
  kSiluGated,      // silu(gate) * up
  kGeluTanhGated,  // gelu(gate) * up, gelu in its tanh form
  kRelu,           // max(0, up): there is no gate
};

// A decoder, described by the parts it is made of. What the defaults leave is Llama: RMSNorm before
// attention and MLP, rotary embedding, grouped-query attention, gated SiLU MLP.
struct ModelConfig {
  std::string architecture;  // one of SupportedArchitectures()
  int32_t num_layers = 0;
  int32_t hidden_size = 0;
  int32_t num_heads = 0;
  int32_t num_kv_heads = 0;  // with latent attention 1: all heads share the cached vector
  int32_t head_dim = 0;      // of a query; with latent attention qk_nope + qk_rope
  int32_t intermediate_size = 0;
  int32_t vocab_size = 0;
  int32_t max_position = 0;    // longest sequence in tokens
  float rms_norm_eps = 1e-5f;  // of every norm, whatever its kind
  double rope_theta = 10000.0;
  std::optional<RopeScaling> rope_scaling;
  bool tie_word_embeddings = false;
  bool qkv_bias = false;
  bool o_bias = false;
  bool mlp_bias = false;
  // Of every layer: a token sees itself and the sliding_window - 1 before it; older KV is given up.
  std::optional<int32_t> sliding_window;
  // Of a model that mixes windowed layers with full ones: each layer's window, 0 for none. Empty
  // otherwise. All KV of such a model is kept: its layers form one group.
  std::vector<int32_t> layer_windows;
  std::optional<TokenId> bos_token_id;
  std::vector<TokenId> eos_token_ids;

  NormKind norm = NormKind::kRms;
  float norm_weight_offset = 0.0f;  // of kRms; Gemma: 1
  // Norms behind attention and MLP too, before their results join the residual stream (Gemma 2).
  bool post_norms = false;
  // RMS norm of each query and key head before rotation (Qwen3).
  bool qk_norm = false;
  Activation activation = Activation::kSiluGated;
  float embedding_scale = 1.0f;    // multiplies embeddings (Gemma)
  float logit_softcap = 0.0f;      // c > 0: logits become c tanh(x / c)
  float attention_softcap = 0.0f;  // likewise scores, after scaling
  // Scores are scaled by 1 / sqrt of this; none: of head_dim.
  std::optional<float> query_scalar;
  // Learned positions instead of rotary ones: row position + offset of a table is added to the
  // embedding (OPT: 2).
  std::optional<int32_t> position_table_offset;
  std::optional<LatentAttention> latent;

  // Not of config.json: chosen for a tenant, told by the image's manifest. Latent vectors are bf16
  // always.
  KvDtype kv_dtype = KvDtype::kBf16;

  // Above 1: this is what one of so many ranks of a tensor-parallel model computes, as RankConfig
  // (tensor_parallel.h) makes it. Heads, KV heads and intermediate size are the rank's; the other
  // sizes, vocab_size among them, are the model's.
  int32_t ranks = 1;

  bool gated() const { return activation != Activation::kRelu; }
  bool rotary() const { return !position_table_offset.has_value(); }
  // Numbers of a head that are rotated.
  int32_t rotary_dim() const { return latent ? latent->qk_rope_head_dim : head_dim; }
  // Numbers of a head's attention output.
  int32_t value_dim() const { return latent ? latent->v_head_dim : head_dim; }
  // Rows of lm_head: vocab_size, or a rank's share of it (tensor_parallel.h).
  int32_t head_rows() const;
  // Of a layer; INT32_MAX: none.
  int32_t WindowOf(int32_t layer) const;
  // What attention scores are multiplied by before the soft cap and the softmax.
  float AttentionScale() const;

  // KV of one token in one layer: keys and values of each KV head, or the latent vector.
  Bytes KvTokenBytes() const;
  // KV of `tokens` tokens over all layers.
  Bytes KvBytes(int64_t tokens) const;
};

// In the order in which they are listed to users.
std::vector<absl::string_view> SupportedArchitectures();

// Parses and validates config.json's text; `generation_config` (may be empty) adds eos ids. Every
// size is bounded, so that products of them cannot overflow. Errors name the key, what was expected
// and what came.
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view config_json,
                                             absl::string_view generation_config);

// Reads both files of a model folder.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& folder);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MODEL_MODEL_CONFIG_H_
