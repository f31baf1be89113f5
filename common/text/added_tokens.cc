#include "common/text/added_tokens.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/str_cat.h"
#include "common/text/json_fields.h"
#include "nlohmann/json.hpp"

namespace palimpsest {

using nlohmann::json;

namespace {

constexpr size_t kMaxAddedTokens = 1 << 16;
constexpr size_t kMaxContentBytes = 1024;
constexpr size_t kMaxAllContentBytes = 1 << 22;

// The last character of `text`, the first one, or nothing.
absl::string_view LastCharacter(absl::string_view text) {
  size_t pos = text.size();
  while (pos > 0 && (static_cast<uint8_t>(text[--pos]) & 0xC0) == 0x80) {
  }
  return text.substr(pos);
}

absl::string_view FirstCharacter(absl::string_view text) {
  size_t end = text.empty() ? 0 : 1;
  while (end < text.size() && (static_cast<uint8_t>(text[end]) & 0xC0) == 0x80) ++end;
  return text.substr(0, end);
}

// Whether `character`, one or none, is in the class that `regex` describes.
bool Is(const Regex& regex, absl::string_view character) {
  Regex::Scratch scratch(regex);
  const auto match = regex.Find(character, 0, scratch);
  return match.ok() && match->has_value();
}

absl::StatusOr<AddedToken> ParseAddedToken(const json& json, TokenId id_limit) {
  constexpr absl::string_view kWhere = "an added token";
  AddedToken token;
  const auto id = RequireMember(json, "id", kWhere);
  if (!id.ok()) return id.status();
  const auto id_value = IntegerBelow(**id, id_limit, "\"id\" of an added token");
  if (!id_value.ok()) return id_value.status();
  token.id = *id_value;
  auto content = RequireString(json, "content", kWhere);
  if (!content.ok()) return content.status();
  token.content = *std::move(content);
  if (token.content.empty() || token.content.size() > kMaxContentBytes) {
    return absl::InvalidArgumentError(absl::StrCat("added token ", token.id, " has ",
                                                   token.content.size(), " bytes, 1 to ",
                                                   kMaxContentBytes, " are allowed"));
  }
  const std::pair<absl::string_view, bool*> flags[] = {{"special", &token.special},
                                                       {"single_word", &token.single_word},
                                                       {"lstrip", &token.lstrip},
                                                       {"rstrip", &token.rstrip},
                                                       {"normalized", &token.normalized}};
  for (const auto& [key, flag] : flags) {
    const auto value = BoolOr(json, key, false, kWhere);
    if (!value.ok()) return value.status();
    *flag = *value;
  }
  return token;
}

}  // namespace

absl::StatusOr<std::vector<AddedToken>> ParseAddedTokens(const json& json, TokenId id_limit) {
  if (!json.is_array() || json.size() > kMaxAddedTokens) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"added_tokens\" must be a list of at most ", kMaxAddedTokens, " entries"));
  }
  std::vector<AddedToken> tokens;
  absl::flat_hash_set<TokenId> ids;
  absl::flat_hash_set<std::string> contents;
  size_t all_bytes = 0;
  for (const auto& entry : json) {
    auto token = ParseAddedToken(entry, id_limit);
    if (!token.ok()) return token.status();
    all_bytes += token->content.size();
    if (all_bytes > kMaxAllContentBytes) {
      return absl::InvalidArgumentError(
          absl::StrCat("added tokens have more than ", kMaxAllContentBytes, " bytes together"));
    }
    if (!ids.insert(token->id).second || !contents.insert(token->content).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("added token ", token->id, " \"", token->content, "\" appears twice"));
    }
    tokens.push_back(*std::move(token));
  }
  return tokens;
}

absl::StatusOr<AddedTokenMatcher> AddedTokenMatcher::Create(std::vector<AddedToken> tokens) {
  auto word = Regex::Compile("[\\p{Alphabetic}\\p{M}\\p{Nd}\\p{Pc}\\x{200C}\\x{200D}]");
  if (!word.ok()) return word.status();
  auto space = Regex::Compile("\\s");
  if (!space.ok()) return space.status();
  AddedTokenMatcher matcher(*std::move(word), *std::move(space));
  matcher.tokens_ = std::move(tokens);
  matcher.nodes_.emplace_back();
  for (size_t i = 0; i < matcher.tokens_.size(); ++i) {
    const std::string& content = matcher.tokens_[i].content;
    matcher.begins_[static_cast<uint8_t>(content[0])] = true;
    int32_t node = 0;
    for (const char byte : content) {
      const auto [child, is_new] =
          matcher.nodes_[node].children.try_emplace(byte, matcher.nodes_.size());
      node = child->second;
      if (is_new) matcher.nodes_.emplace_back();
    }
    matcher.nodes_[node].token = i;
  }
  return matcher;
}

const AddedToken* AddedTokenMatcher::LongestAt(absl::string_view text, size_t pos) const {
  const AddedToken* longest = nullptr;
  for (int32_t node = 0; pos < text.size(); ++pos) {
    const auto child = nodes_[node].children.find(text[pos]);
    if (child == nodes_[node].children.end()) break;
    node = child->second;
    if (nodes_[node].token >= 0) longest = &tokens_[nodes_[node].token];
  }
  return longest;
}

bool AddedTokenMatcher::TouchesWord(absl::string_view text, size_t begin, size_t end) const {
  return Is(word_, LastCharacter(text.substr(0, begin))) ||
         Is(word_, FirstCharacter(text.substr(end)));
}

absl::Status AddedTokenMatcher::Split(
    absl::string_view text, absl::FunctionRef<bool(absl::string_view)> is_literal,
    absl::FunctionRef<void(TokenId)> token,
    absl::FunctionRef<absl::Status(absl::string_view)> rest) const {
  size_t done = 0;  // everything before it was reported
  size_t pos = 0;
  while (pos < text.size()) {
    const AddedToken* found = nullptr;
    if (begins_[static_cast<uint8_t>(text[pos])]) found = LongestAt(text, pos);
    if (found == nullptr) {
      ++pos;
      continue;
    }
    size_t begin = pos;
    size_t end = pos + found->content.size();
    pos = end;
    if (found->special && is_literal(text.substr(begin, end - begin))) continue;
    if (found->single_word && TouchesWord(text, begin, end)) continue;
    while (found->lstrip && begin > done) {
      const absl::string_view last = LastCharacter(text.substr(done, begin - done));
      if (!Is(space_, last)) break;
      begin -= last.size();
    }
    while (found->rstrip && end < text.size()) {
      const absl::string_view first = FirstCharacter(text.substr(end));
      if (!Is(space_, first)) break;
      end += first.size();
    }
    if (begin > done) {
      const absl::Status status = rest(text.substr(done, begin - done));
      if (!status.ok()) return status;
    }
    token(found->id);
    done = end;
    pos = std::max(pos, end);
  }
  return done < text.size() ? rest(text.substr(done)) : absl::OkStatus();
}

}  // namespace palimpsest
