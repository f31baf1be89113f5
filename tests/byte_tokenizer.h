// The tokenizer of the tests' models: one token per byte, in the byte-to-character table of
// byte-level BPE, and no merges.
#ifndef PALIMPSEST_TESTS_BYTE_TOKENIZER_H_
#define PALIMPSEST_TESTS_BYTE_TOKENIZER_H_

#include <nlohmann/json.hpp>
#include <string>

namespace palimpsest {

// tokenizer.json.
inline std::string ByteTokenizerJson() {
  nlohmann::json vocab = nlohmann::json::object();
  int next = 256;
  for (int byte = 0; byte < 256; ++byte) {
    const bool printable =
        (byte >= '!' && byte <= '~') || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
    const int code = printable ? byte : next++;
    std::string text;
    if (code < 0x80) {
      text.push_back(static_cast<char>(code));
    } else {
      text.push_back(static_cast<char>(0xC0 | (code >> 6)));
      text.push_back(static_cast<char>(0x80 | (code & 0x3F)));
    }
    vocab[text] = byte;
  }
  return nlohmann::json{
      {"version", "1.0"},
      {"truncation", nullptr},
      {"padding", nullptr},
      {"added_tokens", nlohmann::json::array()},
      {"normalizer", nullptr},
      {"pre_tokenizer",
       {{"type", "ByteLevel"},
        {"add_prefix_space", false},
        {"trim_offsets", true},
        {"use_regex", false}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", nlohmann::json::array()}}}}
      .dump();
}

}  // namespace palimpsest

#endif  // PALIMPSEST_TESTS_BYTE_TOKENIZER_H_
