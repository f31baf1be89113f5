// The tokens that `post_processor` of a tokenizer.json puts around a text.
#ifndef PALIMPSEST_COMMON_TEXT_POST_PROCESSOR_H_
#define PALIMPSEST_COMMON_TEXT_POST_PROCESSOR_H_

#include <vector>

#include "absl/status/statusor.h"
#include "common/ids.h"
#include "nlohmann/json_fwd.hpp"

namespace palimpsest {

struct PostProcessor {
  std::vector<TokenId> before;
  std::vector<TokenId> after;
};

// Takes the value of "post_processor", or nullptr where there is none. ids must be below
// `id_limit`.
absl::StatusOr<PostProcessor> PostProcessorFromJson(const nlohmann::json* json, TokenId id_limit);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_POST_PROCESSOR_H_
