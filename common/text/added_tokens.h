// The added tokens of a tokenizer.json: strings that are cut out of a text before anything else.
#ifndef PALIMPSEST_COMMON_TEXT_ADDED_TOKENS_H_
#define PALIMPSEST_COMMON_TEXT_ADDED_TOKENS_H_

#include <array>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"
#include "common/text/regex.h"
#include "nlohmann/json_fwd.hpp"

namespace palimpsest {

struct AddedToken {
  TokenId id = 0;
  std::string content;
  bool special = false;
  bool single_word = false;  // not where a letter, digit or underscore touches it
  bool lstrip = false;       // takes white space before it along
  bool rstrip = false;       // takes white space behind it along
  bool normalized = false;   // searched for in the normalized text
};

// Takes the value of "added_tokens", a list; ids must be below `id_limit`.
absl::StatusOr<std::vector<AddedToken>> ParseAddedTokens(const nlohmann::json& json,
                                                         TokenId id_limit);

// Finds tokens in a text: leftmost first, of those the longest. Immutable.
class AddedTokenMatcher {
 public:
  // Contents must not be empty and not repeat.
  static absl::StatusOr<AddedTokenMatcher> Create(std::vector<AddedToken> tokens);

  // Cuts `text`, which must be UTF-8, into pieces in order: calls `token` for each token found and
  // `rest` for each non-empty stretch between, all of them parts of `text`. A special token for
  // whose place `is_literal` holds is left in the text. Stops at the first error that `rest`
  // returns.
  absl::Status Split(absl::string_view text, absl::FunctionRef<bool(absl::string_view)> is_literal,
                     absl::FunctionRef<void(TokenId)> token,
                     absl::FunctionRef<absl::Status(absl::string_view)> rest) const;

 private:
  // A node of the tree of all contents.
  struct Node {
    int32_t token = -1;
    absl::flat_hash_map<char, int32_t> children;
  };

  AddedTokenMatcher(Regex word, Regex space) : word_(std::move(word)), space_(std::move(space)) {}

  // The longest token that begins at `pos`, or nullptr.
  const AddedToken* LongestAt(absl::string_view text, size_t pos) const;
  bool TouchesWord(absl::string_view text, size_t begin, size_t end) const;

  std::vector<AddedToken> tokens_;
  std::vector<Node> nodes_;
  std::array<bool, 256> begins_{};  // first bytes of contents
  Regex word_;                      // one character of a word
  Regex space_;                     // one white space character
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_ADDED_TOKENS_H_
