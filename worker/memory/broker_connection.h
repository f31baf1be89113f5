// One connection of a worker to its broker: the descriptor socket and the Session stream that is
// bound to it, from Hello to the end of either. GrpcMemoryClient opens one after the other.
//
// Threads: Open blocks, for minutes while an image is packed. Then one thread reads, one writes,
// one fetches; Shutdown may be called from any and makes the others return.
#ifndef PALIMPSEST_WORKER_MEMORY_BROKER_CONNECTION_H_
#define PALIMPSEST_WORKER_MEMORY_BROKER_CONNECTION_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "common/descriptor_channel.h"
#include "common/fd.h"
#include "common/ids.h"
#include "common/mutex.h"
#include "common/rotation.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"
#include "worker/memory/regions.h"

namespace palimpsest {

// What a worker brings back when it attaches again.
struct HeldMemory {
  SessionId session;
  std::vector<SlabRegion::Held> parameters;
  std::vector<SlabRegion::Held> kv;
  std::vector<SlabRegion::Held> workspace;
  std::string fingerprint;
  int image = -1;  // descriptor; the caller's
  std::vector<SlabRegion::Held> slots;
  Rotation rotation;
};

class BrokerConnection {
 public:
  struct Options {
    // gRPC target of the broker ("unix:/run/palimpsest/broker.sock").
    std::string address;
    std::string descriptor_socket;
    std::string tenant;
    std::string secret;
    // Attach.rotates.
    bool rotates = false;
    // For each packet on the descriptor socket.
    absl::Duration packet_timeout = absl::Seconds(10);
    // Called with the progress of packing the image while Attach waits for it.
    std::function<void(const v1::ImageProgress&)> on_progress;
  };

  explicit BrokerConnection(const Options& options) : options_(options) {}
  BrokerConnection(const BrokerConnection&) = delete;
  BrokerConnection& operator=(const BrokerConnection&) = delete;
  // Ends the connection.
  ~BrokerConnection();

  // Says who we are, returns what is held (null: a new session), attaches, and gives the broker's
  // answer. Once. PermissionDenied, Unauthenticated, FailedPrecondition, NotFound: as the broker
  // answered; Unavailable: it is not there, or went away.
  absl::StatusOr<v1::Attached> Open(const HeldMemory* held);

  // The next message; nothing once the stream has ended.
  std::optional<v1::BrokerMessage> Read();

  // False once the stream has ended.
  bool Write(const v1::WorkerMessage& message);

  // Why the stream ended, never OK. After Read returned nothing, while nobody writes.
  absl::Status Finish();

  // The descriptors of a grant, in the order of `expected`, `pieces` for each slab. An error other
  // than Unavailable is the broker's refusal, or an answer that does not fit what was asked.
  absl::StatusOr<std::vector<SlabDescriptors>> FetchSlabs(absl::string_view token,
                                                          absl::Span<const SlabEntry> expected,
                                                          int pieces);
  absl::StatusOr<UniqueFd> FetchImage(absl::string_view token);

  // No more writes; Read returns what still comes, then the end.
  void FinishWriting();

  // Ends both channels at once.
  void Shutdown();

 private:
  absl::StatusOr<Token> Greet();
  absl::Status ReturnHeld(const HeldMemory& held);
  absl::Status ReturnSlabs(absl::Span<const SlabRegion::Held> slabs);
  absl::Status AwaitAccepted();
  DescriptorChannel& socket();

  const Options options_;
  std::shared_ptr<grpc::Channel> channel_;
  std::unique_ptr<v1::Broker::Stub> stub_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::WorkerMessage, v1::BrokerMessage>> stream_;
  absl::Status end_;  // of the reading thread; OK while the stream runs

  Mutex mu_;
  // Outlives stream_. TryCancel is thread-safe.
  grpc::ClientContext context_;
  bool shut_down_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<DescriptorChannel> socket_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_MEMORY_BROKER_CONNECTION_H_
