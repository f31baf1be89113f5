// Whether a request whose worker failed may go on at another worker. Pure.
#ifndef PALIMPSEST_ROUTER_CORE_RETRY_H_
#define PALIMPSEST_ROUTER_CORE_RETRY_H_

#include <cstdint>

#include "absl/status/status.h"

namespace palimpsest::router {

enum class NextStep {
  kFail,    // the client gets the error
  kRetry,   // another worker, from the prompt: the client has seen nothing
  kResume,  // another worker, from prompt + tokens already sent
};

// A failed attempt.
struct AttemptFailure {
  absl::Status status;
  // Attempts made so far, this one included.
  int32_t attempts = 1;
  // Tokens already sent to the client, by all attempts.
  int64_t tokens_sent = 0;
};

struct RetryPolicy {
  // Workers that one request may be tried on.
  int32_t max_attempts = 3;

  // UNAVAILABLE (the worker is gone, drains, or found no memory) moves a request to another worker
  // at any time. RESOURCE_EXHAUSTED (the worker's queue is full) can only come before the first
  // token and moves it too. Everything else is the request's own fault, or would fail again.
  NextStep Decide(const AttemptFailure& failure) const {
    const bool gone = absl::IsUnavailable(failure.status);
    const bool full = absl::IsResourceExhausted(failure.status) && failure.tokens_sent == 0;
    if (failure.attempts >= max_attempts || !(gone || full)) return NextStep::kFail;
    return failure.tokens_sent == 0 ? NextStep::kRetry : NextStep::kResume;
  }
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_CORE_RETRY_H_
