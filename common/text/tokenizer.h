// Byte-level BPE as described by a Hugging Face `tokenizer.json`.
//
// What is supported: model BPE (merges as "a b" or ["a", "b"], ignore_merges, unk_token); added
// tokens with all their flags; normalizer none or NFC; pre-tokenizers Split (Isolated, Removed),
// Digits, ByteLevel and Sequence of these; post-processors ByteLevel, TemplateProcessing and
// Sequence; decoder ByteLevel. Anything else in the file is refused, never ignored, but for
// `truncation` and `padding`: a server neither shortens nor pads a prompt.
#ifndef PALIMPSEST_COMMON_TEXT_TOKENIZER_H_
#define PALIMPSEST_COMMON_TEXT_TOKENIZER_H_

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"

namespace palimpsest {

// Bytes [begin, end) of a text.
struct TextRange {
  size_t begin;
  size_t end;
};

struct EncodeOptions {
  // Special tokens written out in the text ("<|im_end|>") become their ids. Where false they are
  // split like other text, so that text of a stranger cannot pose as a control token. Added tokens
  // that are not special are recognised either way.
  bool parse_special = true;
  // Adds what the post-processor's template adds, for most models a token that begins the text.
  // Chat templates write such tokens themselves.
  bool add_special = false;
  // Special tokens that touch one of these ranges of the text stay text, also with parse_special.
  // Sorted, not overlapping.
  std::vector<TextRange> literal;
};

// Immutable; all methods may be called from several threads at once. Nothing blocks.
class Tokenizer {
 public:
  // Parses the text of a tokenizer.json, which may be hostile: InvalidArgument says which part is
  // wrong, Unimplemented names a part that is not supported.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Parse(absl::string_view json);

  // Reads tokenizer.json of a model folder.
  static absl::StatusOr<std::unique_ptr<Tokenizer>> Load(const std::string& folder);

  ~Tokenizer();
  Tokenizer(const Tokenizer&) = delete;
  Tokenizer& operator=(const Tokenizer&) = delete;

  // The ids of `text`. Time is near-linear in its length, whatever it says. InvalidArgument if it
  // is not UTF-8; ResourceExhausted if a split pattern exceeds its backtracking limit.
  absl::StatusOr<std::vector<TokenId>> Encode(absl::string_view text,
                                              const EncodeOptions& options = {}) const;

  // The text of `ids` as Hugging Face decodes it: special tokens and unknown ids left out, broken
  // UTF-8 replaced by U+FFFD.
  std::string Decode(const std::vector<TokenId>& ids) const;

  // Largest id + 1. A model may have more rows than this.
  TokenId vocab_size() const;

  // The bytes that `id` stands for, perhaps a part of a character; empty for ids of no token. Valid
  // as long as the tokenizer.
  absl::string_view TokenBytes(TokenId id) const;

  // TokenBytes, but empty for special tokens: what `id` adds to an output's text. Stop strings are
  // searched for in this.
  absl::string_view OutputBytes(TokenId id) const;

  // Whether `id` is an added token marked special.
  bool IsSpecial(TokenId id) const;

  // The id of a token by its name in the file, for example "<|im_end|>".
  std::optional<TokenId> Find(absl::string_view name) const;

 private:
  struct Parts;
  explicit Tokenizer(std::unique_ptr<Parts> parts);

  std::unique_ptr<const Parts> parts_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_TOKENIZER_H_
