// What the router's calls share, and the book of calls that still run.
#ifndef PALIMPSEST_ROUTER_SERVER_ROUTER_CONTEXT_H_
#define PALIMPSEST_ROUTER_SERVER_ROUTER_CONTEXT_H_

#include <grpcpp/server_context.h>

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/clock.h"
#include "common/metrics.h"
#include "common/mutex.h"
#include "router/core/admission.h"
#include "router/core/retry.h"
#include "router/server/admission_gate.h"
#include "router/server/model_catalog.h"
#include "router/server/token_file.h"
#include "router/server/worker_pool.h"

namespace palimpsest::router {

class GenerateCall;

// The Generate calls that callbacks keep alive. Thread-safe.
class CallRegistry {
 public:
  void Add(GenerateCall* call);
  void Remove(GenerateCall* call);
  void AwaitEmpty();

  // Gives up calls whose client has taken nothing since before `now` - `timeout`.
  void CancelStalled(absl::Time now, absl::Duration timeout);
  // Takes calls away from workers that have answered neither them nor a health check since before
  // `now` - `timeout`.
  void LeaveSilentWorkers(absl::Time now, absl::Duration timeout);

 private:
  std::vector<std::shared_ptr<GenerateCall>> Calls();

  Mutex mutex_;
  CondVar changed_;
  std::unordered_set<GenerateCall*> calls_ ABSL_GUARDED_BY(mutex_);
};

// Calls of HintConversation that have not ended. Thread-safe.
class HintsUnderWay {
 public:
  static constexpr int32_t kMost = 256;  // of one tenant, so that none takes another's

  // Whether there may be one more; it must End.
  bool Begin(const std::string& tenant);
  void End(const std::string& tenant);

 private:
  Mutex mutex_;
  std::map<std::string, int32_t> counts_ ABSL_GUARDED_BY(mutex_);
};

// Outlives every call. Its members are thread-safe.
struct RouterContext {
  const Clock& clock;
  Metrics& metrics;
  TokenFile& tokens;
  const ModelCatalog& models;
  const std::map<std::string, AdmissionLimits>& limits;
  AdmissionGate& gate;
  WorkerPool& workers;
  RetryPolicy retry;
  CallRegistry calls;
  HintsUnderWay hints;

  // The tenant that the call's bearer token belongs to.
  absl::StatusOr<std::string> Authenticate(const grpc::CallbackServerContext& call) const;

  // Longest sequence that can be asked for, in tokens.
  int32_t MaxSequenceTokens(const std::string& tenant, const ServedModel& model) const;
};

// InfiniteFuture if the client set none.
absl::Time DeadlineOf(const grpc::CallbackServerContext& call);

}  // namespace palimpsest::router

#endif  // PALIMPSEST_ROUTER_SERVER_ROUTER_CONTEXT_H_
