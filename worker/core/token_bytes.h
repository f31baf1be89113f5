// What bytes a token stands for in the output text.
#ifndef PALIMPSEST_WORKER_CORE_TOKEN_BYTES_H_
#define PALIMPSEST_WORKER_CORE_TOKEN_BYTES_H_

#include "absl/strings/string_view.h"
#include "common/ids.h"

namespace palimpsest {

// Thread-safe.
class TokenBytes {
 public:
  virtual ~TokenBytes() = default;

  // Empty for tokens that are not text (special tokens) or outside the vocabulary. Valid as long as
  // the object.
  virtual absl::string_view BytesOf(TokenId token) const = 0;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_TOKEN_BYTES_H_
