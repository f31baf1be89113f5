#include "common/text/json_fields.h"

#include <fstream>

#include "absl/strings/str_cat.h"
#include "nlohmann/json.hpp"

namespace palimpsest {

using nlohmann::json;

absl::StatusOr<json> ParseJson(absl::string_view text, absl::string_view what) {
  try {
    return json::parse(text.begin(), text.end());
  } catch (const json::exception& error) {
    return absl::InvalidArgumentError(absl::StrCat(what, " is not JSON: ", error.what()));
  }
}

const json* FindMember(const json& json, absl::string_view key) {
  if (!json.is_object()) return nullptr;
  const auto member = json.find(std::string(key));
  return member == json.end() || member->is_null() ? nullptr : &*member;
}

absl::StatusOr<const json*> RequireMember(const json& json, absl::string_view key,
                                          absl::string_view where) {
  if (const auto* member = FindMember(json, key)) return member;
  return absl::InvalidArgumentError(absl::StrCat(where, " lacks \"", key, "\""));
}

absl::StatusOr<std::string> RequireString(const json& json, absl::string_view key,
                                          absl::string_view where) {
  const auto member = RequireMember(json, key, where);
  if (!member.ok()) return member.status();
  if ((*member)->is_string()) return (*member)->get<std::string>();
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", key, "\" of ", where, " must be a string, it is of type ", (*member)->type_name()));
}

absl::StatusOr<bool> BoolOr(const json& json, absl::string_view key, bool fallback,
                            absl::string_view where) {
  const auto* member = FindMember(json, key);
  if (member == nullptr) return fallback;
  if (member->is_boolean()) return member->get<bool>();
  return absl::InvalidArgumentError(absl::StrCat(
      "\"", key, "\" of ", where, " must be true or false, it is of type ", member->type_name()));
}

absl::StatusOr<int64_t> IntegerBelow(const json& json, int64_t limit, absl::string_view what) {
  if (json.is_number_integer() && (!json.is_number_unsigned() || json.get<uint64_t>() < limit)) {
    const auto value = json.get<int64_t>();
    if (value >= 0 && value < limit) return value;
  }
  return absl::InvalidArgumentError(
      absl::StrCat(what, " must be an integer in [0, ", limit, "), it is ",
                   json.is_structured() ? json.type_name() : json.dump()));
}

absl::StatusOr<std::string> ReadTextFile(const std::string& path, int64_t limit) {
  std::ifstream file(path, std::ios::binary | std::ios::ate);
  if (!file) return absl::NotFoundError(absl::StrCat("cannot open ", path));
  const std::streamoff size = file.tellg();
  if (size < 0 || size > limit) {
    return absl::InvalidArgumentError(
        absl::StrCat(path, " has ", size, " bytes, at most ", limit, " are read"));
  }
  std::string text(size, '\0');
  file.seekg(0);
  if (!file.read(text.data(), size)) return absl::DataLossError(absl::StrCat("cannot read ", path));
  return text;
}

}  // namespace palimpsest
