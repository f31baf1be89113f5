// absl::Status to grpc::Status and back: the one place where they meet.
#ifndef PALIMPSEST_COMMON_GRPC_STATUS_H_
#define PALIMPSEST_COMMON_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace palimpsest {

// Trailing metadata of a refused call: milliseconds after which another try may succeed, as a
// decimal number. Accompanies UNAVAILABLE and RESOURCE_EXHAUSTED.
inline constexpr char kRetryAfterMetadata[] = "retry-after-ms";

// Codes are numerically equal. Messages are cut to 4 KiB, since they travel in a header.
grpc::Status ToGrpcStatus(const absl::Status& status);
absl::Status FromGrpcStatus(const grpc::Status& status);

// The value of kRetryAfterMetadata: whole milliseconds, rounded up, between 0 and an hour.
std::string RetryAfterValue(absl::Duration retry_after);

// Nothing unless `value` is what RetryAfterValue returns.
std::optional<absl::Duration> ParseRetryAfter(absl::string_view value);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_GRPC_STATUS_H_
