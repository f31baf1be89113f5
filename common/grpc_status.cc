#include "common/grpc_status.h"

#include <algorithm>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"

namespace palimpsest {
namespace {

constexpr size_t kMaxMessageBytes = 4096;
constexpr absl::Duration kLongestRetryAfter = absl::Hours(1);

}  // namespace

grpc::Status ToGrpcStatus(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()),
                      std::string(status.message().substr(0, kMaxMessageBytes)));
}

absl::Status FromGrpcStatus(const grpc::Status& status) {
  if (status.ok()) return absl::OkStatus();
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

std::string RetryAfterValue(absl::Duration retry_after) {
  const absl::Duration bounded = std::clamp(retry_after, absl::ZeroDuration(), kLongestRetryAfter);
  return absl::StrCat(absl::ToInt64Milliseconds(absl::Ceil(bounded, absl::Milliseconds(1))));
}

std::optional<absl::Duration> ParseRetryAfter(absl::string_view value) {
  int64_t milliseconds;
  if (!absl::SimpleAtoi(value, &milliseconds)) return std::nullopt;
  const absl::Duration duration = absl::Milliseconds(milliseconds);
  if (duration < absl::ZeroDuration() || duration > kLongestRetryAfter) return std::nullopt;
  return duration;
}

}  // namespace palimpsest
