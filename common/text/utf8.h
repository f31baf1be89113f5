// UTF-8: validation, and repair of a stream that arrives in pieces.
// Well-formed is what the Unicode Standard's table 3-7 says: no surrogates, no overlong forms,
// nothing beyond U+10FFFF.
#ifndef PALIMPSEST_COMMON_TEXT_UTF8_H_
#define PALIMPSEST_COMMON_TEXT_UTF8_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace palimpsest {

// One step of decoding at the start of a text.
struct Utf8Step {
  enum class Kind {
    kCharacter,   // `length` bytes are a well-formed character
    kInvalid,     // `length` bytes can't start or continue any character
    kIncomplete,  // all `length` bytes that there are could start a character
  };
  Kind kind;
  size_t length;            // at least 1
  char32_t code_point = 0;  // of a character
};

// Looks at the first character of `text`, which must not be empty. An invalid step covers the
// maximal subpart of an ill-formed sequence (Unicode, chapter 3.9, "U+FFFD Substitution of Maximal
// Subparts").
Utf8Step NextUtf8(absl::string_view text);

// Length of the longest prefix of `text` that is well-formed; text.size() if all of it is.
size_t ValidUtf8Prefix(absl::string_view text);

inline bool IsValidUtf8(absl::string_view text) { return ValidUtf8Prefix(text) == text.size(); }

// OK, or InvalidArgument that names `what` and the offset of the first wrong byte.
absl::Status CheckUtf8(absl::string_view text, absl::string_view what);

// Appends `code_point`, a Unicode scalar value, to `out`.
void AppendUtf8(char32_t code_point, std::string* out);

// Turns a stream of bytes into well-formed UTF-8. Each maximal subpart that can't belong to a
// character becomes one U+FFFD; bytes that may still become a character are held back. The
// concatenated output does not depend on how the input was cut. Not thread-safe.
class Utf8Repair {
 public:
  // Appends what `bytes` makes certain to `out`.
  void Push(absl::string_view bytes, std::string* out);

  // The stream has ended: an unfinished character becomes U+FFFD.
  void Finish(std::string* out);

  // Bytes held back, at most 3.
  size_t held() const { return held_.size(); }

 private:
  std::string held_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_UTF8_H_
