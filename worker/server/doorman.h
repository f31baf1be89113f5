// Answers for a worker that sleeps: healthy, with the statistics that it left. The first request
// wakes the worker; it and those that come meanwhile wait and are then passed through to it, so
// that callers notice nothing but the time. One that is drained while nobody waits wakes no more.
//
// Connections that were made here keep working for a few seconds after the worker serves again
// (requests on them are passed through) and are then closed in such a way that callers connect
// anew, to the worker; no request is lost by that.
//
// Threads: thread-safe; each waiting or passing request has a thread of the gRPC server. Legal
// order: Start, then Open or Fail at most once.
#ifndef PALIMPSEST_WORKER_SERVER_DOORMAN_H_
#define PALIMPSEST_WORKER_SERVER_DOORMAN_H_

#include <grpcpp/grpcpp.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/mutex.h"
#include "common/secret_file.h"
#include "proto/palimpsest/v1/worker.grpc.pb.h"
#include "worker/server/listen_socket.h"

namespace palimpsest {

class Doorman final : public v1::Worker::WithCallbackMethod_GetStats<v1::Worker::Service> {
 public:
  struct Options {
    // What GetStats answers.
    v1::WorkerStats stats;
    std::shared_ptr<const SecretFile> router_tokens;
    // Where the worker will serve: that of the listening socket.
    std::string address;
    // Called once, by a thread of the server, when a request comes; must not block.
    std::function<void()> wake;
    // Requests that may wait at once.
    int max_requests = 256;
  };

  explicit Doorman(Options options)
      : options_(std::move(options)), draining_(options_.stats.draining()) {}
  // Cuts off what still passes.
  ~Doorman() override;

  // Takes connections of `socket`, which must outlive this.
  absl::Status Start(int socket);
  // The worker serves: no more connections are taken, requests are passed through.
  void Open();
  // It will not come: requests that wait, and all later ones, fail with this.
  void Fail(absl::Status why);

  grpc::Status Generate(grpc::ServerContext* context, const v1::WorkerGenerateRequest* request,
                        grpc::ServerWriter<v1::WorkerGenerateResponse>* writer) override;
  // Unavailable: who sleeps has no session with the broker. It does not wake the worker.
  grpc::Status HintConversation(grpc::ServerContext* context, const v1::WorkerHintRequest* request,
                                v1::WorkerHintResponse* response) override;
  grpc::Status Drain(grpc::ServerContext* context, const v1::DrainRequest* request,
                     v1::DrainResponse* response) override;
  grpc::ServerUnaryReactor* GetStats(grpc::CallbackServerContext* context,
                                     const v1::GetWorkerStatsRequest* request,
                                     v1::WorkerStats* response) override;

 private:
  void ShowHealth(bool serving);
  // Wakes the worker and waits until it serves.
  absl::Status AwaitOpen(grpc::ServerContext& context);
  bool draining();
  // Once it is open.
  v1::Worker::Stub& worker();
  grpc::Status PassThrough(grpc::ServerContext& context, const v1::WorkerGenerateRequest& request,
                           grpc::ServerWriter<v1::WorkerGenerateResponse>& writer);

  const Options options_;
  std::unique_ptr<ConnectionTaker> taker_;
  std::unique_ptr<grpc::Server> server_;

  Mutex mu_;
  CondVar changed_;
  bool woken_ ABSL_GUARDED_BY(mu_) = false;
  bool draining_ ABSL_GUARDED_BY(mu_);
  int requests_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<absl::Status> outcome_ ABSL_GUARDED_BY(mu_);  // OK: open
  std::unique_ptr<v1::Worker::Stub> worker_ ABSL_GUARDED_BY(mu_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_DOORMAN_H_
