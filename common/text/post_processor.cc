#include "common/text/post_processor.h"

#include <string>

#include "absl/strings/str_cat.h"
#include "common/text/json_fields.h"
#include "nlohmann/json.hpp"

namespace palimpsest {

using nlohmann::json;

namespace {

constexpr size_t kMaxTemplateTokens = 1024;
constexpr absl::string_view kTemplate = "post_processor TemplateProcessing";

absl::Status AppendSpecialToken(const json& special_tokens, const std::string& name,
                                TokenId id_limit, std::vector<TokenId>* out) {
  const auto entry = RequireMember(special_tokens, name, "\"special_tokens\" of post_processor");
  if (!entry.ok()) return entry.status();
  const auto ids = RequireMember(**entry, "ids", absl::StrCat("special token \"", name, "\""));
  if (!ids.ok()) return ids.status();
  if (!(*ids)->is_array()) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"ids\" of special token \"", name, "\" must be a list"));
  }
  for (const auto& id : **ids) {
    const auto value = IntegerBelow(id, id_limit, "an id of post_processor");
    if (!value.ok()) return value.status();
    if (out->size() == kMaxTemplateTokens) {
      return absl::InvalidArgumentError(
          absl::StrCat(kTemplate, " adds more than ", kMaxTemplateTokens, " tokens"));
    }
    out->push_back(*value);
  }
  return absl::OkStatus();
}

absl::Status AddTemplate(const json& json, TokenId id_limit, PostProcessor* result) {
  const auto pieces = RequireMember(json, "single", kTemplate);
  if (!pieces.ok()) return pieces.status();
  if (!(*pieces)->is_array()) {
    return absl::InvalidArgumentError(absl::StrCat("\"single\" of ", kTemplate, " must be a list"));
  }
  int sequences = 0;
  for (const auto& piece : **pieces) {
    if (FindMember(piece, "Sequence") != nullptr) {
      ++sequences;
      continue;
    }
    const auto token = RequireMember(piece, "SpecialToken", absl::StrCat("a piece of ", kTemplate));
    if (!token.ok()) return token.status();
    const auto name = RequireString(**token, "id", absl::StrCat("a SpecialToken of ", kTemplate));
    if (!name.ok()) return name.status();
    const auto special_tokens = RequireMember(json, "special_tokens", kTemplate);
    if (!special_tokens.ok()) return special_tokens.status();
    const absl::Status status = AppendSpecialToken(
        **special_tokens, *name, id_limit, sequences == 0 ? &result->before : &result->after);
    if (!status.ok()) return status;
  }
  if (sequences != 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("\"single\" of ", kTemplate, " must name one Sequence, it names ", sequences));
  }
  return absl::OkStatus();
}

absl::Status AddStep(const json& json, TokenId id_limit, bool* has_template,
                     PostProcessor* result) {
  const auto type = RequireString(json, "type", "post_processor");
  if (!type.ok()) return type.status();
  if (*type == "ByteLevel") return absl::OkStatus();  // It changes offsets only.
  if (*type == "TemplateProcessing" && !*has_template) {
    *has_template = true;
    return AddTemplate(json, id_limit, result);
  }
  return absl::UnimplementedError(
      absl::StrCat("post_processor of type \"", *type,
                   "\" is not supported here (ByteLevel, one TemplateProcessing, and one Sequence "
                   "of these are)"));
}

}  // namespace

absl::StatusOr<PostProcessor> PostProcessorFromJson(const json* json, TokenId id_limit) {
  PostProcessor result;
  if (json == nullptr) return result;
  bool has_template = false;
  const auto type = RequireString(*json, "type", "post_processor");
  if (!type.ok()) return type.status();
  if (*type != "Sequence") {
    const absl::Status status = AddStep(*json, id_limit, &has_template, &result);
    if (!status.ok()) return status;
    return result;
  }
  const auto steps = RequireMember(*json, "processors", "post_processor Sequence");
  if (!steps.ok()) return steps.status();
  for (const auto& step : **steps) {
    const absl::Status status = AddStep(step, id_limit, &has_template, &result);
    if (!status.ok()) return status;
  }
  return result;
}

}  // namespace palimpsest
