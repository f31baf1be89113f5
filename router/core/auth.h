// Bearer tokens of tenants. Immutable once parsed; a new file is a new table.
#ifndef PALIMPSEST_ROUTER_CORE_AUTH_H_
#define PALIMPSEST_ROUTER_CORE_AUTH_H_

#include <array>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace palimpsest::router {

class TokenTable {
 public:
  // Text of a token file. One token per line: `TENANT TOKEN`, where TOKEN is the token itself (16
  // to 512 printable ASCII characters) or `sha256:` and the 64 hex digits of its SHA-256. Several
  // lines may name one tenant, for rotation. Blank lines and lines that begin with # are skipped.
  // Errors name the line and never quote a token.
  static absl::StatusOr<TokenTable> Parse(absl::string_view text);

  // The tenant of `authorization`, the value of the metadata of that name ("Bearer <token>").
  // UNAUTHENTICATED otherwise. Takes the same time whether and where a token matches.
  absl::StatusOr<std::string> Authenticate(absl::string_view authorization) const;

  std::set<std::string> tenants() const;
  size_t size() const { return entries_.size(); }

 private:
  using Digest = std::array<uint8_t, 32>;
  struct Entry {
    std::string tenant;
    Digest digest;
  };

  std::vector<Entry> entries_;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_CORE_AUTH_H_
