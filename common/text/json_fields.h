// Reading fields of untrusted JSON, with errors that name the field.
#ifndef PALIMPSEST_COMMON_TEXT_JSON_FIELDS_H_
#define PALIMPSEST_COMMON_TEXT_JSON_FIELDS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json_fwd.hpp"

namespace palimpsest {

// Parses `text`; `what` names it in errors.
absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, absl::string_view what);

// The member `key` of an object, or nullptr if it is absent, null, or `json` is no object.
const nlohmann::json* FindMember(const nlohmann::json& json, absl::string_view key);

// The same, but absence is InvalidArgument. `where` names the object in errors.
absl::StatusOr<const nlohmann::json*> RequireMember(const nlohmann::json& json,
                                                    absl::string_view key, absl::string_view where);

absl::StatusOr<std::string> RequireString(const nlohmann::json& json, absl::string_view key,
                                          absl::string_view where);

// `fallback` if the member is absent or null; InvalidArgument if it is no boolean.
absl::StatusOr<bool> BoolOr(const nlohmann::json& json, absl::string_view key, bool fallback,
                            absl::string_view where);

// An integer in [0, limit).
absl::StatusOr<int64_t> IntegerBelow(const nlohmann::json& json, int64_t limit,
                                     absl::string_view what);

// Reads a whole file of at most `limit` bytes.
absl::StatusOr<std::string> ReadTextFile(const std::string& path, int64_t limit);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_JSON_FIELDS_H_
