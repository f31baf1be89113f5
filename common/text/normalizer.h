// Unicode normalization, as `normalizer` of a tokenizer.json says.
#ifndef PALIMPSEST_COMMON_TEXT_NORMALIZER_H_
#define PALIMPSEST_COMMON_TEXT_NORMALIZER_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "nlohmann/json_fwd.hpp"

namespace palimpsest {

enum class Normalizer { kNone, kNfc };

// Takes the value of "normalizer", or nullptr where there is none. Unimplemented for other kinds
// than NFC and Sequence of NFC.
absl::StatusOr<Normalizer> NormalizerFromJson(const nlohmann::json* json);

// `text` in the given form; it must be UTF-8. The result refers to `text` if that is in the form
// already, else to `storage`.
absl::StatusOr<absl::string_view> Normalize(Normalizer normalizer, absl::string_view text,
                                            std::string* storage);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_NORMALIZER_H_
