// A bounded queue of messages to one worker, between whoever has something to say and the one
// thread that writes to the stream.
//
// Threads: thread-safe; one thread pops. Push never blocks: a worker that does not read fills its
// outbox, and the session's connection is then given up.
#ifndef PALIMPSEST_BROKER_SERVER_OUTBOX_H_
#define PALIMPSEST_BROKER_SERVER_OUTBOX_H_

#include <cstddef>
#include <deque>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "common/mutex.h"

namespace palimpsest {

template <typename Message>
class Outbox {
 public:
  explicit Outbox(size_t capacity) : capacity_(capacity) {}

  // False if the outbox is full or closed.
  bool Push(Message message) {
    MutexLock lock(&mu_);
    if (closed_ || messages_.size() >= capacity_) return false;
    messages_.push_back(std::move(message));
    changed_.Signal();
    return true;
  }

  // Waits for the next message; nullopt once closed.
  std::optional<Message> Pop() {
    MutexLock lock(&mu_);
    while (messages_.empty() && !closed_) changed_.Wait(&mu_);
    if (closed_) return std::nullopt;
    Message message = std::move(messages_.front());
    messages_.pop_front();
    return message;
  }

  // Drops what waits and refuses what comes.
  void Close() {
    MutexLock lock(&mu_);
    closed_ = true;
    messages_.clear();
    changed_.SignalAll();
  }

 private:
  const size_t capacity_;
  Mutex mu_;
  CondVar changed_;
  std::deque<Message> messages_ ABSL_GUARDED_BY(mu_);
  bool closed_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_OUTBOX_H_
