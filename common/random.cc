#include "common/random.h"

#include <sys/random.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace palimpsest {
namespace {

void FillRandom(void* data, size_t size) {
  auto* out = static_cast<char*>(data);
  while (size > 0) {
    const ssize_t got = ::getrandom(out, size, 0);
    if (got < 0) {
      if (errno == EINTR) continue;
      std::perror("getrandom");
      std::abort();
    }
    out += got;
    size -= static_cast<size_t>(got);
  }
}

}  // namespace

bool ConstantTimeEqual(absl::string_view a, absl::string_view b) {
  if (a.size() != b.size()) return false;
  // Volatile, so that the loop cannot be turned into one that stops at the first difference.
  volatile unsigned char difference = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference = difference | static_cast<unsigned char>(a[i] ^ b[i]);
  }
  return difference == 0;
}

Token Token::Random() {
  Token token;
  FillRandom(token.bytes_.data(), token.bytes_.size());
  return token;
}

std::optional<Token> Token::FromBytes(absl::string_view bytes) {
  if (bytes.size() != kTokenBytes) return std::nullopt;
  Token token;
  std::memcpy(token.bytes_.data(), bytes.data(), kTokenBytes);
  return token;
}

uint64_t RandomSeed() {
  uint64_t seed;
  FillRandom(&seed, sizeof(seed));
  return seed;
}

}  // namespace palimpsest
