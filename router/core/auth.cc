#include "router/core/auth.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"

namespace palimpsest::router {
namespace {

constexpr size_t kMinTokenLength = 16;
constexpr size_t kMaxTokenLength = 512;
constexpr absl::string_view kHashPrefix = "sha256:";

std::array<uint8_t, 32> Sha256(absl::string_view text) {
  std::array<uint8_t, 32> digest;
  SHA256(reinterpret_cast<const unsigned char*>(text.data()), text.size(), digest.data());
  return digest;
}

bool IsToken(absl::string_view text) {
  return text.size() >= kMinTokenLength && text.size() <= kMaxTokenLength &&
         std::all_of(text.begin(), text.end(), absl::ascii_isgraph);
}

// The digest that a line's second word stands for.
absl::StatusOr<std::array<uint8_t, 32>> ParseSecret(absl::string_view word) {
  if (!absl::StartsWith(word, kHashPrefix)) {
    if (!IsToken(word)) {
      return absl::InvalidArgumentError(absl::StrCat(
          "the token has ", word.size(), " characters: expected ", kMinTokenLength, " to ",
          kMaxTokenLength, " printable ASCII characters (openssl rand -hex 24 makes one)"));
    }
    return Sha256(word);
  }
  const absl::string_view hex = word.substr(kHashPrefix.size());
  if (hex.size() != 64 || !std::all_of(hex.begin(), hex.end(), absl::ascii_isxdigit)) {
    return absl::InvalidArgumentError("sha256: must be followed by 64 hex digits");
  }
  const std::string bytes = absl::HexStringToBytes(hex);
  std::array<uint8_t, 32> digest;
  std::copy(bytes.begin(), bytes.end(), digest.begin());
  return digest;
}

}  // namespace

absl::StatusOr<TokenTable> TokenTable::Parse(absl::string_view text) {
  TokenTable table;
  int number = 0;
  for (absl::string_view line : absl::StrSplit(text, '\n')) {
    ++number;
    line = absl::StripAsciiWhitespace(line);
    if (line.empty() || line.front() == '#') continue;
    const std::vector<absl::string_view> words =
        absl::StrSplit(line, absl::ByAnyChar(" \t"), absl::SkipEmpty());
    if (words.size() != 2) {
      return absl::InvalidArgumentError(absl::StrCat("line ", number, " has ", words.size(),
                                                     " words: expected TENANT and TOKEN"));
    }
    absl::StatusOr<Digest> digest = ParseSecret(words[1]);
    if (!digest.ok()) {
      return absl::InvalidArgumentError(
          absl::StrCat("line ", number, ": ", digest.status().message()));
    }
    for (const Entry& entry : table.entries_) {
      if (entry.digest == *digest && entry.tenant != words[0]) {
        return absl::InvalidArgumentError(absl::StrCat("line ", number, ": tenants '", entry.tenant,
                                                       "' and '", words[0],
                                                       "' have the same token"));
      }
    }
    table.entries_.push_back({std::string(words[0]), *digest});
  }
  if (table.entries_.empty()) {
    return absl::InvalidArgumentError("there is no token in the file: expected lines TENANT TOKEN");
  }
  return table;
}

absl::StatusOr<std::string> TokenTable::Authenticate(absl::string_view authorization) const {
  constexpr absl::string_view kScheme = "bearer ";
  if (!absl::StartsWithIgnoreCase(authorization, kScheme)) {
    return absl::UnauthenticatedError(
        "the call must carry the metadata authorization: Bearer TOKEN");
  }
  const absl::string_view token = absl::StripAsciiWhitespace(authorization.substr(kScheme.size()));
  const Digest presented = Sha256(token);
  const Entry* match = nullptr;
  for (const Entry& entry : entries_) {
    const bool same = CRYPTO_memcmp(entry.digest.data(), presented.data(), presented.size()) == 0;
    match = same ? &entry : match;
  }
  if (match == nullptr) return absl::UnauthenticatedError("the bearer token belongs to no tenant");
  return match->tenant;
}

std::set<std::string> TokenTable::tenants() const {
  std::set<std::string> names;
  for (const Entry& entry : entries_) names.insert(entry.tenant);
  return names;
}

}  // namespace palimpsest::router
