#include "common/text/byte_alphabet.h"

#include <array>
#include <cstdint>

#include "common/text/utf8.h"

namespace palimpsest {
namespace {

constexpr int kCharacters = 0x144;

struct Alphabet {
  std::array<char32_t, 256> character{};
  std::array<int16_t, kCharacters> byte{};
};

constexpr bool StandsForItself(int byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xFF && byte != 0xAD);
}

constexpr Alphabet MakeAlphabet() {
  Alphabet alphabet;
  for (int16_t& byte : alphabet.byte) byte = -1;
  char32_t next = 0x100;
  for (int byte = 0; byte < 256; ++byte) {
    const char32_t character = StandsForItself(byte) ? byte : next++;
    alphabet.character[byte] = character;
    alphabet.byte[character] = byte;
  }
  return alphabet;
}

constexpr Alphabet kAlphabet = MakeAlphabet();

}  // namespace

std::optional<std::string> BytesOfAlphabet(absl::string_view token) {
  std::string bytes;
  while (!token.empty()) {
    const Utf8Step step = NextUtf8(token);
    if (step.kind != Utf8Step::Kind::kCharacter || step.code_point >= kCharacters ||
        kAlphabet.byte[step.code_point] < 0) {
      return std::nullopt;
    }
    bytes.push_back(kAlphabet.byte[step.code_point]);
    token.remove_prefix(step.length);
  }
  return bytes;
}

std::string AlphabetOfBytes(absl::string_view bytes) {
  std::string token;
  for (const char byte : bytes) AppendUtf8(kAlphabet.character[static_cast<uint8_t>(byte)], &token);
  return token;
}

}  // namespace palimpsest
