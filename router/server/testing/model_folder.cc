#include "router/server/testing/model_folder.h"

#include <sys/stat.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>

namespace palimpsest::router::testing {
namespace {

using nlohmann::json;

// The printable character by which byte-level vocabularies write a byte.
std::string ByteName(int byte) {
  const auto printable = [](int b) {
    return (b >= '!' && b <= '~') || (b >= 0xA1 && b <= 0xAC) || (b >= 0xAE && b <= 0xFF);
  };
  int code = byte;
  if (!printable(byte)) {
    code = 256;
    for (int b = 0; b < byte; ++b) code += printable(b) ? 0 : 1;
  }
  if (code < 0x80) return std::string(1, static_cast<char>(code));
  return {static_cast<char>(0xC0 | (code >> 6)), static_cast<char>(0x80 | (code & 0x3F))};
}

json Tokenizer() {
  json vocabulary = json::object();
  for (int byte = 0; byte < 256; ++byte) vocabulary[ByteName(byte)] = byte;
  return {{"version", "1.0"},
          {"truncation", nullptr},
          {"padding", nullptr},
          {"added_tokens",
           {{{"id", kEndToken},
             {"content", "<|end|>"},
             {"single_word", false},
             {"lstrip", false},
             {"rstrip", false},
             {"normalized", false},
             {"special", true}}}},
          {"normalizer", nullptr},
          {"pre_tokenizer",
           {{"type", "ByteLevel"},
            {"add_prefix_space", false},
            {"trim_offsets", true},
            {"use_regex", false}}},
          {"post_processor", nullptr},
          {"decoder",
           {{"type", "ByteLevel"},
            {"add_prefix_space", true},
            {"trim_offsets", true},
            {"use_regex", true}}},
          {"model",
           {{"type", "BPE"},
            {"dropout", nullptr},
            {"unk_token", nullptr},
            {"continuing_subword_prefix", nullptr},
            {"end_of_word_suffix", nullptr},
            {"fuse_unk", false},
            {"byte_fallback", false},
            {"vocab", vocabulary},
            {"merges", json::array()}}}};
}

json Config() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"model_type", "llama"},
          {"hidden_act", "silu"},
          {"hidden_size", 64},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"intermediate_size", 128},
          {"vocab_size", kVocabSize},
          {"max_position_embeddings", kMaxPosition},
          {"rms_norm_eps", 1e-5},
          {"rope_theta", 10000.0},
          {"tie_word_embeddings", true},
          {"eos_token_id", kEndToken}};
}

}  // namespace

void WriteModelFolder(const std::string& folder) {
  std::ofstream(folder + "/tokenizer.json") << Tokenizer();
  std::ofstream(folder + "/config.json") << Config();
  std::ofstream(folder + "/tokenizer_config.json")
      << json({{"chat_template",
                "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<assistant>"}});
}

TempFolder::TempFolder() {
  const char* root = std::getenv("TEST_TMPDIR");
  path_ = std::string(root == nullptr ? "/tmp" : root) + "/palimpsest.XXXXXX";
  if (mkdtemp(path_.data()) == nullptr) std::abort();
}

TempFolder::~TempFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string TempFolder::Write(const std::string& name, const std::string& content) const {
  std::string path = path_ + "/" + name;
  std::ofstream(path) << content;
  chmod(path.c_str(), 0600);
  return path;
}

}  // namespace palimpsest::router::testing
