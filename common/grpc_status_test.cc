#include "common/grpc_status.h"

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST(GrpcStatus, EveryCodeSurvivesTheRoundTrip) {
  for (int code = 0; code <= 16; ++code) {
    const absl::Status status(static_cast<absl::StatusCode>(code), code == 0 ? "" : "why");
    const grpc::Status sent = ToGrpcStatus(status);
    EXPECT_EQ(static_cast<int>(sent.error_code()), code);
    EXPECT_EQ(FromGrpcStatus(sent), status);
  }
}

TEST(GrpcStatus, NamesOfBothLibrariesAgree) {
  EXPECT_EQ(ToGrpcStatus(absl::UnavailableError("")).error_code(), grpc::StatusCode::UNAVAILABLE);
  EXPECT_EQ(ToGrpcStatus(absl::UnauthenticatedError("")).error_code(),
            grpc::StatusCode::UNAUTHENTICATED);
  EXPECT_EQ(ToGrpcStatus(absl::ResourceExhaustedError("")).error_code(),
            grpc::StatusCode::RESOURCE_EXHAUSTED);
}

TEST(GrpcStatus, LongMessagesAreCut) {
  EXPECT_EQ(ToGrpcStatus(absl::InternalError(std::string(100'000, 'x'))).error_message().size(),
            4096);
}

TEST(RetryAfter, RoundsUpAndBounds) {
  EXPECT_EQ(RetryAfterValue(absl::Microseconds(1)), "1");
  EXPECT_EQ(RetryAfterValue(absl::Milliseconds(250)), "250");
  EXPECT_EQ(RetryAfterValue(-absl::Seconds(1)), "0");
  EXPECT_EQ(RetryAfterValue(absl::InfiniteDuration()), "3600000");
  EXPECT_EQ(ParseRetryAfter("250"), absl::Milliseconds(250));
  for (const char* bad : {"", "x", "-1", "3600001", "99999999999999999999", "1.5"}) {
    EXPECT_EQ(ParseRetryAfter(bad), std::nullopt) << bad;
  }
}

}  // namespace
}  // namespace palimpsest
