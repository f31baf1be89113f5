// The engine's metrics: handles of metrics_table.h, taken once. Called by the engine thread.
#ifndef PALIMPSEST_WORKER_SERVER_ENGINE_METRICS_H_
#define PALIMPSEST_WORKER_SERVER_ENGINE_METRICS_H_

#include <array>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/metrics.h"
#include "worker/core/scheduler.h"
#include "worker/core/sequence.h"
#include "worker/core/step_plan.h"
#include "worker/memory/memory_client.h"

namespace palimpsest {

class EngineMetrics {
 public:
  // `metrics` must outlive the object.
  explicit EngineMetrics(Metrics& metrics);

  void OnSubmitted(const StepPlan& plan, absl::Duration schedule, absl::Duration submit);
  void OnCommitted(absl::Duration wait, absl::Duration commit);
  void OnDelivered(absl::Duration stream);
  void OnFirstToken(absl::Duration since_arrival);
  void OnNextToken(absl::Duration since_last);
  void OnFinish(FinishReason reason);
  void OnFailure(const absl::Status& status);
  // States, and counters since the last call.
  void Update(const Scheduler& scheduler, const MappedSlabs& mapped);

 private:
  Metrics& metrics_;
  prometheus::Histogram& schedule_seconds_;
  prometheus::Histogram& submit_seconds_;
  prometheus::Histogram& wait_seconds_;
  prometheus::Histogram& commit_seconds_;
  prometheus::Histogram& stream_seconds_;
  prometheus::Histogram& batch_sequences_;
  prometheus::Histogram& batch_tokens_;
  prometheus::Counter& computed_tokens_;
  prometheus::Counter& cached_tokens_;
  prometheus::Counter& generated_tokens_;
  prometheus::Counter& discarded_tokens_;
  prometheus::Counter& preemptions_;
  prometheus::Gauge& running_;
  prometheus::Gauge& waiting_;
  prometheus::Histogram& time_to_first_token_;
  prometheus::Histogram& time_between_tokens_;
  prometheus::Gauge& used_blocks_;
  prometheus::Gauge& cached_blocks_;
  prometheus::Gauge& free_blocks_;
  prometheus::Gauge& parameter_slabs_;
  prometheus::Gauge& kv_slabs_;
  SchedulerCounters last_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_ENGINE_METRICS_H_
