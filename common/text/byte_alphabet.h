// The alphabet of byte-level BPE files: each byte is written as one printable character. Bytes that
// are printable in Latin-1 stand for themselves, the others follow from U+0100 on in their order.
// (GPT-2's published encoder defines it.)
#ifndef PALIMPSEST_COMMON_TEXT_BYTE_ALPHABET_H_
#define PALIMPSEST_COMMON_TEXT_BYTE_ALPHABET_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace palimpsest {

// The bytes that `token`, well-formed UTF-8, stands for; nullopt if a character of it is not in the
// alphabet.
std::optional<std::string> BytesOfAlphabet(absl::string_view token);

// The inverse.
std::string AlphabetOfBytes(absl::string_view bytes);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TEXT_BYTE_ALPHABET_H_
