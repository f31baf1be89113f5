#include "tools/palctl/bench_shapes.h"

#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "common/file.h"

namespace palimpsest::palctl {
namespace {

using nlohmann::json;

struct Shape {
  const char* name;
  int layers, hidden, heads, kv_heads, intermediate, vocabulary;
  double rope_theta;
};

// Of the checkpoints' own config.json. A context of 8,192 for all, which no number depends on.
constexpr Shape kLlamas[] = {
    {"llama3-8b", 32, 4096, 32, 8, 14336, 128256, 500000},
    {"llama2-13b", 40, 5120, 40, 40, 13824, 32000, 10000},
    {"smollm2-135m", 30, 576, 9, 3, 1536, 49152, 100000},
    {"tiny", 4, 256, 4, 2, 768, 2048, 10000},
    {"small", 8, 256, 4, 4, 768, 2048, 10000},
};
constexpr int kContext = 8192;
struct OptShape {
  const char* name;
  int layers, hidden, heads;
};
constexpr OptShape kOpts[] = {
    {"opt-6.7b", 32, 4096, 32}, {"opt-13b", 40, 5120, 40}, {"opt-30b", 48, 7168, 56}};

json Llama(const Shape& shape) {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_act", "silu"},
          {"rms_norm_eps", 1e-5},
          {"tie_word_embeddings", false},
          {"torch_dtype", "bfloat16"},
          {"num_hidden_layers", shape.layers},
          {"hidden_size", shape.hidden},
          {"num_attention_heads", shape.heads},
          {"num_key_value_heads", shape.kv_heads},
          {"intermediate_size", shape.intermediate},
          {"vocab_size", shape.vocabulary},
          {"rope_theta", shape.rope_theta},
          {"max_position_embeddings", kContext},
          {"bos_token_id", 1},
          {"eos_token_id", 2}};
}

json Opt(const OptShape& shape) {
  return {{"architectures", {"OPTForCausalLM"}},
          {"model_type", "opt"},
          {"activation_function", "relu"},
          {"do_layer_norm_before", true},
          {"enable_bias", true},
          {"layer_norm_elementwise_affine", true},
          {"torch_dtype", "bfloat16"},
          {"num_hidden_layers", shape.layers},
          {"hidden_size", shape.hidden},
          {"word_embed_proj_dim", shape.hidden},
          {"num_attention_heads", shape.heads},
          {"ffn_dim", 4 * shape.hidden},
          {"vocab_size", 50272},
          {"max_position_embeddings", kContext},
          {"tie_word_embeddings", true},
          {"bos_token_id", 2},
          {"eos_token_id", 2}};
}

}  // namespace

std::vector<std::string> BenchShapes() {
  std::vector<std::string> names;
  for (const OptShape& shape : kOpts) names.push_back(shape.name);
  for (const Shape& shape : kLlamas) names.push_back(shape.name);
  return names;
}

absl::StatusOr<std::string> BenchShapeConfig(absl::string_view shape) {
  for (const OptShape& known : kOpts) {
    if (shape == known.name) return Opt(known).dump(1);
  }
  for (const Shape& known : kLlamas) {
    if (shape == known.name) return Llama(known).dump(1);
  }
  return absl::InvalidArgumentError(
      absl::StrCat("no shape '", shape, "': expected one of ", absl::StrJoin(BenchShapes(), ", ")));
}

absl::Status WriteBenchModel(const std::string& folder, absl::string_view config) {
  const json tokenizer = {
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", json::array()},
      {"normalizer", nullptr},
      {"pre_tokenizer",
       {{"type", "ByteLevel"},
        {"add_prefix_space", false},
        {"trim_offsets", true},
        {"use_regex", false}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", {{"a", 0}}}, {"merges", json::array()}}}};
  absl::Status status = WriteFileAtomically(folder + "/config.json", config);
  status.Update(WriteFileAtomically(folder + "/tokenizer.json", tokenizer.dump()));
  return status;
}

}  // namespace palimpsest::palctl
