// One Generate call: admission, a worker, and its stream turned into the client's, over as many
// workers as it takes (router/core/retry.h).
//
// Built on gRPC's callback API: a stream holds no thread, so thousands of them run on gRPC's few.
//
// Backpressure: a worker's message is read only after the previous one was written to the client,
// so a slow client costs one message here and then stops the worker's stream by flow control. A
// client that takes nothing for the stall timeout is given up.
//
// Threads: events form one chain (admitted, message read, message written, worker done), each
// started by the one before, so that the members they use need no lock. OnCancel and
// CancelIfStalled run beside the chain; what they touch is guarded.
#ifndef PALIMPSEST_ROUTER_SERVER_GENERATE_CALL_H_
#define PALIMPSEST_ROUTER_SERVER_GENERATE_CALL_H_

#include <grpcpp/support/server_callback.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/time/time.h"
#include "common/mutex.h"
#include "proto/palimpsest/v1/router.pb.h"
#include "router/server/response_builder.h"
#include "router/server/router_context.h"

namespace palimpsest::router {

class GenerateCall final : public grpc::ServerWriteReactor<v1::GenerateResponse>,
                           public std::enable_shared_from_this<GenerateCall> {
 public:
  // Owns itself until the client's call and every worker's call have ended.
  static grpc::ServerWriteReactor<v1::GenerateResponse>* Start(RouterContext& router,
                                                               grpc::CallbackServerContext* context,
                                                               const v1::GenerateRequest* request);

  ~GenerateCall() override;

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  // Cancels the call if it has been writing the same message since before `since`.
  void CancelIfStalled(absl::Time since);
  // Gives up the worker, which counts as a failed attempt, if it has neither sent a message nor
  // answered a health check since before `since`, `timeout` ago.
  void LeaveIfSilent(absl::Time since, absl::Duration timeout);

 private:
  class Attempt;

  // Why an attempt or the call failed.
  struct Failure {
    absl::Status status;
    std::optional<absl::Duration> retry_after;
  };

  GenerateCall(RouterContext& router, grpc::CallbackServerContext* context);

  void Begin(const v1::GenerateRequest& request);
  void EnterGate();
  void OnAdmitted(TicketId ticket, absl::Status status);
  void StartAttempt();
  void OnWorkerMessage(Attempt& attempt, const v1::WorkerGenerateResponse& message);
  void OnAttemptDone(Failure failure);
  void RetryOrFail(Failure failure);

  // Measures, and lets the stall timeout run.
  void BeginWrite();
  // End the call once; later calls do nothing.
  void FinishWithResponse();
  void FinishWithError(const Failure& failure);
  bool TakeEnd();
  absl::Status CancelledStatus() const;

  RouterContext& router_;
  grpc::CallbackServerContext* const context_;
  const absl::Time arrival_;
  const absl::Time deadline_;
  std::string tenant_ = "none";

  // Used by the chain of events alone.
  PreparedRequest request_;
  std::optional<ResponseBuilder> builder_;
  v1::GenerateResponse response_;
  std::vector<WorkerId> tried_;
  std::optional<Failure> last_failure_;
  std::optional<TicketId> admitted_;
  std::optional<absl::Time> last_write_;
  absl::StatusCode final_code_ = absl::StatusCode::kOk;

  Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  absl::Time writing_since_ ABSL_GUARDED_BY(mutex_) = absl::InfiniteFuture();
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<TicketId> waiting_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<Attempt> attempt_ ABSL_GUARDED_BY(mutex_);
  absl::Time heard_at_ ABSL_GUARDED_BY(mutex_);  // of the attempt: its start or last message
  std::shared_ptr<GenerateCall> self_;

  // Held while context_ is used beside the chain; never together with mutex_.
  Mutex context_mutex_;
  bool context_gone_ ABSL_GUARDED_BY(context_mutex_) = false;
};

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_GENERATE_CALL_H_
