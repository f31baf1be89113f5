#include "worker/server/engine_metrics.h"

#include <string>

namespace palimpsest {
namespace {

const char* Outcome(FinishReason reason) {
  switch (reason) {
    case FinishReason::kStopToken:
    case FinishReason::kStopString:
      return "stop";
    case FinishReason::kLength:
      return "length";
    case FinishReason::kCancelled:
      return "cancelled";
  }
  return "";
}

}  // namespace

EngineMetrics::EngineMetrics(Metrics& metrics)
    : metrics_(metrics),
      schedule_seconds_(metrics.Histogram<"palimpsest_worker_step_seconds">("schedule")),
      submit_seconds_(metrics.Histogram<"palimpsest_worker_step_seconds">("submit")),
      wait_seconds_(metrics.Histogram<"palimpsest_worker_step_seconds">("wait")),
      commit_seconds_(metrics.Histogram<"palimpsest_worker_step_seconds">("commit")),
      stream_seconds_(metrics.Histogram<"palimpsest_worker_step_seconds">("stream")),
      batch_sequences_(metrics.Histogram<"palimpsest_worker_batch_sequences">()),
      batch_tokens_(metrics.Histogram<"palimpsest_worker_batch_tokens">()),
      computed_tokens_(metrics.Counter<"palimpsest_worker_tokens_total">("prompt")),
      cached_tokens_(metrics.Counter<"palimpsest_worker_tokens_total">("cached")),
      generated_tokens_(metrics.Counter<"palimpsest_worker_tokens_total">("generated")),
      discarded_tokens_(metrics.Counter<"palimpsest_worker_tokens_total">("discarded")),
      preemptions_(metrics.Counter<"palimpsest_worker_preemptions_total">()),
      running_(metrics.Gauge<"palimpsest_worker_sequences">("running")),
      waiting_(metrics.Gauge<"palimpsest_worker_sequences">("waiting")),
      time_to_first_token_(metrics.Histogram<"palimpsest_worker_time_to_first_token_seconds">()),
      time_between_tokens_(metrics.Histogram<"palimpsest_worker_time_between_tokens_seconds">()),
      used_blocks_(metrics.Gauge<"palimpsest_worker_kv_blocks">("used")),
      cached_blocks_(metrics.Gauge<"palimpsest_worker_kv_blocks">("cached")),
      free_blocks_(metrics.Gauge<"palimpsest_worker_kv_blocks">("free")),
      parameter_slabs_(metrics.Gauge<"palimpsest_worker_mapped_slabs">("parameter")),
      kv_slabs_(metrics.Gauge<"palimpsest_worker_mapped_slabs">("kv")) {}

void EngineMetrics::OnSubmitted(const StepPlan& plan, absl::Duration schedule,
                                absl::Duration submit) {
  schedule_seconds_.Observe(absl::ToDoubleSeconds(schedule));
  submit_seconds_.Observe(absl::ToDoubleSeconds(submit));
  size_t tokens = 0;
  for (const SequenceChunk& chunk : plan.chunks) tokens += chunk.tokens.size();
  batch_sequences_.Observe(static_cast<double>(plan.chunks.size()));
  batch_tokens_.Observe(static_cast<double>(tokens));
}

void EngineMetrics::OnCommitted(absl::Duration wait, absl::Duration commit) {
  wait_seconds_.Observe(absl::ToDoubleSeconds(wait));
  commit_seconds_.Observe(absl::ToDoubleSeconds(commit));
}

void EngineMetrics::OnDelivered(absl::Duration stream) {
  stream_seconds_.Observe(absl::ToDoubleSeconds(stream));
}

void EngineMetrics::OnFirstToken(absl::Duration since_arrival) {
  time_to_first_token_.Observe(absl::ToDoubleSeconds(since_arrival));
}

void EngineMetrics::OnNextToken(absl::Duration since_last) {
  time_between_tokens_.Observe(absl::ToDoubleSeconds(since_last));
}

void EngineMetrics::OnFinish(FinishReason reason) {
  metrics_.Counter<"palimpsest_worker_requests_total">(Outcome(reason)).Increment();
}

void EngineMetrics::OnFailure(const absl::Status& status) {
  metrics_.Counter<"palimpsest_worker_requests_total">(absl::StatusCodeToString(status.code()))
      .Increment();
}

void EngineMetrics::Update(const Scheduler& scheduler, const MappedSlabs& mapped) {
  const SchedulerCounters& now = scheduler.counters();
  const int64_t cached = now.cached_tokens - last_.cached_tokens;
  computed_tokens_.Increment(static_cast<double>(now.prompt_tokens - last_.prompt_tokens - cached));
  cached_tokens_.Increment(static_cast<double>(cached));
  generated_tokens_.Increment(static_cast<double>(now.generated_tokens - last_.generated_tokens));
  discarded_tokens_.Increment(static_cast<double>(now.discarded_tokens - last_.discarded_tokens));
  preemptions_.Increment(static_cast<double>(now.preemptions - last_.preemptions));
  last_ = now;
  running_.Set(scheduler.running());
  waiting_.Set(scheduler.waiting());
  used_blocks_.Set(scheduler.blocks().live_blocks());
  cached_blocks_.Set(scheduler.blocks().cached_blocks());
  free_blocks_.Set(scheduler.blocks().free_blocks());
  parameter_slabs_.Set(mapped.parameters);
  kv_slabs_.Set(mapped.kv);
}

}  // namespace palimpsest
