#include "common/text/detokenizer.h"

namespace palimpsest {

Detokenizer::Detokenizer(const Tokenizer* tokenizer, const std::vector<std::string>& stops)
    : tokenizer_(tokenizer), stops_(stops) {}

std::string Detokenizer::Push(TokenId id) {
  std::string text;
  const absl::string_view bytes = tokenizer_->OutputBytes(id);
  output_bytes_ += bytes.size();
  if (stops_.match()) return text;
  stops_.Push(bytes);
  held_.append(bytes.data(), bytes.size());
  const uint64_t certain = stops_.safe() - released_;
  utf8_.Push(absl::string_view(held_).substr(0, certain), &text);
  held_.erase(0, certain);
  released_ += certain;
  return text;
}

std::string Detokenizer::Finish() {
  std::string text;
  if (!stops_.match()) utf8_.Push(held_, &text);
  held_.clear();
  utf8_.Finish(&text);
  return text;
}

}  // namespace palimpsest
