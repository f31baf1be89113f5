// One Generate call: takes tokens from its stream and writes them, one message at a time.
//
// Lives until gRPC is done with the call and the engine with the stream. Thread-safe.
#ifndef PALIMPSEST_WORKER_SERVER_GENERATE_CALL_H_
#define PALIMPSEST_WORKER_SERVER_GENERATE_CALL_H_

#include <grpcpp/grpcpp.h>

#include <memory>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "common/mutex.h"
#include "proto/palimpsest/v1/worker.pb.h"
#include "worker/server/engine.h"
#include "worker/server/generation_stream.h"

namespace palimpsest {

class GenerateCall final : public grpc::ServerWriteReactor<v1::WorkerGenerateResponse>,
                           public std::enable_shared_from_this<GenerateCall> {
 public:
  // The call holds itself until OnDone. Then exactly one of Refuse and Begin.
  static std::shared_ptr<GenerateCall> Create(grpc::CallbackServerContext* context, Engine* engine);

  void Refuse(const absl::Status& status);
  // Submits the request, or refuses as the engine does.
  absl::Status Begin(SequenceRequest request, bool logprobs);

  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

 private:
  enum class Next { kNothing, kWrite, kWriteLast, kFinish };

  GenerateCall(grpc::CallbackServerContext* context, Engine* engine)
      : context_(context), engine_(engine) {}

  // Starts what can be started: the next write, or the end.
  void Pump();
  Next Choose(grpc::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void FillResponse(const GenerationStream::Batch& batch) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Abort();

  grpc::CallbackServerContext* const context_;
  Engine* const engine_;
  std::shared_ptr<GenerateCall> self_;
  // Belongs to the write in flight, if there is one.
  v1::WorkerGenerateResponse response_;

  Mutex mutex_;
  std::shared_ptr<GenerationStream> stream_ ABSL_GUARDED_BY(mutex_);
  bool logprobs_ ABSL_GUARDED_BY(mutex_) = false;
  bool writing_ ABSL_GUARDED_BY(mutex_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  bool finished_ ABSL_GUARDED_BY(mutex_) = false;  // nothing is started any more
  std::optional<GenerationStream::End> end_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_GENERATE_CALL_H_
