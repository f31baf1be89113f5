// UCX as far as this tier needs it: connections over which messages go, memory that others may
// read, and reads of theirs. All that UCX says of the state of an operation is turned into one
// promise: a `done` is called exactly once, and only when UCX cannot touch the operation's memory
// any more.
//
// One thread at a time calls, and is the one that calls back, from within RunOnce or the call
// itself; Wake alone may be called by any. Nothing waits but RunOnce.
//
// A link ends when its peer is gone, says nothing for long, or Close is called. Then every
// operation ends, with an error if need be, then OnClosed is called, and then there is no such link
// any more.
#ifndef PALIMPSEST_BROKER_TIER_REMOTE_UCX_NODE_H_
#define PALIMPSEST_BROKER_TIER_REMOTE_UCX_NODE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "absl/types/span.h"

namespace palimpsest {

class UcxNode {
 public:
  using Done = absl::AnyInvocable<void(absl::Status)>;
  class Link;

  // The bytes that came with a message, valid during OnMessage.
  struct Payload {
    size_t size = 0;
    void* data = nullptr;
    bool rendezvous = false;  // `data` stands for what still lies with the sender
  };

  class Handler {
   public:
    virtual ~Handler() = default;
    // Somebody connected. False: not wanted.
    virtual bool OnAccepted(Link* link) = 0;
    // The header has at most kMaxHeader bytes. What is not received is dropped.
    virtual void OnMessage(Link* link, absl::string_view header, const Payload& payload) = 0;
    virtual void OnClosed(Link* link, const absl::Status& why) = 0;
  };

  static constexpr size_t kMaxHeader = 2048;

  // `transports` as UCX_TLS, such as "all" or "tcp"; what else UCX reads from its environment
  // stays. `handler` outlives the node.
  static absl::StatusOr<std::unique_ptr<UcxNode>> Make(const std::string& transports,
                                                       Handler* handler);
  // Closes all links and waits for them, without telling the handler.
  ~UcxNode();

  // Accepts connections at an address such as "10.0.0.1:7400" or "[::1]:0"; returns it with the
  // port.
  absl::StatusOr<std::string> Listen(const std::string& address);
  // Begins to connect; operations may follow at once.
  absl::StatusOr<Link*> Connect(const std::string& address);

  // A message of a header and perhaps bytes, which are not copied and stay until `done`.
  void Send(Link* link, std::string header, absl::Span<const std::byte> payload, Done done);
  // During OnMessage: fills `to`, of the payload's size.
  void Receive(Link* link, const Payload& payload, absl::Span<std::byte> to, Done done);
  // At once, whatever is under way. `why` is what OnClosed says.
  void Close(Link* link, absl::Status why);
  // Sends and receives that have not ended.
  static size_t UnderWay(const Link* link);

  // Does what can be done; waits for more until `deadline` (MonotonicNow) if that is nothing.
  void RunOnce(absl::Time deadline);
  // Ends the wait of RunOnce, now or the next one.
  void Wake();

 private:
  struct Impl;
  explicit UcxNode(std::unique_ptr<Impl> impl);

  std::unique_ptr<Impl> impl_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_TIER_REMOTE_UCX_NODE_H_
