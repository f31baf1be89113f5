// Mutex, MutexLock and CondVar: absl's interface (the part we use), with clang's thread-safety
// annotations, on the primitives of pthread. Deadlines are times of MonotonicNow.
//
// Why not absl::Mutex: ThreadSanitizer cannot see into Debian's uninstrumented abseil, so every
// absl::Mutex would look like a data race. These end in pthread calls, which it intercepts. Why not
// std::condition_variable: it waits by pthread_cond_clockwait, which not every ThreadSanitizer
// knows, or by the wall clock.
#ifndef PALIMPSEST_COMMON_MUTEX_H_
#define PALIMPSEST_COMMON_MUTEX_H_

#include <pthread.h>

#include <mutex>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "common/monotonic_time.h"

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
  CondVar();
  ~CondVar();
  CondVar(const CondVar&) = delete;
  CondVar& operator=(const CondVar&) = delete;

  void Wait(Mutex* mutex) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  // Returns true if `timeout` passed without a signal.
  bool WaitWithTimeout(Mutex* mutex, absl::Duration timeout) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  // Returns true if `deadline` passed without a signal.
  bool WaitWithDeadline(Mutex* mutex, absl::Time deadline) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex);

  void Signal();
  void SignalAll();

 private:
  pthread_cond_t condition_;
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
    const absl::Time deadline = MonotonicNow() + timeout;
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
