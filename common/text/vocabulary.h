// All tokens of a tokenizer.json: names, ids and the bytes they stand for.
#ifndef PALIMPSEST_COMMON_TEXT_VOCABULARY_H_
#define PALIMPSEST_COMMON_TEXT_VOCABULARY_H_

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"
#include "common/text/added_tokens.h"
#include "nlohmann/json_fwd.hpp"

namespace palimpsest {

// Ids of a tokenizer.json are below this.
inline constexpr TokenId kTokenIdLimit = 1 << 20;

// Immutable. Ids need not be contiguous.
class Vocabulary {
 public:
  // Takes the value of "vocab" of the model, an object of names and ids, and the added tokens. An
  // added token that is in `vocab` too must have the same id there. InvalidArgument for ids that
  // are out of range or name two tokens.
  static absl::StatusOr<Vocabulary> Create(const nlohmann::json& vocab,
                                           const std::vector<AddedToken>& added);

  TokenId size() const { return tokens_.size(); }

  // Empty for ids of no token, out of range or not.
  absl::string_view Bytes(TokenId id) const {
    return Has(id) ? absl::string_view(tokens_[id].bytes) : absl::string_view();
  }
  bool IsSpecial(TokenId id) const { return Has(id) && tokens_[id].special; }
  std::optional<TokenId> Find(absl::string_view name) const;

  // The tokens of the model that are spelled in the byte alphabet: those that merging can make.
  const std::vector<std::pair<std::string, TokenId>>& byte_level() const { return byte_level_; }

 private:
  struct Token {
    std::string bytes;
    bool special = false;
  };

  bool Has(TokenId id) const { return id >= 0 && id < size(); }
  absl::Status Add(absl::string_view name, TokenId id, bool special);

  std::vector<Token> tokens_;
  absl::flat_hash_map<std::string, TokenId> ids_;
  std::vector<std::pair<std::string, TokenId>> byte_level_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_VOCABULARY_H_
