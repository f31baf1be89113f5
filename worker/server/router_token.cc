#include "worker/server/router_token.h"

#include <iterator>
#include <string>

#include "absl/strings/str_cat.h"
#include "common/random.h"

namespace palimpsest {

absl::Status CheckRouterToken(const grpc::ServerContextBase& context, const SecretFile& tokens) {
  const auto& metadata = context.client_metadata();
  const auto [begin, end] = metadata.equal_range("authorization");
  if (begin != end && std::next(begin) == end) {
    const absl::string_view presented(begin->second.data(), begin->second.size());
    bool match = false;
    for (const std::string& token : *tokens.secrets()) {
      match |= ConstantTimeEqual(presented, absl::StrCat("Bearer ", token));
    }
    if (match) return absl::OkStatus();
  }
  return absl::UnauthenticatedError(begin == end
                                        ? "the call has no metadata `authorization: Bearer TOKEN`"
                                        : "the bearer token is not this worker's router token");
}

}  // namespace palimpsest
