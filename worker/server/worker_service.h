// The worker's gRPC service: token ids in, token ids out (worker.proto).
//
// Generate uses gRPC's callback interface: no thread waits for a token, a slow client delays
// nobody, and a client that cancels, vanishes or lets its deadline pass cancels its sequence. Drain
// blocks a thread of the server until its deadline at most.
//
// HintConversation neither waits on a thread: the broker's answer ends it.
//
// Every method refuses calls without the router's bearer token with UNAUTHENTICATED. Thread-safe.
#ifndef PALIMPSEST_WORKER_SERVER_WORKER_SERVICE_H_
#define PALIMPSEST_WORKER_SERVER_WORKER_SERVICE_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "common/secret_file.h"
#include "proto/palimpsest/v1/worker.grpc.pb.h"
#include "worker/core/conversation_hints.h"
#include "worker/core/sequence.h"
#include "worker/memory/memory_client.h"
#include "worker/server/engine.h"
#include "worker/server/engine_metrics.h"

namespace palimpsest {

struct WorkerServiceOptions {
  std::string tenant;
  std::string model;
  // The bearer tokens that the router may present.
  std::shared_ptr<const SecretFile> router_tokens;
  // Called when a drain begins, before it waits.
  std::function<void()> on_drain;
  // Null: no blocks are kept below T0. Otherwise it must outlive the service.
  ConversationHints* hints = nullptr;
};

class WorkerService final
    : public v1::Worker::WithCallbackMethod_Generate<
          v1::Worker::WithCallbackMethod_HintConversation<v1::Worker::Service>> {
 public:
  // The pointers must outlive the service, which must outlive its server.
  WorkerService(WorkerServiceOptions options, Engine* engine, const MemoryClient* memory,
                EngineMetrics* metrics);

  grpc::ServerWriteReactor<v1::WorkerGenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::WorkerGenerateRequest* request) override;

  grpc::ServerUnaryReactor* HintConversation(grpc::CallbackServerContext* context,
                                             const v1::WorkerHintRequest* request,
                                             v1::WorkerHintResponse* response) override;

  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                     v1::DrainResponse* response) override;

  grpc::Status GetStats(grpc::ServerContext* context, const v1::GetWorkerStatsRequest* request,
                        v1::WorkerStats* response) override;

  // What GetStats answers.
  v1::WorkerStats Stats() const;

 private:
  absl::Status Authorize(const grpc::ServerContextBase& context) const;
  absl::StatusOr<SequenceRequest> Convert(const v1::WorkerGenerateRequest& request) const;
  absl::StatusOr<RequestHints> ConvertHints(const v1::WorkerGenerateRequest& request) const;

  const WorkerServiceOptions options_;
  Engine* const engine_;
  const MemoryClient* const memory_;
  EngineMetrics* const metrics_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_WORKER_SERVICE_H_
