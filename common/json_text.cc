#include "common/json_text.h"

#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

using nlohmann::json;

// Errors quote at most this many bytes of the text.
constexpr size_t kMaxQuote = 200;

// Walks the text without building anything, so that what is refused never costs memory.
class Checker final : public nlohmann::json_sax<json> {
 public:
  explicit Checker(int max_depth) : max_depth_(max_depth) {}

  const std::string& error() const { return error_; }

  bool null() override { return true; }
  bool boolean(bool) override { return true; }
  bool number_integer(number_integer_t) override { return true; }
  bool number_unsigned(number_unsigned_t) override { return true; }
  bool number_float(number_float_t, const string_t&) override { return true; }
  bool string(string_t&) override { return true; }
  bool binary(binary_t&) override { return true; }
  bool start_object(size_t) override { return Enter(); }
  bool end_object() override { return Leave(); }
  bool start_array(size_t) override { return Enter(); }
  bool end_array() override { return Leave(); }

  bool key(string_t& key) override {
    if (keys_.back().insert(key).second) return true;
    error_ = absl::StrCat("key \"", key.substr(0, kMaxQuote), "\" appears twice in one object");
    return false;
  }

  bool parse_error(size_t position, const std::string&,
                   const nlohmann::detail::exception& e) override {
    error_ =
        absl::StrCat("at byte ", position, ": ", absl::string_view(e.what()).substr(0, kMaxQuote));
    return false;
  }

 private:
  bool Enter() {
    keys_.emplace_back();
    if (keys_.size() <= static_cast<size_t>(max_depth_)) return true;
    error_ = absl::StrCat("nested deeper than ", max_depth_, " levels");
    return false;
  }
  bool Leave() {
    keys_.pop_back();
    return true;
  }

  const int max_depth_;
  std::vector<absl::flat_hash_set<std::string>> keys_;
  std::string error_;
};

}  // namespace

absl::StatusOr<json> ParseJson(absl::string_view text, const JsonLimits& limits) {
  if (text.size() > limits.max_bytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("JSON of ", text.size(), " bytes, expected at most ", limits.max_bytes));
  }
  Checker checker(limits.max_depth);
  if (!json::sax_parse(text.begin(), text.end(), &checker)) {
    return absl::InvalidArgumentError(absl::StrCat("not valid JSON: ", checker.error()));
  }
  return json::parse(text.begin(), text.end(), nullptr, /*allow_exceptions=*/false);
}

}  // namespace palimpsest
