// A worker's calls to the block store of its broker, beside the threads that start them, and the
// sessions that prove them.
//
// Ownership: a call keeps its session. Whoever starts calls outlives Shutdown, which is to come
// before the destruction.
// Threads: safe. Nothing but Shutdown blocks; a call's `done` comes on gRPC's threads, before or
// after Start returns, and may start another one.
#ifndef PALIMPSEST_WORKER_BLOCKS_STORE_CALLS_H_
#define PALIMPSEST_WORKER_BLOCKS_STORE_CALLS_H_

#include <grpcpp/grpcpp.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_set.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/grpc_status.h"
#include "common/grpc_time.h"
#include "common/mutex.h"
#include "proto/palimpsest/v1/block_store.grpc.pb.h"
#include "worker/memory/arena_link.h"

namespace palimpsest {

class StoreCalls {
 public:
  struct Session {
    uint64_t epoch = 0;
    palimpsest::v1::BlockSession proof;
    std::unique_ptr<palimpsest::v1::BlockStore::Stub> stub;
  };
  using SessionPtr = std::shared_ptr<const Session>;

  StoreCalls() = default;
  ~StoreCalls();
  StoreCalls(const StoreCalls&) = delete;
  StoreCalls& operator=(const StoreCalls&) = delete;

  // `address`: gRPC target of the broker, over a connection of the session's own.
  SessionPtr Open(const std::string& address, const ArenaSession& session);

  template <typename Request, typename Response>
  void Start(const SessionPtr& session, Request request, absl::Duration timeout,
             void (*start)(palimpsest::v1::BlockStore::Stub&, grpc::ClientContext*, const Request*,
                           Response*, std::function<void(grpc::Status)>),
             std::function<void(const absl::Status&, const Response&)> done);

  // Those that are under way.
  void Cancel();
  // And waits for them, and for those that are started meanwhile, which end at once.
  void Shutdown();

 private:
  void Begin(grpc::ClientContext* context);
  void Finish(grpc::ClientContext* context);
  void Leave();

  Mutex mu_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mu_) = false;
  int open_ ABSL_GUARDED_BY(mu_) = 0;
  absl::flat_hash_set<grpc::ClientContext*> cancellable_ ABSL_GUARDED_BY(mu_);
  // All that calls may use: a channel must not end on a thread of gRPC's that serves its callbacks.
  std::vector<SessionPtr> sessions_ ABSL_GUARDED_BY(mu_);
};

template <typename Request, typename Response>
void StoreCalls::Start(const SessionPtr& session, Request request, absl::Duration timeout,
                       void (*start)(palimpsest::v1::BlockStore::Stub&, grpc::ClientContext*,
                                     const Request*, Response*, std::function<void(grpc::Status)>),
                       std::function<void(const absl::Status&, const Response&)> done) {
  struct Call {
    grpc::ClientContext context;
    SessionPtr session;
    Request request;
    Response response;
  };
  auto call = std::make_shared<Call>();
  call->session = session;
  call->request = std::move(request);
  *call->request.mutable_session() = call->session->proof;
  call->context.set_deadline(GrpcTimeout(timeout));
  Begin(&call->context);
  Call& started = *call;
  start(*started.session->stub, &started.context, &started.request, &started.response,
        [this, call = std::move(call), done = std::move(done)](const grpc::Status& status) mutable {
          done(FromGrpcStatus(status), call->response);
          Finish(&call->context);
          // What they hold of the channel goes before whoever waits for this call.
          done = nullptr;
          call.reset();
          Leave();
        });
}

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_BLOCKS_STORE_CALLS_H_
