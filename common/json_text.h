// Parses JSON that comes from outside: bounded in size and depth, and without repeated keys, which
// the format leaves undefined and which let two readers of one file see different things.
#ifndef PALIMPSEST_COMMON_JSON_TEXT_H_
#define PALIMPSEST_COMMON_JSON_TEXT_H_

#include <cstddef>
#include <nlohmann/json.hpp>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace palimpsest {

struct JsonLimits {
  size_t max_bytes = size_t{16} << 20;
  int max_depth = 32;
};

// InvalidArgument names the byte offset of the first error. Never throws.
absl::StatusOr<nlohmann::json> ParseJson(absl::string_view text, const JsonLimits& limits = {});

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_JSON_TEXT_H_
