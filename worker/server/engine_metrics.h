// The engine's metrics: handles of metrics_table.h, taken once. Called by the engine thread.
#ifndef PALIMPSEST_WORKER_SERVER_ENGINE_METRICS_H_
#define PALIMPSEST_WORKER_SERVER_ENGINE_METRICS_H_

#include <array>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/metrics.h"
#include "worker/core/head_mass.h"
#include "worker/core/scheduler.h"
#include "worker/core/sequence.h"
#include "worker/core/step_durations.h"
#include "worker/core/step_plan.h"
#include "worker/core/swap_copier.h"
#include "worker/memory/memory_client.h"

namespace palimpsest {

// Sums since the start.
struct StepTotals {
  int64_t steps = 0;
  int64_t graph_steps = 0;
  absl::Duration schedule, launch, wait, commit, stream;
  // Of those steps that were measured on the device, and of those whose sampling was.
  int64_t device_steps = 0;
  absl::Duration device;
  int64_t sampling_steps = 0;
  absl::Duration sampling;
};

class EngineMetrics {
 public:
  // `metrics` must outlive the object.
  explicit EngineMetrics(Metrics& metrics);

  void OnSubmitted(const StepPlan& plan, absl::Duration schedule, absl::Duration launch);
  void OnExecuted(const StepResult& result);
  void OnCommitted(absl::Duration wait, absl::Duration commit);
  void OnDelivered(absl::Duration stream);
  void OnTransfer(const SwapEnded& transfer);
  void OnSwapStall(absl::Duration stall);
  void OnFirstToken(absl::Duration since_arrival);
  void OnNextToken(absl::Duration since_last);
  void OnFinish(FinishReason reason);
  void OnFailure(const absl::Status& status);
  void OnHeadSample(const HeadMass& mass);
  void SetLossyHeads(int32_t heads) { lossy_heads_.Set(heads); }
  // States, and counters since the last call.
  void Update(const Scheduler& scheduler, const MappedSlabs& mapped, const StepDurations& phases);

  // A GPU of the worker's; Update tells its slabs in bytes from then on.
  struct Gpu {
    int number = 0;
    Bytes slab_bytes;
    Bytes workspace;
    Bytes context;
    Bytes compute;
  };
  void AddGpu(const Gpu& gpu);

  const StepTotals& step_totals() const { return totals_; }

 private:
  Metrics& metrics_;
  prometheus::Histogram& schedule_seconds_;
  prometheus::Histogram& launch_seconds_;
  prometheus::Histogram& wait_seconds_;
  prometheus::Histogram& commit_seconds_;
  prometheus::Histogram& stream_seconds_;
  prometheus::Histogram& device_seconds_;
  prometheus::Histogram& sampling_seconds_;
  prometheus::Counter& graph_steps_;
  prometheus::Counter& eager_steps_;
  prometheus::Histogram& batch_sequences_;
  prometheus::Histogram& batch_tokens_;
  prometheus::Counter& computed_tokens_;
  prometheus::Counter& cached_tokens_;
  prometheus::Counter& generated_tokens_;
  prometheus::Counter& discarded_tokens_;
  prometheus::Counter& recomputed_preemptions_;
  prometheus::Counter& swapped_preemptions_;
  prometheus::Counter& swapped_out_;
  prometheus::Counter& swapped_in_;
  prometheus::Counter& swap_out_seconds_;
  prometheus::Counter& swap_in_seconds_;
  prometheus::Counter& swap_wait_seconds_;
  prometheus::Counter& swap_failures_;
  prometheus::Gauge& swapped_blocks_;
  struct StoreCounters {
    explicit StoreCounters(Metrics& metrics);

    prometheus::Counter& stored;
    prometheus::Counter& present;
    prometheus::Counter& refused;
    prometheus::Counter& dropped;
    prometheus::Counter& loaded;
    prometheus::Counter& recomputed;
    prometheus::Counter& retried;
    prometheus::Counter& lost;
    prometheus::Counter& bytes_out;
    prometheus::Counter& bytes_in;
    prometheus::Counter& seconds_out;
    prometheus::Counter& seconds_in;
    prometheus::Counter& first_queries;
    prometheus::Counter& promotion_queries;
    prometheus::Counter& late_answers;
    prometheus::Counter& late_loads;
    prometheus::Counter& failures_out;
    prometheus::Counter& failures_in;
  };
  StoreCounters store_;
  prometheus::Counter& head_samples_;
  std::array<prometheus::Gauge*, 4> head_mass_;  // of quarters, the coldest first
  prometheus::Gauge& lossy_heads_;
  prometheus::Gauge& running_;
  prometheus::Gauge& waiting_;
  prometheus::Histogram& time_to_first_token_;
  prometheus::Histogram& time_between_tokens_;
  prometheus::Gauge& used_blocks_;
  prometheus::Gauge& cached_blocks_;
  prometheus::Gauge& free_blocks_;
  prometheus::Gauge& parameter_slabs_;
  prometheus::Gauge& kv_slabs_;
  prometheus::Gauge& slot_slabs_;
  prometheus::Gauge& rotating_layers_;
  prometheus::Counter& rotation_stall_seconds_;
  prometheus::Counter& rotation_bytes_;
  prometheus::Gauge& decode_seconds_;
  prometheus::Gauge& prefill_seconds_;
  struct GpuSlabs {
    prometheus::Gauge* parameter_bytes = nullptr;
    prometheus::Gauge* kv_bytes = nullptr;
    prometheus::Gauge* slot_bytes = nullptr;
    Bytes slab_bytes;
  };
  std::vector<GpuSlabs> gpus_;
  void UpdateStore(const Scheduler& scheduler);

  SchedulerCounters last_;
  Offloader::Counters last_offloads_;
  StepTotals totals_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_SERVER_ENGINE_METRICS_H_
