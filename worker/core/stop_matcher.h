// Finds the first stop string in a stream of output bytes, wherever the borders of tokens fall.
// Remembers no more bytes than the longest stop string has. Not thread-safe.
#ifndef PALIMPSEST_WORKER_CORE_STOP_MATCHER_H_
#define PALIMPSEST_WORKER_CORE_STOP_MATCHER_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace palimpsest {

class StopMatcher {
 public:
  // `stops` must outlive the matcher; none of them is empty.
  explicit StopMatcher(const std::vector<std::string>* stops);

  // Appends the bytes of one token. If a stop string ends in them: how many bytes at the end of the
  // whole output lie behind the start of the one that starts first.
  std::optional<size_t> Append(absl::string_view bytes);

 private:
  const std::vector<std::string>* stops_;
  size_t longest_ = 0;
  std::string tail_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_STOP_MATCHER_H_
