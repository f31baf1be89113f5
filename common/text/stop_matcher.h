// Streaming search for stop strings, across the borders of tokens.
#ifndef PALIMPSEST_COMMON_TEXT_STOP_MATCHER_H_
#define PALIMPSEST_COMMON_TEXT_STOP_MATCHER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace palimpsest {

// Finds the stop string that is complete first; among those that end at the same byte, the longest
// (it starts first). The result depends on the bytes alone, not on how they were cut. Linear time
// per stop string (Knuth, Morris and Pratt). Not thread-safe; copyable, so that a sequence can be
// forked.
class StopMatcher {
 public:
  struct Match {
    size_t stop_index;  // in the list given to the constructor
    uint64_t start;     // offsets in the whole stream
    uint64_t end;
  };

  // Empty strings in `stops` never match. No stops at all is fine: everything is safe at once.
  explicit StopMatcher(const std::vector<std::string>& stops);

  // Takes the next bytes of the stream. Bytes after a match are ignored, as are further calls.
  // Returns the match, once there is one.
  const std::optional<Match>& Push(absl::string_view bytes);

  const std::optional<Match>& match() const { return match_; }

  // Bytes from the start of the stream that cannot be part of a stop string any more; at a match,
  // its start. Never falls.
  uint64_t safe() const { return match_ ? match_->start : pushed_ - held_; }

  // Bytes at the end of the stream so far that may be the start of a stop string; 0 after a match.
  uint64_t held() const { return match_ ? 0 : held_; }

 private:
  struct Pattern {
    size_t index;
    std::string text;
    std::vector<uint32_t> border;  // border[i]: longest proper border of text[0, i]
    uint32_t matched = 0;          // longest prefix of text that ends the stream
  };

  std::vector<Pattern> patterns_;
  uint64_t pushed_ = 0;
  uint64_t held_ = 0;
  std::optional<Match> match_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_STOP_MATCHER_H_
