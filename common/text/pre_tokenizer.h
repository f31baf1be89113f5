// Cuts a text into the words that byte pair encoding works on, as `pre_tokenizer` of a
// tokenizer.json says.
#ifndef PALIMPSEST_COMMON_TEXT_PRE_TOKENIZER_H_
#define PALIMPSEST_COMMON_TEXT_PRE_TOKENIZER_H_

#include <optional>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "common/text/regex.h"
#include "nlohmann/json_fwd.hpp"

namespace palimpsest {

// Immutable; Split may be called from several threads at once.
class PreTokenizer {
 public:
  // Takes the value of "pre_tokenizer". InvalidArgument or Unimplemented if it is wrong, of a kind
  // that is not supported, or lacks the ByteLevel step.
  static absl::StatusOr<PreTokenizer> FromJson(const nlohmann::json& json);

  // Calls `word` for each word of `text`, which must be UTF-8, in order.
  absl::Status Split(absl::string_view text, absl::FunctionRef<void(absl::string_view)> word) const;

 private:
  struct Step {
    std::optional<Regex> pattern;
    bool invert = false;            // the pattern describes what lies between
    bool remove = false;            // drop the separators
    bool add_prefix_space = false;  // before the step, a space where a text does not begin with one
  };
  class Run;

  absl::Status AddSteps(const nlohmann::json& json, int depth);
  absl::Status AddSplit(const nlohmann::json& json);
  absl::Status AddDigits(const nlohmann::json& json);
  absl::Status AddByteLevel(const nlohmann::json& json);

  std::vector<Step> steps_;
  bool byte_level_ = false;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_PRE_TOKENIZER_H_
