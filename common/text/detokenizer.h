// Turns a stream of tokens into text that can be sent at once.
#ifndef PALIMPSEST_COMMON_TEXT_DETOKENIZER_H_
#define PALIMPSEST_COMMON_TEXT_DETOKENIZER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "common/ids.h"
#include "common/text/stop_matcher.h"
#include "common/text/tokenizer.h"
#include "common/text/utf8.h"

namespace palimpsest {

// Emits whole characters only: bytes of an unfinished character, and bytes that may be the start of
// a stop string, wait for the tokens to come. Special tokens add nothing. All pieces together are
// Tokenizer::Decode of all tokens, cut at the first stop string. Not thread-safe.
class Detokenizer {
 public:
  // `tokenizer` must outlive the object.
  explicit Detokenizer(const Tokenizer* tokenizer, const std::vector<std::string>& stops = {});

  // Takes the next token and returns the text that became certain, perhaps none. Nothing after a
  // stop string.
  std::string Push(TokenId id);

  // The output has ended: returns what was held back; an unfinished character becomes U+FFFD.
  // Nothing may be pushed after it.
  std::string Finish();

  // The stop string that was found, with offsets in the bytes of the output.
  const std::optional<StopMatcher::Match>& stop() const { return stops_.match(); }

  // Bytes of the output so far, before any replacement.
  uint64_t output_bytes() const { return output_bytes_; }

 private:
  const Tokenizer* tokenizer_;
  StopMatcher stops_;
  Utf8Repair utf8_;
  std::string held_;  // bytes from released_ on
  uint64_t released_ = 0;
  uint64_t output_bytes_ = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_DETOKENIZER_H_
