#include "common/text/vocabulary.h"

#include "absl/strings/str_cat.h"
#include "common/text/byte_alphabet.h"
#include "common/text/json_fields.h"
#include "nlohmann/json.hpp"

namespace palimpsest {

using nlohmann::json;

absl::StatusOr<Vocabulary> Vocabulary::Create(const json& vocab,
                                              const std::vector<AddedToken>& added) {
  if (!vocab.is_object() || vocab.empty() || vocab.size() > kTokenIdLimit) {
    return absl::InvalidArgumentError(absl::StrCat(
        "\"vocab\" of the model must be an object of 1 to ", kTokenIdLimit, " tokens"));
  }
  Vocabulary result;
  for (const auto& [name, value] : vocab.items()) {
    const auto id = IntegerBelow(value, kTokenIdLimit, absl::StrCat("id of token \"", name, "\""));
    if (!id.ok()) return id.status();
    const absl::Status status = result.Add(name, *id, false);
    if (!status.ok()) return status;
    if (auto bytes = BytesOfAlphabet(name)) result.byte_level_.emplace_back(*std::move(bytes), *id);
  }
  for (const AddedToken& token : added) {
    const auto known = result.Find(token.content);
    if (!known) {
      const absl::Status status = result.Add(token.content, token.id, token.special);
      if (!status.ok()) return status;
    } else if (*known != token.id) {
      return absl::InvalidArgumentError(absl::StrCat("added token \"", token.content, "\" has id ",
                                                     token.id, ", but the vocabulary says ",
                                                     *known));
    }
    result.tokens_[token.id].special = token.special;
  }
  return result;
}

absl::Status Vocabulary::Add(absl::string_view name, TokenId id, bool special) {
  if (name.empty()) {
    return absl::InvalidArgumentError(absl::StrCat("token ", id, " has an empty name"));
  }
  if (id >= size()) tokens_.resize(id + 1);
  if (!tokens_[id].bytes.empty()) {
    return absl::InvalidArgumentError(
        absl::StrCat("id ", id, " is used twice, the second time by token \"", name, "\""));
  }
  // Names outside of the byte alphabet ("<|a b|>") stand for themselves, as in Hugging Face.
  tokens_[id] = {BytesOfAlphabet(name).value_or(std::string(name)), special};
  ids_.emplace(name, id);
  return absl::OkStatus();
}

std::optional<TokenId> Vocabulary::Find(absl::string_view name) const {
  const auto found = ids_.find(name);
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

}  // namespace palimpsest
