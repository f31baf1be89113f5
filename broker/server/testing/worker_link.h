// The connections of a scripted worker to a broker: the descriptor socket and the session's stream.
//
// Threads: Send and Fetch may be called from several threads, Read from one; everything else from
// the one that owns it, Cancel also while others are in calls.
#ifndef PALIMPSEST_BROKER_SERVER_TESTING_WORKER_LINK_H_
#define PALIMPSEST_BROKER_SERVER_TESTING_WORKER_LINK_H_

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/descriptor_channel.h"
#include "common/fd.h"
#include "common/mutex.h"
#include "grpcpp/grpcpp.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"

namespace palimpsest {

class WorkerLink {
 public:
  static constexpr absl::Duration kPatience = absl::Seconds(20);

  // Connects the descriptor socket and says Hello.
  absl::Status Hello(const std::string& socket, const std::string& tenant,
                     const std::string& secret);
  std::string nonce() const { return nonce_.ToBytes(); }

  // Opens the session with this first message. `on_progress` is called for each message that says
  // how far the image is.
  absl::StatusOr<v1::Attached> Open(
      const std::string& socket, const v1::Attach& attach,
      const std::function<void()>& on_progress = [] {});
  // False when the stream has ended; then Finish tells why.
  bool Read(v1::BrokerMessage* message) { return stream_->Read(message); }
  absl::Status Finish();
  absl::Status Send(const v1::WorkerMessage& message);

  // What the token is for. `entries`, if not null: what the descriptors are of.
  absl::StatusOr<std::vector<UniqueFd>> Fetch(const std::string& token,
                                              std::vector<SlabEntry>* entries);
  // Of the last Hello.
  DescriptorChannel& descriptors() { return *descriptors_; }
  const std::shared_ptr<grpc::Channel>& channel() const { return channel_; }

  // Ends both connections.
  void Cancel();

 private:
  using Stream = grpc::ClientReaderWriter<v1::WorkerMessage, v1::BrokerMessage>;

  std::optional<DescriptorChannel> descriptors_;
  Token nonce_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<grpc::ClientContext> context_;
  std::unique_ptr<Stream> stream_;
  Mutex write_mu_;
  Mutex fetch_mu_;  // one request over the descriptor connection at a time
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_TESTING_WORKER_LINK_H_
