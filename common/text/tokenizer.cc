#include "common/text/tokenizer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "common/text/added_tokens.h"
#include "common/text/bpe.h"
#include "common/text/json_fields.h"
#include "common/text/normalizer.h"
#include "common/text/post_processor.h"
#include "common/text/pre_tokenizer.h"
#include "common/text/utf8.h"
#include "common/text/vocabulary.h"
#include "nlohmann/json.hpp"

namespace palimpsest {

using nlohmann::json;

namespace {

constexpr int64_t kMaxFileBytes = 64 << 20;
constexpr size_t kMaxMerges = 1 << 22;

// The two names of a merge, written as "a b" or ["a", "b"].
absl::StatusOr<std::pair<std::string, std::string>> MergeNames(const json& json, size_t rank) {
  if (json.is_string()) {
    const auto& text = json.get_ref<const std::string&>();
    const size_t space = text.find(' ');
    if (space != std::string::npos && text.find(' ', space + 1) == std::string::npos) {
      return std::pair(text.substr(0, space), text.substr(space + 1));
    }
  } else if (json.is_array() && json.size() == 2 && json[0].is_string() && json[1].is_string()) {
    return std::pair(json[0].get<std::string>(), json[1].get<std::string>());
  }
  return absl::InvalidArgumentError(
      absl::StrCat("merge ", rank, " must be \"a b\" or [\"a\", \"b\"]"));
}

absl::StatusOr<std::vector<std::pair<TokenId, TokenId>>> ParseMerges(const json& merges,
                                                                     const Vocabulary& vocabulary) {
  if (!merges.is_array() || merges.size() > kMaxMerges) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"merges\" of the model must be a list of at most ", kMaxMerges));
  }
  std::vector<std::pair<TokenId, TokenId>> result;
  result.reserve(merges.size());
  for (const auto& merge : merges) {
    const auto names = MergeNames(merge, result.size());
    if (!names.ok()) return names.status();
    const auto left = vocabulary.Find(names->first);
    const auto right = vocabulary.Find(names->second);
    if (!left || !right) {
      return absl::InvalidArgumentError(absl::StrCat("merge ", result.size(), " joins \"",
                                                     names->first, "\" and \"", names->second,
                                                     "\", which are not both in the vocabulary"));
    }
    result.emplace_back(*left, *right);
  }
  return result;
}

// Refuses variants of BPE that give other ids.
absl::Status CheckVariant(const json& model) {
  const json* type = FindMember(model, "type");
  if (type != nullptr && *type != "BPE") {
    return absl::UnimplementedError(
        absl::StrCat("model of type ", type->dump(), " is not supported (\"BPE\" is)"));
  }
  const auto byte_fallback = BoolOr(model, "byte_fallback", false, "model");
  if (!byte_fallback.ok()) return byte_fallback.status();
  if (*byte_fallback) return absl::UnimplementedError("model with byte_fallback is not supported");
  for (const absl::string_view key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
    const json* affix = FindMember(model, key);
    if (affix == nullptr) continue;
    if (!affix->is_string() || !affix->get_ref<const std::string&>().empty()) {
      return absl::UnimplementedError(absl::StrCat("model with ", key, " is not supported"));
    }
  }
  const json* dropout = FindMember(model, "dropout");
  if (dropout != nullptr && *dropout != 0) {
    return absl::UnimplementedError("model with dropout is not supported");
  }
  return absl::OkStatus();
}

absl::Status CheckDecoder(const json& root) {
  const auto decoder = RequireMember(root, "decoder", "the tokenizer");
  if (!decoder.ok()) return decoder.status();
  const auto type = RequireString(**decoder, "type", "decoder");
  if (!type.ok()) return type.status();
  if (*type == "ByteLevel") return absl::OkStatus();
  return absl::UnimplementedError(
      absl::StrCat("decoder of type \"", *type, "\" is not supported (ByteLevel is)"));
}

absl::StatusOr<Bpe> ParseBpe(const json& model, const Vocabulary& vocabulary) {
  const auto merges_json = RequireMember(model, "merges", "model");
  if (!merges_json.ok()) return merges_json.status();
  const auto merges = ParseMerges(**merges_json, vocabulary);
  if (!merges.ok()) return merges.status();
  Bpe::Options options;
  const auto ignore_merges = BoolOr(model, "ignore_merges", false, "model");
  if (!ignore_merges.ok()) return ignore_merges.status();
  options.ignore_merges = *ignore_merges;
  const auto fuse_unknown = BoolOr(model, "fuse_unk", false, "model");
  if (!fuse_unknown.ok()) return fuse_unknown.status();
  options.fuse_unknown = *fuse_unknown;
  if (FindMember(model, "unk_token") != nullptr) {
    const auto name = RequireString(model, "unk_token", "model");
    if (!name.ok()) return name.status();
    options.unknown = vocabulary.Find(*name);
    if (!options.unknown) {
      return absl::InvalidArgumentError(
          absl::StrCat("unk_token \"", *name, "\" is not in the vocabulary"));
    }
  }
  return Bpe::Create(vocabulary.byte_level(), *merges, options);
}

// Whether special tokens at `place`, a part of `text`, stay text.
bool IsLiteral(absl::string_view text, absl::string_view place, const EncodeOptions& options) {
  if (!options.parse_special) return true;
  const size_t begin = place.data() - text.data();
  const auto range =
      std::upper_bound(options.literal.begin(), options.literal.end(), begin,
                       [](size_t offset, const TextRange& range) { return offset < range.end; });
  return range != options.literal.end() && range->begin < begin + place.size();
}

}  // namespace

struct Tokenizer::Parts {
  Vocabulary vocabulary;
  Bpe bpe;
  AddedTokenMatcher raw_added;
  AddedTokenMatcher normalized_added;
  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  PostProcessor post_processor;

  // Appends the ids of `rest`, a part of `text` without raw added tokens.
  absl::Status EncodeRest(absl::string_view text, absl::string_view rest,
                          const EncodeOptions& options, Bpe::Scratch& scratch,
                          std::vector<TokenId>& ids) const;
};

Tokenizer::Tokenizer(std::unique_ptr<Parts> parts) : parts_(std::move(parts)) {}
Tokenizer::~Tokenizer() = default;

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Parse(absl::string_view text) {
  const auto root = ParseJson(text, "the tokenizer");
  if (!root.ok()) return root.status();
  const auto model = RequireMember(*root, "model", "the tokenizer");
  if (!model.ok()) return model.status();
  if (const absl::Status status = CheckVariant(**model); !status.ok()) return status;
  if (const absl::Status status = CheckDecoder(*root); !status.ok()) return status;

  std::vector<AddedToken> raw, normalized;
  const json* added_json = FindMember(*root, "added_tokens");
  const auto added = ParseAddedTokens(added_json ? *added_json : json::array(), kTokenIdLimit);
  if (!added.ok()) return added.status();
  const auto vocab = RequireMember(**model, "vocab", "model");
  if (!vocab.ok()) return vocab.status();
  auto vocabulary = Vocabulary::Create(**vocab, *added);
  if (!vocabulary.ok()) return vocabulary.status();
  auto bpe = ParseBpe(**model, *vocabulary);
  if (!bpe.ok()) return bpe.status();

  const auto normalizer = NormalizerFromJson(FindMember(*root, "normalizer"));
  if (!normalizer.ok()) return normalizer.status();
  for (AddedToken token : *added) {
    if (!token.normalized) {
      raw.push_back(std::move(token));
      continue;
    }
    std::string storage;
    const auto content = Normalize(*normalizer, token.content, &storage);
    if (!content.ok()) return content.status();
    token.content = std::string(*content);
    normalized.push_back(std::move(token));
  }
  auto raw_added = AddedTokenMatcher::Create(std::move(raw));
  if (!raw_added.ok()) return raw_added.status();
  auto normalized_added = AddedTokenMatcher::Create(std::move(normalized));
  if (!normalized_added.ok()) return normalized_added.status();
  const auto pre_json = RequireMember(*root, "pre_tokenizer", "the tokenizer");
  if (!pre_json.ok()) return pre_json.status();
  auto pre_tokenizer = PreTokenizer::FromJson(**pre_json);
  if (!pre_tokenizer.ok()) return pre_tokenizer.status();
  auto post_processor =
      PostProcessorFromJson(FindMember(*root, "post_processor"), vocabulary->size());
  if (!post_processor.ok()) return post_processor.status();
  return std::unique_ptr<Tokenizer>(new Tokenizer(std::unique_ptr<Parts>(new Parts{
      *std::move(vocabulary), *std::move(bpe), *std::move(raw_added), *std::move(normalized_added),
      *normalizer, *std::move(pre_tokenizer), *std::move(post_processor)})));
}

absl::StatusOr<std::unique_ptr<Tokenizer>> Tokenizer::Load(const std::string& folder) {
  const std::string path = folder + "/tokenizer.json";
  const auto text = ReadTextFile(path, kMaxFileBytes);
  if (!text.ok()) return text.status();
  auto tokenizer = Parse(*text);
  if (tokenizer.ok()) return tokenizer;
  return absl::Status(tokenizer.status().code(),
                      absl::StrCat(path, ": ", tokenizer.status().message()));
}

absl::Status Tokenizer::Parts::EncodeRest(absl::string_view text, absl::string_view rest,
                                          const EncodeOptions& options, Bpe::Scratch& scratch,
                                          std::vector<TokenId>& ids) const {
  std::string storage;
  const auto normalized = Normalize(normalizer, rest, &storage);
  if (!normalized.ok()) return normalized.status();
  // Places in changed text cannot be told from each other: there, one literal makes all literal.
  const bool same = normalized->data() == rest.data();
  return normalized_added.Split(
      *normalized,
      [&](absl::string_view place) { return IsLiteral(text, same ? place : rest, options); },
      [&](TokenId id) { ids.push_back(id); },
      [&](absl::string_view words) {
        return pre_tokenizer.Split(words,
                                   [&](absl::string_view word) { bpe.Encode(word, scratch, ids); });
      });
}

absl::StatusOr<std::vector<TokenId>> Tokenizer::Encode(absl::string_view text,
                                                       const EncodeOptions& options) const {
  if (const absl::Status status = CheckUtf8(text, "text"); !status.ok()) return status;
  std::vector<TokenId> ids;
  ids.reserve(text.size() / 4 + 16);
  const PostProcessor& around = parts_->post_processor;
  if (options.add_special) ids.insert(ids.end(), around.before.begin(), around.before.end());
  Bpe::Scratch scratch;
  const absl::Status status = parts_->raw_added.Split(
      text, [&](absl::string_view place) { return IsLiteral(text, place, options); },
      [&](TokenId id) { ids.push_back(id); },
      [&](absl::string_view rest) {
        return parts_->EncodeRest(text, rest, options, scratch, ids);
      });
  if (!status.ok()) return status;
  if (options.add_special) ids.insert(ids.end(), around.after.begin(), around.after.end());
  return ids;
}

std::string Tokenizer::Decode(const std::vector<TokenId>& ids) const {
  std::string text;
  Utf8Repair repair;
  for (const TokenId id : ids) repair.Push(OutputBytes(id), &text);
  repair.Finish(&text);
  return text;
}

TokenId Tokenizer::vocab_size() const { return parts_->vocabulary.size(); }

absl::string_view Tokenizer::TokenBytes(TokenId id) const { return parts_->vocabulary.Bytes(id); }

absl::string_view Tokenizer::OutputBytes(TokenId id) const {
  return IsSpecial(id) ? absl::string_view() : TokenBytes(id);
}

bool Tokenizer::IsSpecial(TokenId id) const { return parts_->vocabulary.IsSpecial(id); }

std::optional<TokenId> Tokenizer::Find(absl::string_view name) const {
  return parts_->vocabulary.Find(name);
}

}  // namespace palimpsest
