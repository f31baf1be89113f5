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

void ObserveAs(prometheus::Histogram& histogram, absl::Duration duration, absl::Duration& total) {
  histogram.Observe(absl::ToDoubleSeconds(duration));
  total += duration;
}

}  // namespace

EngineMetrics::StoreCounters::StoreCounters(Metrics& metrics)
    : stored(metrics.Counter<"palimpsest_worker_store_blocks_total">("stored")),
      present(metrics.Counter<"palimpsest_worker_store_blocks_total">("present")),
      refused(metrics.Counter<"palimpsest_worker_store_blocks_total">("refused")),
      dropped(metrics.Counter<"palimpsest_worker_store_blocks_total">("dropped")),
      loaded(metrics.Counter<"palimpsest_worker_store_blocks_total">("loaded")),
      recomputed(metrics.Counter<"palimpsest_worker_store_blocks_total">("recomputed")),
      retried(metrics.Counter<"palimpsest_worker_store_blocks_total">("retried")),
      lost(metrics.Counter<"palimpsest_worker_store_blocks_total">("lost")),
      bytes_out(metrics.Counter<"palimpsest_worker_store_bytes_total">("out")),
      bytes_in(metrics.Counter<"palimpsest_worker_store_bytes_total">("in")),
      seconds_out(metrics.Counter<"palimpsest_worker_store_seconds_total">("out")),
      seconds_in(metrics.Counter<"palimpsest_worker_store_seconds_total">("in")),
      first_queries(metrics.Counter<"palimpsest_worker_store_queries_total">("first")),
      promotion_queries(metrics.Counter<"palimpsest_worker_store_queries_total">("promotion")),
      late_answers(metrics.Counter<"palimpsest_worker_store_late_total">("answer")),
      late_loads(metrics.Counter<"palimpsest_worker_store_late_total">("load")),
      failures_out(metrics.Counter<"palimpsest_worker_store_failures_total">("out")),
      failures_in(metrics.Counter<"palimpsest_worker_store_failures_total">("in")) {}

EngineMetrics::EngineMetrics(Metrics& metrics)
    : metrics_(metrics),
      schedule_seconds_(metrics.Histogram<"palimpsest_worker_step_seconds">("schedule")),
      launch_seconds_(metrics.Histogram<"palimpsest_worker_step_seconds">("launch")),
      wait_seconds_(metrics.Histogram<"palimpsest_worker_step_seconds">("wait")),
      commit_seconds_(metrics.Histogram<"palimpsest_worker_step_seconds">("commit")),
      stream_seconds_(metrics.Histogram<"palimpsest_worker_step_seconds">("stream")),
      device_seconds_(metrics.Histogram<"palimpsest_worker_step_seconds">("device")),
      sampling_seconds_(metrics.Histogram<"palimpsest_worker_step_seconds">("sample")),
      graph_steps_(metrics.Counter<"palimpsest_worker_steps_total">("graph")),
      eager_steps_(metrics.Counter<"palimpsest_worker_steps_total">("eager")),
      batch_sequences_(metrics.Histogram<"palimpsest_worker_batch_sequences">()),
      batch_tokens_(metrics.Histogram<"palimpsest_worker_batch_tokens">()),
      computed_tokens_(metrics.Counter<"palimpsest_worker_tokens_total">("prompt")),
      cached_tokens_(metrics.Counter<"palimpsest_worker_tokens_total">("cached")),
      generated_tokens_(metrics.Counter<"palimpsest_worker_tokens_total">("generated")),
      discarded_tokens_(metrics.Counter<"palimpsest_worker_tokens_total">("discarded")),
      recomputed_preemptions_(metrics.Counter<"palimpsest_worker_preemptions_total">("recompute")),
      swapped_preemptions_(metrics.Counter<"palimpsest_worker_preemptions_total">("swap")),
      swapped_out_(metrics.Counter<"palimpsest_worker_swapped_bytes_total">("out")),
      swapped_in_(metrics.Counter<"palimpsest_worker_swapped_bytes_total">("in")),
      swap_out_seconds_(metrics.Counter<"palimpsest_worker_swap_seconds_total">("out")),
      swap_in_seconds_(metrics.Counter<"palimpsest_worker_swap_seconds_total">("in")),
      swap_wait_seconds_(metrics.Counter<"palimpsest_worker_swap_wait_seconds_total">()),
      swap_failures_(metrics.Counter<"palimpsest_worker_swap_failures_total">()),
      swapped_blocks_(metrics.Gauge<"palimpsest_worker_kv_blocks">("swapped")),
      store_(metrics),
      head_samples_(metrics.Counter<"palimpsest_worker_head_samples_total">()),
      head_mass_{&metrics.Gauge<"palimpsest_worker_head_mass_ratio">("coldest"),
                 &metrics.Gauge<"palimpsest_worker_head_mass_ratio">("cool"),
                 &metrics.Gauge<"palimpsest_worker_head_mass_ratio">("warm"),
                 &metrics.Gauge<"palimpsest_worker_head_mass_ratio">("hottest")},
      lossy_heads_(metrics.Gauge<"palimpsest_worker_lossy_heads">()),
      running_(metrics.Gauge<"palimpsest_worker_sequences">("running")),
      waiting_(metrics.Gauge<"palimpsest_worker_sequences">("waiting")),
      time_to_first_token_(metrics.Histogram<"palimpsest_worker_time_to_first_token_seconds">()),
      time_between_tokens_(metrics.Histogram<"palimpsest_worker_time_between_tokens_seconds">()),
      used_blocks_(metrics.Gauge<"palimpsest_worker_kv_blocks">("used")),
      cached_blocks_(metrics.Gauge<"palimpsest_worker_kv_blocks">("cached")),
      free_blocks_(metrics.Gauge<"palimpsest_worker_kv_blocks">("free")),
      parameter_slabs_(metrics.Gauge<"palimpsest_worker_mapped_slabs">("parameter")),
      kv_slabs_(metrics.Gauge<"palimpsest_worker_mapped_slabs">("kv")),
      slot_slabs_(metrics.Gauge<"palimpsest_worker_mapped_slabs">("slot")),
      rotating_layers_(metrics.Gauge<"palimpsest_worker_rotating_layers">()),
      rotation_stall_seconds_(metrics.Counter<"palimpsest_worker_rotation_stall_seconds_total">()),
      rotation_bytes_(metrics.Counter<"palimpsest_worker_rotation_bytes_total">()),
      decode_seconds_(metrics.Gauge<"palimpsest_worker_phase_step_seconds">("decode")),
      prefill_seconds_(metrics.Gauge<"palimpsest_worker_phase_step_seconds">("prefill")) {}

void EngineMetrics::OnSubmitted(const StepPlan& plan, absl::Duration schedule,
                                absl::Duration launch) {
  ObserveAs(schedule_seconds_, schedule, totals_.schedule);
  ObserveAs(launch_seconds_, launch, totals_.launch);
  size_t tokens = 0;
  for (const SequenceChunk& chunk : plan.chunks) tokens += chunk.tokens.size();
  batch_sequences_.Observe(static_cast<double>(plan.chunks.size()));
  batch_tokens_.Observe(static_cast<double>(tokens));
}

void EngineMetrics::OnExecuted(const StepResult& result) {
  const StepTimes& times = result.times;
  ++totals_.steps;
  totals_.graph_steps += result.graph ? 1 : 0;
  (result.graph ? graph_steps_ : eager_steps_).Increment();
  rotation_stall_seconds_.Increment(absl::ToDoubleSeconds(times.rotation_stall));
  rotation_bytes_.Increment(static_cast<double>(result.rotation_bytes.count()));
  if (times.device > absl::ZeroDuration()) {
    ++totals_.device_steps;
    ObserveAs(device_seconds_, times.device, totals_.device);
  }
  if (times.sampling > absl::ZeroDuration()) {
    ++totals_.sampling_steps;
    ObserveAs(sampling_seconds_, times.sampling, totals_.sampling);
  }
}

void EngineMetrics::OnCommitted(absl::Duration wait, absl::Duration commit) {
  ObserveAs(wait_seconds_, wait, totals_.wait);
  ObserveAs(commit_seconds_, commit, totals_.commit);
}

void EngineMetrics::OnDelivered(absl::Duration stream) {
  ObserveAs(stream_seconds_, stream, totals_.stream);
}

void EngineMetrics::OnTransfer(const SwapEnded& transfer) {
  const bool out = transfer.direction == SwapTransfer::Direction::kOut;
  prometheus::Counter& seconds = transfer.store ? (out ? store_.seconds_out : store_.seconds_in)
                                                : (out ? swap_out_seconds_ : swap_in_seconds_);
  seconds.Increment(absl::ToDoubleSeconds(transfer.took));
}

void EngineMetrics::OnSwapStall(absl::Duration stall) {
  swap_wait_seconds_.Increment(absl::ToDoubleSeconds(stall));
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

void EngineMetrics::Update(const Scheduler& scheduler, const MappedSlabs& mapped,
                           const StepDurations& phases) {
  const SchedulerCounters& now = scheduler.counters();
  const int64_t cached = now.cached_tokens - last_.cached_tokens;
  computed_tokens_.Increment(static_cast<double>(now.prompt_tokens - last_.prompt_tokens - cached));
  cached_tokens_.Increment(static_cast<double>(cached));
  generated_tokens_.Increment(static_cast<double>(now.generated_tokens - last_.generated_tokens));
  discarded_tokens_.Increment(static_cast<double>(now.discarded_tokens - last_.discarded_tokens));
  const int64_t swapped = now.swapped_preemptions - last_.swapped_preemptions;
  swapped_preemptions_.Increment(static_cast<double>(swapped));
  recomputed_preemptions_.Increment(
      static_cast<double>(now.preemptions - last_.preemptions - swapped));
  const Bytes block = scheduler.blocks().geometry().block_bytes;
  const auto bytes = [block](int64_t blocks) {
    return static_cast<double>((block * blocks).count());
  };
  swapped_out_.Increment(bytes(now.blocks_swapped_out - last_.blocks_swapped_out));
  swapped_in_.Increment(bytes(now.blocks_swapped_in - last_.blocks_swapped_in));
  swap_failures_.Increment(static_cast<double>(now.failed_transfers - last_.failed_transfers));
  swapped_blocks_.Set(scheduler.swap_space().used());
  UpdateStore(scheduler);
  last_ = now;
  running_.Set(scheduler.running());
  waiting_.Set(scheduler.waiting());
  used_blocks_.Set(scheduler.blocks().live_blocks());
  cached_blocks_.Set(scheduler.blocks().cached_blocks());
  free_blocks_.Set(scheduler.blocks().free_blocks());
  parameter_slabs_.Set(mapped.parameters);
  kv_slabs_.Set(mapped.kv);
  slot_slabs_.Set(mapped.slots);
  rotating_layers_.Set(mapped.rotating);
  decode_seconds_.Set(phases.decode_seconds());
  prefill_seconds_.Set(phases.prefill_seconds());
  for (const GpuSlabs& gpu : gpus_) {
    gpu.parameter_bytes->Set(static_cast<double>((gpu.slab_bytes * mapped.parameters).count()));
    gpu.kv_bytes->Set(static_cast<double>((gpu.slab_bytes * mapped.kv).count()));
    gpu.slot_bytes->Set(static_cast<double>((gpu.slab_bytes * mapped.slots).count()));
  }
}

void EngineMetrics::OnHeadSample(const HeadMass& mass) {
  head_samples_.Increment();
  const std::vector<int32_t> ranking = mass.Ranking();
  const size_t quarters = head_mass_.size();
  for (size_t quarter = 0; quarter < quarters; ++quarter) {
    const size_t first = ranking.size() * quarter / quarters;
    const size_t last = ranking.size() * (quarter + 1) / quarters;
    double sum = 0;
    for (size_t i = first; i < last; ++i) sum += mass.mass(ranking[i]);
    if (last > first) head_mass_[quarter]->Set(sum / static_cast<double>(last - first));
  }
}

void EngineMetrics::UpdateStore(const Scheduler& scheduler) {
  const auto add = [](prometheus::Counter& counter, int64_t now, int64_t before) {
    counter.Increment(static_cast<double>(now - before));
  };
  const SchedulerCounters& now = scheduler.counters();
  const Offloader::Counters offloads = scheduler.offload_counters();
  add(store_.stored, offloads.stored, last_offloads_.stored);
  add(store_.present, offloads.present, last_offloads_.present);
  add(store_.refused, offloads.refused, last_offloads_.refused);
  add(store_.dropped, offloads.dropped, last_offloads_.dropped);
  add(store_.loaded, now.blocks_loaded, last_.blocks_loaded);
  add(store_.recomputed, now.blocks_recomputed, last_.blocks_recomputed);
  add(store_.retried, offloads.retried, last_offloads_.retried);
  add(store_.lost, offloads.lost, last_offloads_.lost);
  const int64_t block = scheduler.blocks().geometry().block_bytes.count();
  add(store_.bytes_out, block * offloads.stored, block * last_offloads_.stored);
  add(store_.bytes_in, block * now.blocks_loaded, block * last_.blocks_loaded);
  add(store_.promotion_queries, now.promotions_awaited, last_.promotions_awaited);
  add(store_.first_queries, now.store_queries - now.promotions_awaited,
      last_.store_queries - last_.promotions_awaited);
  add(store_.late_answers, now.late_answers, last_.late_answers);
  add(store_.late_loads, now.late_loads, last_.late_loads);
  add(store_.failures_out, offloads.failed, last_offloads_.failed);
  add(store_.failures_in, now.failed_loads, last_.failed_loads);
  last_offloads_ = offloads;
}

void EngineMetrics::AddGpu(const Gpu& gpu) {
  const std::string number = std::to_string(gpu.number);
  const auto bytes = [&](const char* role) {
    return &metrics_.Gauge<"palimpsest_worker_gpu_memory_bytes">(number, role);
  };
  const auto set = [&](const char* role, Bytes value) {
    bytes(role)->Set(static_cast<double>(value.count()));
  };
  set("workspace", gpu.workspace);
  set("context", gpu.context);
  set("compute", gpu.compute);
  gpus_.push_back({bytes("parameter"), bytes("kv"), bytes("slot"), gpu.slab_bytes});
}

}  // namespace palimpsest
