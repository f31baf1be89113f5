// Reading of JSON objects that others wrote (config.json): typed, bounded, with errors that name
// the key.
#ifndef PALIMPSEST_COMMON_JSON_FIELDS_H_
#define PALIMPSEST_COMMON_JSON_FIELDS_H_

#include <algorithm>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "common/ids.h"

namespace palimpsest {

// Typed access to the keys of one JSON object. The first error sticks; later reads give defaults.
// A key that is absent or null counts as not given.
class JsonFields {
 public:
  JsonFields(std::string where, const nlohmann::json& object)
      : where_(std::move(where)), object_(object) {
    if (!object_.is_object()) {
      status_ = absl::InvalidArgumentError(absl::StrCat(where_, ": expected a JSON object"));
    }
  }

  const absl::Status& status() const { return status_; }

  void Fail(absl::string_view key, absl::string_view expected) {
    if (!status_.ok()) return;
    const nlohmann::json* value = Raw(key);
    std::string got = value == nullptr ? "nothing" : value->dump();
    if (got.size() > 80) got = got.substr(0, 77) + "...";
    status_ = absl::InvalidArgumentError(
        absl::StrCat(where_, ": ", key, ": expected ", expected, ", got ", got));
  }

  // The value as written (null included), or nullptr if the key is absent.
  const nlohmann::json* Raw(absl::string_view key) const {
    if (!object_.is_object()) return nullptr;
    auto it = object_.find(std::string(key));
    return it == object_.end() ? nullptr : &*it;
  }
  const nlohmann::json* Find(absl::string_view key) const {
    const nlohmann::json* value = Raw(key);
    return value == nullptr || value->is_null() ? nullptr : value;
  }

  int32_t Int(absl::string_view key, int64_t min, int64_t max) {
    return OptionalInt(key, min, max, /*required=*/true).value_or(min);
  }
  int32_t IntOr(absl::string_view key, int64_t min, int64_t max, int32_t fallback) {
    return OptionalInt(key, min, max, /*required=*/false).value_or(fallback);
  }

  std::optional<int32_t> OptionalInt(absl::string_view key, int64_t min, int64_t max,
                                     bool required = false) {
    const nlohmann::json* value = Find(key);
    if (value == nullptr && !required) return std::nullopt;
    if (value == nullptr || !InRange(*value, min, max)) {
      Fail(key, absl::StrCat("an integer from ", min, " to ", max));
      return std::nullopt;
    }
    return value->get<int32_t>();
  }

  double PositiveOr(absl::string_view key, double max, std::optional<double> fallback) {
    const nlohmann::json* value = Find(key);
    if (value == nullptr && fallback.has_value()) return *fallback;
    if (value == nullptr || !value->is_number() || !(value->get<double>() > 0) ||
        !(value->get<double>() <= max)) {
      Fail(key, absl::StrCat("a number above 0 and at most ", max));
      return 1.0;
    }
    return value->get<double>();
  }

  bool BoolOr(absl::string_view key, bool fallback) {
    const nlohmann::json* value = Find(key);
    if (value == nullptr) return fallback;
    if (!value->is_boolean()) {
      Fail(key, "true or false");
      return fallback;
    }
    return value->get<bool>();
  }

  std::string StringOr(absl::string_view key, absl::string_view fallback) {
    const nlohmann::json* value = Find(key);
    if (value == nullptr) return std::string(fallback);
    if (!value->is_string()) {
      Fail(key, "a string");
      return std::string(fallback);
    }
    return value->get<std::string>();
  }

  // One token id or a list of them, each within the vocabulary; appends those that are new.
  void AddTokens(absl::string_view key, int32_t vocab_size, std::vector<TokenId>& out) {
    const nlohmann::json* value = Find(key);
    if (value == nullptr) return;
    const nlohmann::json list = value->is_array() ? *value : nlohmann::json::array({*value});
    for (const nlohmann::json& id : list) {
      if (!InRange(id, 0, vocab_size - 1)) {
        return Fail(key, absl::StrCat("token ids from 0 to ", vocab_size - 1));
      }
      const TokenId token = id.get<TokenId>();
      if (std::find(out.begin(), out.end(), token) == out.end()) out.push_back(token);
    }
  }

 private:
  static bool InRange(const nlohmann::json& value, int64_t min, int64_t max) {
    if (value.is_number_unsigned()) {
      const uint64_t v = value.get<uint64_t>();
      return v <= static_cast<uint64_t>(max) && (min <= 0 || v >= static_cast<uint64_t>(min));
    }
    return value.is_number_integer() && value.get<int64_t>() >= min && value.get<int64_t>() <= max;
  }

  std::string where_;
  const nlohmann::json& object_;
  absl::Status status_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_JSON_FIELDS_H_
