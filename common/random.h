// Secrets: unguessable tokens and comparisons whose duration tells nothing.
#ifndef PALIMPSEST_COMMON_RANDOM_H_
#define PALIMPSEST_COMMON_RANDOM_H_

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace palimpsest {

inline constexpr size_t kTokenBytes = 32;

// Compares in constant time with itself and with a string.
bool ConstantTimeEqual(absl::string_view a, absl::string_view b);

// 256 random bits: a nonce or a single-use token. Printing one is a leak, so it has no operator<<.
class Token {
 public:
  Token() = default;  // all zero: matches no token that Random() returns

  // From the kernel's generator; aborts if there is none.
  static Token Random();

  // Nothing unless `bytes` has exactly kTokenBytes bytes.
  static std::optional<Token> FromBytes(absl::string_view bytes);

  absl::string_view bytes() const {
    return {reinterpret_cast<const char*>(bytes_.data()), bytes_.size()};
  }
  std::string ToBytes() const { return std::string(bytes()); }

  friend bool operator==(const Token& a, const Token& b) {
    return ConstantTimeEqual(a.bytes(), b.bytes());
  }

  // For hash tables. Looking up a 256-bit random value leaks nothing that helps to guess another.
  template <typename H>
  friend H AbslHashValue(H state, const Token& token) {
    return H::combine(std::move(state), token.bytes_);
  }

 private:
  std::array<uint8_t, kTokenBytes> bytes_{};
};

// A uniformly random 64-bit number from the same generator, for seeds.
uint64_t RandomSeed();

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_RANDOM_H_
