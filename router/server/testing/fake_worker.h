// A worker whose streams the test scripts, and a TCP proxy that can be cut, for real deaths of
// connections.
#ifndef PALIMPSEST_ROUTER_SERVER_TESTING_FAKE_WORKER_H_
#define PALIMPSEST_ROUTER_SERVER_TESTING_FAKE_WORKER_H_

#include <grpcpp/server.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "common/mutex.h"
#include "common/testing/eventually.h"
#include "proto/palimpsest/v1/worker.grpc.pb.h"

namespace palimpsest::router::testing {

// Longest that a test waits for something that must happen.
inline constexpr absl::Duration kPatience = absl::Seconds(20);

// A message of one token per byte of `text`.
v1::WorkerGenerateResponse Tokens(const std::string& text);
// The same as the last message.
v1::WorkerGenerateResponse LastTokens(const std::string& text, v1::FinishReason reason);

// One Generate call that reached the worker. Thread-safe.
class FakeStream : public grpc::ServerWriteReactor<v1::WorkerGenerateResponse> {
 public:
  FakeStream(grpc::CallbackServerContext* context, const v1::WorkerGenerateRequest& request)
      : context_(context), request_(request) {}

  const v1::WorkerGenerateRequest& request() const { return request_; }

  void Send(v1::WorkerGenerateResponse message);
  // After everything sent before. `retry_after_ms` < 0 sends no hint.
  void End(grpc::Status status, int retry_after_ms = -1);
  bool AwaitCancelled();
  // Messages that gRPC took from the worker.
  int written() const;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  std::shared_ptr<FakeStream> self;

 private:
  void Advance();

  grpc::CallbackServerContext* const context_;
  const v1::WorkerGenerateRequest request_;
  mutable Mutex mutex_;
  CondVar changed_;
  std::deque<v1::WorkerGenerateResponse> queue_ ABSL_GUARDED_BY(mutex_);
  std::optional<grpc::Status> end_ ABSL_GUARDED_BY(mutex_);
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  int written_ ABSL_GUARDED_BY(mutex_) = 0;
};

class FakeWorker : public v1::Worker::CallbackService {
 public:
  FakeWorker(std::string tenant, std::string model);
  ~FakeWorker() override;

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }

  // What to do with each call as it arrives; without a handler the test takes it by AwaitCall.
  void SetHandler(std::function<void(FakeStream&)> handler);
  // The next call that came; null if none did.
  std::shared_ptr<FakeStream> AwaitCall();
  int calls() const { return calls_; }
  std::string last_authorization() const;
  bool draining() const { return draining_; }

  // Of calls of GetStats every second one is cancelled, as by a server that shuts down.
  void CancelEverySecondPoll() { cancels_polls_ = true; }
  int polls() const { return polls_; }

  void SetBlocksOfHints(std::optional<uint64_t> blocks);
  v1::WorkerHintRequest last_hint() const;
  // From now on hints are not answered until ReleaseHints or Stop.
  void HoldHints();
  void ReleaseHints();
  size_t held_hints() const;

  void SetToken(std::string token);
  void Stop();

  grpc::ServerWriteReactor<v1::WorkerGenerateResponse>* Generate(
      grpc::CallbackServerContext* context, const v1::WorkerGenerateRequest* request) override;
  // Answers with `blocks`, or fails if there are none.
  grpc::ServerUnaryReactor* HintConversation(grpc::CallbackServerContext* context,
                                             const v1::WorkerHintRequest* request,
                                             v1::WorkerHintResponse* response) override;
  grpc::ServerUnaryReactor* Drain(grpc::CallbackServerContext* context, const v1::DrainRequest*,
                                  v1::DrainResponse*) override;
  grpc::ServerUnaryReactor* GetStats(grpc::CallbackServerContext* context,
                                     const v1::GetWorkerStatsRequest*,
                                     v1::WorkerStats* response) override;

 private:
  struct Hint {
    grpc::ServerUnaryReactor* reactor;
    v1::WorkerHintResponse* response;
  };

  bool Authorized(const grpc::CallbackServerContext& context);
  void Answer(const Hint& hint);

  const std::string tenant_;
  const std::string model_;
  std::atomic<int> calls_{0};
  std::atomic<bool> draining_{false};
  std::atomic<bool> cancels_polls_{false};
  std::atomic<int> polls_{0};
  mutable Mutex mutex_;
  CondVar changed_;
  std::function<void(FakeStream&)> handler_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<FakeStream>> arrived_ ABSL_GUARDED_BY(mutex_);
  std::string token_ ABSL_GUARDED_BY(mutex_);
  std::string authorization_ ABSL_GUARDED_BY(mutex_);
  std::optional<uint64_t> hint_blocks_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::WorkerHintRequest hint_ ABSL_GUARDED_BY(mutex_);
  bool holds_hints_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<Hint> held_hints_ ABSL_GUARDED_BY(mutex_);
  int port_ = 0;
  std::unique_ptr<grpc::Server> server_;
};

// Forwards one TCP port to another until it is cut: then every connection is reset and new ones are
// refused; or until it freezes: then connections stand and nothing passes, as if the target's
// process were stopped.
class CuttableProxy {
 public:
  explicit CuttableProxy(int target_port);
  ~CuttableProxy();

  std::string address() const { return "127.0.0.1:" + std::to_string(port_); }
  void Cut();
  void Freeze() { frozen_ = true; }

 private:
  void AcceptLoop();
  void Pump(int from, int to);

  const int target_port_;
  int listener_ = -1;
  int port_ = 0;
  Mutex mutex_;
  std::vector<int> sockets_ ABSL_GUARDED_BY(mutex_);
  std::vector<std::thread> pumps_ ABSL_GUARDED_BY(mutex_);
  bool cut_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<bool> frozen_{false};
  std::thread acceptor_;
};

}  // namespace palimpsest::router::testing

#endif  // PALIMPSEST_ROUTER_SERVER_TESTING_FAKE_WORKER_H_
