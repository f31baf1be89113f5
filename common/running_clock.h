// Time in which this process runs. A process that is stopped (a signal, a debugger, a frozen
// container) cannot see what others did meanwhile: when it goes on, all their deadlines would be
// over, with their answers still unread in its sockets. For this clock no time passed.
#ifndef PALIMPSEST_COMMON_RUNNING_CLOCK_H_
#define PALIMPSEST_COMMON_RUNNING_CLOCK_H_

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/mutex.h"

namespace palimpsest {

// Takes it for a stop when two calls of Now are further apart than `longest_gap`, so somebody must
// call it far more often. Starved processes are spared, too. Thread-safe; never goes back.
class RunningClock : public Clock {
 public:
  // `base` must outlive it.
  RunningClock(const Clock& base, absl::Duration longest_gap)
      : base_(base), longest_gap_(longest_gap), last_(base.Now()) {}

  absl::Time Now() const override {
    MutexLock lock(&mutex_);
    const absl::Time now = base_.Now();
    if (now - last_ > longest_gap_) stopped_ += now - last_;
    last_ = now;
    return now - stopped_;
  }

  // The sum of all stops.
  absl::Duration stopped() const {
    MutexLock lock(&mutex_);
    return stopped_;
  }

 private:
  const Clock& base_;
  const absl::Duration longest_gap_;
  mutable Mutex mutex_;
  mutable absl::Time last_ ABSL_GUARDED_BY(mutex_);
  mutable absl::Duration stopped_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_RUNNING_CLOCK_H_
