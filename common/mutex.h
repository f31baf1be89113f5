// Mutex, MutexLock and CondVar: absl's interface (the part we use), with clang's thread-safety
// annotations, on the C++ library's primitives.
//
// Why not absl::Mutex: ThreadSanitizer cannot see into Debian's uninstrumented abseil, so every
// absl::Mutex would look like a data race. The standard primitives end in pthread calls, which it
// intercepts.
#ifndef PALIMPSEST_COMMON_MUTEX_H_
#define PALIMPSEST_COMMON_MUTEX_H_

#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"

namespace palimpsest {

class ABSL_LOCKABLE Mutex {
 public:
  void Lock() ABSL_EXCLUSIVE_LOCK_FUNCTION() { mutex_.lock(); }
  void Unlock() ABSL_UNLOCK_FUNCTION() { mutex_.unlock(); }

 private:
  friend class CondVar;
  std::mutex mutex_;
};

class ABSL_SCOPED_LOCKABLE MutexLock {
 public:
  explicit MutexLock(Mutex* mutex) ABSL_EXCLUSIVE_LOCK_FUNCTION(mutex) : mutex_(mutex) {
    mutex_->Lock();
  }
  ~MutexLock() ABSL_UNLOCK_FUNCTION() { mutex_->Unlock(); }

  MutexLock(const MutexLock&) = delete;
  MutexLock& operator=(const MutexLock&) = delete;

 private:
  Mutex* const mutex_;
};

// Every wait may wake spuriously: loop on the condition.
class CondVar {
 public:
  void Wait(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    condition_.wait(lock);
    lock.release();
  }

  // Returns true if `timeout` passed without a signal.
  bool WaitWithTimeout(Mutex* mutex, absl::Duration timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (timeout == absl::InfiniteDuration()) {
      Wait(mutex);
      return false;
    }
    // Longer waits than a day come back early, which callers treat as a spurious wake-up.
    const absl::Duration bounded = std::min(timeout, absl::Hours(24));
    std::unique_lock<std::mutex> lock(mutex->mutex_, std::adopt_lock);
    const std::cv_status status = condition_.wait_for(lock, absl::ToChronoNanoseconds(bounded));
    lock.release();
    return status == std::cv_status::timeout && bounded == timeout;
  }

  // Returns true if `deadline` (real time) passed without a signal.
  bool WaitWithDeadline(Mutex* mutex, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex) {
    if (deadline == absl::InfiniteFuture()) {
      Wait(mutex);
      return false;
    }
    return WaitWithTimeout(mutex, std::max(deadline - absl::Now(), absl::ZeroDuration()));
  }

  void Signal() { condition_.notify_one(); }
  void SignalAll() { condition_.notify_all(); }

 private:
  std::condition_variable condition_;
};

// An event that happens at most once.
class Notification {
 public:
  void Notify() {
    MutexLock lock(&mutex_);
    notified_ = true;
    changed_.SignalAll();
  }

  bool HasBeenNotified() const {
    MutexLock lock(&mutex_);
    return notified_;
  }

  void WaitForNotification() const {
    MutexLock lock(&mutex_);
    while (!notified_) changed_.Wait(&mutex_);
  }

  // Returns whether it happened within `timeout`.
  bool WaitForNotificationWithTimeout(absl::Duration timeout) const {
    const absl::Time deadline = absl::Now() + timeout;
    MutexLock lock(&mutex_);
    while (!notified_) {
      if (changed_.WaitWithDeadline(&mutex_, deadline)) return notified_;
    }
    return true;
  }

 private:
  mutable Mutex mutex_;
  mutable CondVar changed_;
  bool notified_ ABSL_GUARDED_BY(mutex_) = false;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_MUTEX_H_
