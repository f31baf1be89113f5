#include "router/core/retry.h"

#include <gtest/gtest.h>

namespace palimpsest::router {
namespace {

TEST(RetryPolicy, AnUnavailableWorkerIsReplacedWhateverWasSent) {
  const RetryPolicy policy{3};
  EXPECT_EQ(policy.Decide({absl::UnavailableError(""), 1, 0}), NextStep::kRetry);
  EXPECT_EQ(policy.Decide({absl::UnavailableError(""), 2, 17}), NextStep::kResume);
}

TEST(RetryPolicy, AFullQueueMovesOnlyARequestThatSentNothing) {
  const RetryPolicy policy{3};
  EXPECT_EQ(policy.Decide({absl::ResourceExhaustedError(""), 1, 0}), NextStep::kRetry);
  EXPECT_EQ(policy.Decide({absl::ResourceExhaustedError(""), 1, 1}), NextStep::kFail);
}

TEST(RetryPolicy, AttemptsAreBounded) {
  const RetryPolicy policy{2};
  EXPECT_EQ(policy.Decide({absl::UnavailableError(""), 2, 0}), NextStep::kFail);
  EXPECT_EQ(policy.Decide({absl::UnavailableError(""), 3, 5}), NextStep::kFail);
}

TEST(RetryPolicy, OtherErrorsAreFinal) {
  const RetryPolicy policy{3};
  for (const absl::Status& status :
       {absl::InvalidArgumentError(""), absl::InternalError(""), absl::CancelledError(""),
        absl::DeadlineExceededError(""), absl::UnauthenticatedError(""), absl::NotFoundError("")}) {
    EXPECT_EQ(policy.Decide({status, 1, 0}), NextStep::kFail) << status;
  }
}

}  // namespace
}  // namespace palimpsest::router
