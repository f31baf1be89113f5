// The gRPC service of the broker: one Session call per worker, and what operators ask.
//
// A Session call is served by the thread that gRPC gives it, which reads, and by a second one,
// which writes what is in the session's outbox. The call and the connection of the descriptor
// socket that it is bound to end together. A call that does not attach in time is ended.
//
// Threads: thread-safe, as gRPC demands. Shutdown before the gRPC server's own.
#ifndef PALIMPSEST_BROKER_SERVER_SESSION_SERVICE_H_
#define PALIMPSEST_BROKER_SERVER_SESSION_SERVICE_H_

#include <cstdint>
#include <map>
#include <memory>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "broker/server/broker.h"
#include "broker/server/broker_metrics.h"
#include "broker/server/descriptor_server.h"
#include "broker/server/image_manager.h"
#include "common/mutex.h"
#include "proto/palimpsest/v1/broker.grpc.pb.h"

namespace palimpsest {

class SessionService : public v1::Broker::Service {
 public:
  struct Options {
    // Calls at a time; one more is refused.
    size_t max_calls = 256;
    // Of them, calls that said no Attach yet; for one more the oldest is given up, so that who
    // opens calls and says nothing locks nobody out.
    size_t max_silent_calls = 64;
    absl::Duration attach_timeout = absl::Seconds(10);
    // For a worker to read what is being written when its call ends.
    absl::Duration write_patience = absl::Seconds(2);
    size_t outbox_messages = 1024;
  };
  // What it works with; all must outlive it.
  struct Parts {
    Broker& broker;
    DescriptorServer& descriptors;
    ImageManager& images;
    BrokerMetrics& metrics;
  };

  SessionService(Options options, Parts parts);
  ~SessionService() override;

  // Ends every call. Idempotent.
  void Shutdown();

  grpc::Status Session(
      grpc::ServerContext* context,
      grpc::ServerReaderWriter<v1::BrokerMessage, v1::WorkerMessage>* stream) override;
  grpc::Status GetStatus(grpc::ServerContext* context, const v1::GetStatusRequest* request,
                         v1::GetStatusResponse* response) override;
  grpc::Status GetRemapLog(grpc::ServerContext* context, const v1::GetRemapLogRequest* request,
                           v1::GetRemapLogResponse* response) override;

 private:
  using Stream = grpc::ServerReaderWriter<v1::BrokerMessage, v1::WorkerMessage>;

  absl::Status Serve(grpc::ServerContext& context, Stream& stream);
  absl::StatusOr<std::shared_ptr<palimpsest::Broker::Session>> Open(
      const v1::Attach& attach, const DescriptorPeer& peer, Stream& stream,
      const std::shared_ptr<SessionStream>& end, grpc::ServerContext& context);
  absl::StatusOr<std::shared_ptr<palimpsest::Broker::Session>> OpenReturning(
      const v1::Attach& attach, const DescriptorPeer& peer, Stream& stream,
      const std::shared_ptr<SessionStream>& end, grpc::ServerContext& context);
  // Waits for the tenant's image and tells the worker how far it is.
  absl::StatusOr<std::shared_ptr<const SealedImage>> AwaitImage(const DescriptorPeer& peer,
                                                                Stream& stream,
                                                                grpc::ServerContext& context);
  // Reads and writes until the call ends.
  absl::Status Converse(const std::shared_ptr<palimpsest::Broker::Session>& session,
                        const std::shared_ptr<SessionStream>& end, Stream& stream);
  // Admits a call and bounds the time until it attaches.
  absl::StatusOr<uint64_t> Begin(grpc::ServerContext& context);
  void Attached(uint64_t call);
  void GiveUpOldestSilentCall() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void End(uint64_t call);
  void WatchAttachDeadlines();

  const Options options_;
  const Parts parts_;

  struct Known {
    grpc::ServerContext* context = nullptr;
    absl::Time attach_by;  // InfiniteFuture once attached
  };
  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  uint64_t next_call_ ABSL_GUARDED_BY(mu_) = 1;
  std::map<uint64_t, Known> calls_ ABSL_GUARDED_BY(mu_);
  std::thread deadlines_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_SERVER_SESSION_SERVICE_H_
