#include "common/mutex.h"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <ctime>

namespace palimpsest {
namespace {

// Longer waits come back early, which callers treat as a spurious wake-up.
constexpr absl::Duration kLongestWait = absl::Hours(24);

// Every other error is a misuse of the interface.
void Require(int error, const char* call) {
  if (error == 0) return;
  std::fprintf(stderr, "%s failed: error %d\n", call, error);
  std::abort();
}

absl::Duration SinceBoot() {
  timespec now;
  Require(::clock_gettime(CLOCK_MONOTONIC, &now), "clock_gettime");
  return absl::DurationFromTimespec(now);
}

}  // namespace

CondVar::CondVar() {
  pthread_condattr_t attributes;
  Require(::pthread_condattr_init(&attributes), "pthread_condattr_init");
  Require(::pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC), "pthread_condattr_setclock");
  Require(::pthread_cond_init(&condition_, &attributes), "pthread_cond_init");
  ::pthread_condattr_destroy(&attributes);
}

CondVar::~CondVar() { ::pthread_cond_destroy(&condition_); }

void CondVar::Wait(Mutex* mutex) {
  Require(::pthread_cond_wait(&condition_, mutex->mutex_.native_handle()), "pthread_cond_wait");
}

bool CondVar::WaitWithTimeout(Mutex* mutex, absl::Duration timeout) {
  if (timeout == absl::InfiniteDuration()) {
    Wait(mutex);
    return false;
  }
  const absl::Duration bounded = std::clamp(timeout, absl::ZeroDuration(), kLongestWait);
  const timespec until = absl::ToTimespec(SinceBoot() + bounded);
  const int error = ::pthread_cond_timedwait(&condition_, mutex->mutex_.native_handle(), &until);
  if (error == ETIMEDOUT) return timeout <= kLongestWait;
  Require(error, "pthread_cond_timedwait");
  return false;
}

bool CondVar::WaitWithDeadline(Mutex* mutex, absl::Time deadline) {
  if (deadline == absl::InfiniteFuture()) {
    Wait(mutex);
    return false;
  }
  return WaitWithTimeout(mutex, deadline - MonotonicNow());
}

void CondVar::Signal() { ::pthread_cond_signal(&condition_); }
void CondVar::SignalAll() { ::pthread_cond_broadcast(&condition_); }

}  // namespace palimpsest
