// A Unicode regular expression as tokenizers write them, compiled by PCRE2.
#ifndef PALIMPSEST_COMMON_TEXT_REGEX_H_
#define PALIMPSEST_COMMON_TEXT_REGEX_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace palimpsest {

// Immutable after Compile; Searches of several threads may share it. Character classes are those of
// Unicode; `\s` is its property White_Space, as in the engines that tokenizers were trained with
// (PCRE2's own `\s` adds U+180E).
class Regex {
 public:
  struct Span {
    size_t begin;
    size_t end;
  };

  // Memory of one search after another, for one thread.
  class Scratch {
   public:
    explicit Scratch(const Regex& regex);

   private:
    friend class Regex;
    struct Free {
      void operator()(void* match_data) const;
    };
    std::unique_ptr<void, Free> match_data_;
  };

  // InvalidArgument with the place of the error if `pattern` is none.
  static absl::StatusOr<Regex> Compile(absl::string_view pattern);

  // A pattern that matches exactly `text`.
  static std::string Quote(absl::string_view text);

  // The leftmost match in `text`, which must be UTF-8, at or after `from`; empty matches do not
  // count. ResourceExhausted if the search takes more than a fixed number of backtracking steps.
  absl::StatusOr<std::optional<Span>> Find(absl::string_view text, size_t from,
                                           Scratch& scratch) const;

 private:
  explicit Regex(void* code);

  std::shared_ptr<void> code_;
  std::shared_ptr<void> limits_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_REGEX_H_
