// The connected end of a session: what the broker's core knows of one Session call.
//
// Threads: thread-safe; nothing blocks.
#ifndef PALIMPSEST_BROKER_SERVER_SESSION_STREAM_H_
#define PALIMPSEST_BROKER_SERVER_SESSION_STREAM_H_

#include <cstddef>
#include <functional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "broker/server/hand_over.h"
#include "broker/server/outbox.h"
#include "common/mutex.h"
#include "proto/palimpsest/v1/broker.pb.h"

namespace palimpsest {

class SessionStream {
 public:
  // `cancel` ends the call; it is called at most once, and not after Finished.
  SessionStream(ConnectionId connection, size_t capacity, std::function<void()> cancel)
      : connection_(connection), outbox_(capacity), cancel_(std::move(cancel)) {}

  // The connection of the descriptor socket that the session is bound to.
  ConnectionId connection() const { return connection_; }
  Outbox<v1::BrokerMessage>& outbox() { return outbox_; }

  // Sends a message; a stream whose outbox is full is closed.
  void Send(v1::BrokerMessage message) {
    if (!outbox_.Push(std::move(message))) Close("the worker does not read its messages");
  }

  // Ends the call for this reason; the first one counts.
  void Close(absl::string_view reason) {
    outbox_.Close();
    MutexLock lock(&mu_);
    if (reason_.empty()) reason_ = std::string(reason);
    if (cancel_) std::exchange(cancel_, nullptr)();
  }

  // The call has ended.
  void Finished() {
    outbox_.Close();
    MutexLock lock(&mu_);
    cancel_ = nullptr;
  }

  // Why the broker closed the stream; empty if it did not.
  std::string reason() const {
    MutexLock lock(&mu_);
    return reason_;
  }

 private:
  const ConnectionId connection_;
  Outbox<v1::BrokerMessage> outbox_;
  mutable Mutex mu_;
  std::function<void()> cancel_ ABSL_GUARDED_BY(mu_);
  std::string reason_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_SESSION_STREAM_H_
