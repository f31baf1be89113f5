// Time as a dependency: code under test reads a FakeClock that only the test moves.
#ifndef PALIMPSEST_COMMON_CLOCK_H_
#define PALIMPSEST_COMMON_CLOCK_H_

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "common/mutex.h"

namespace palimpsest {

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;

  // Never goes back.
  virtual absl::Time Now() const = 0;

  // MonotonicNow.
  static const Clock& Real();
};

class FakeClock : public Clock {
 public:
  explicit FakeClock(absl::Time start = absl::FromUnixSeconds(1'000'000)) : now_(start) {}

  absl::Time Now() const override {
    MutexLock lock(&mutex_);
    return now_;
  }

  // Requires duration >= 0.
  void Advance(absl::Duration duration) {
    MutexLock lock(&mutex_);
    now_ += duration;
  }

 private:
  mutable Mutex mutex_;
  absl::Time now_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_CLOCK_H_
