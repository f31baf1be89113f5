// Every metric of every process, in one table: what the processes register, and what the
// documentation and the dashboard are generated from. Naming follows
// https://prometheus.io/docs/practices/naming: palimpsest_PROCESS_WHAT_UNIT, base units, counters
// end in _total.
//
// To add a metric, add a row; a component gets its handle by name (metrics.h), and a name that is
// not here does not compile.
#ifndef PALIMPSEST_COMMON_METRICS_TABLE_H_
#define PALIMPSEST_COMMON_METRICS_TABLE_H_

#include <array>
#include <cstddef>
#include <string_view>

namespace palimpsest {

enum class MetricProcess { kBroker, kWorker, kRouter };
enum class MetricType { kCounter, kGauge, kHistogram };
enum class MetricUnit { kNone, kSeconds, kBytes };

// Upper bounds of a histogram's buckets, by what is measured.
enum class MetricBuckets {
  kNone,
  kShort,   // 10 us to 10 s: parts of a step, moving slabs
  kLong,    // 1 ms to 100 s: what a client waits for, restoring and packing
  kCounts,  // 1 to 1,024: sequences or tokens in a batch
};

struct MetricDescriptor {
  std::string_view name;
  MetricProcess process;
  MetricType type;
  MetricUnit unit;
  std::string_view help;
  // Names of its labels, in the order in which values are given; the rest is empty.
  std::array<std::string_view, 3> labels = {};
  MetricBuckets buckets = MetricBuckets::kNone;

  constexpr size_t label_count() const {
    size_t count = 0;
    while (count < labels.size() && !labels[count].empty()) ++count;
    return count;
  }
};

namespace metrics_internal {
using P = MetricProcess;
using T = MetricType;
using U = MetricUnit;
using B = MetricBuckets;
}  // namespace metrics_internal

// clang-format off
inline constexpr auto kMetricTable = [] {
  using namespace metrics_internal;  // NOLINT: one-letter names make the table readable
  return std::to_array<MetricDescriptor>({
    // Broker: the pool.
    {"palimpsest_broker_slabs", P::kBroker, T::kGauge, U::kNone, "Slabs of the pool by state (free, granted, revoking, cleaning, quarantined); the sum is the pool's size.", {"state"}},
    {"palimpsest_broker_slab_bytes", P::kBroker, T::kGauge, U::kBytes, "Size of one slab."},
    {"palimpsest_broker_tenant_slabs", P::kBroker, T::kGauge, U::kNone, "Slabs that a tenant holds, by role (parameter, kv, slot, workspace).", {"tenant", "role"}},
    {"palimpsest_broker_tenant_context_bytes", P::kBroker, T::kGauge, U::kBytes, "What a tenant's worker takes of a GPU beside slabs (context, kernels, graphs, communicators), by kind: allowed (kept of the pool's bytes), measured (by the worker when it started).", {"tenant", "kind"}},
    {"palimpsest_broker_tenant_freed_layers", P::kBroker, T::kGauge, U::kNone, "Layers of a tenant's model whose memory was given away while it runs: rotating layers less slots.", {"tenant"}},
    {"palimpsest_broker_tenant_floor_slabs", P::kBroker, T::kGauge, U::kNone, "Slabs that nobody may take from a tenant.", {"tenant"}},
    {"palimpsest_broker_tenant_quota_slabs", P::kBroker, T::kGauge, U::kNone, "Most slabs that a tenant may hold.", {"tenant"}},
    {"palimpsest_broker_tenant_kv_target_slabs", P::kBroker, T::kGauge, U::kNone, "KV slabs that a tenant's worker asked for.", {"tenant"}},
    // Broker: movements.
    {"palimpsest_broker_transfers_total", P::kBroker, T::kCounter, U::kNone, "Finished movements of slabs, by kind (revoke, grant, restore, scrub, rotate) and reason (kv_demand, activation, reversion, surplus, eager).", {"kind", "reason"}},
    {"palimpsest_broker_transferred_slabs_total", P::kBroker, T::kCounter, U::kNone, "Slabs moved by the finished movements.", {"kind", "reason"}},
    {"palimpsest_broker_transfer_seconds", P::kBroker, T::kHistogram, U::kSeconds, "Duration of a movement of slabs.", {"kind", "reason"}, B::kShort},
    {"palimpsest_broker_remap_candidates_total", P::kBroker, T::kCounter, U::kNone, "Tenants looked at when memory had to come from somebody, by rule (surplus_kv, inactive_parameters, cached_kv, silent_kv, rotation, kv_by_force, own_kv, best_effort_parameters, reversion) and outcome (taken, or why not); repetitions without a change count once.", {"rule", "outcome"}},
    {"palimpsest_broker_remap_slabs_total", P::kBroker, T::kCounter, U::kNone, "Slabs that decisions took, by rule; of reversion, gave back.", {"rule"}},
    {"palimpsest_broker_rotation_changes_total", P::kBroker, T::kCounter, U::kNone, "Changes of which layers rotate, by reason: kv_demand and activation free layers (or take the slots of an inactive tenant), reversion brings them back.", {"tenant", "reason"}},
    {"palimpsest_broker_rotation_stall_seconds_total", P::kBroker, T::kCounter, U::kSeconds, "Time that steps of a tenant's workers waited for rotating layers.", {"tenant"}},
    {"palimpsest_broker_link_bytes_per_second", P::kBroker, T::kGauge, U::kNone, "Speed of copies between host and GPU, measured when the broker started, by direction (to_device, from_device).", {"gpu", "direction"}},
    {"palimpsest_broker_link_bytes_total", P::kBroker, T::kCounter, U::kBytes, "What a tenant's workers copied over the link that parameters come over, of one GPU, by kind: rotation (layers into slots), restore (parameters that came back), blocks (KV that went the same way).", {"tenant", "kind"}},
    {"palimpsest_broker_tenant_link_limit_bytes_per_second", P::kBroker, T::kGauge, U::kNone, "How fast a tenant's worker may restore parameters and move blocks, so that rotating layers have what they need of the link; 0: no limit.", {"tenant"}},
    {"palimpsest_broker_revoke_deadline_misses_total", P::kBroker, T::kCounter, U::kNone, "Revokes that a worker did not answer in time; it was killed.", {"tenant"}},
    {"palimpsest_broker_kv_pressure_total", P::kBroker, T::kCounter, U::kNone, "KV targets that could not be met when they were stated.", {"tenant"}},
    {"palimpsest_broker_activations_waiting", P::kBroker, T::kGauge, U::kNone, "Activations that wait for memory."},
    {"palimpsest_broker_activations_total", P::kBroker, T::kCounter, U::kNone, "Activations by outcome (granted, refused).", {"tenant", "outcome"}},
    {"palimpsest_broker_turns_total", P::kBroker, T::kCounter, U::kNone, "Turns that a tenant had under temporal sharing.", {"tenant"}},
    {"palimpsest_broker_turn_wait_seconds", P::kBroker, T::kHistogram, U::kSeconds, "How long a tenant with requests waited for its turn.", {"tenant"}, B::kLong},
    // Broker: sessions and images.
    {"palimpsest_broker_generation", P::kBroker, T::kGauge, U::kNone, "Counts restarts of the broker on this node, from 1."},
    {"palimpsest_broker_sessions", P::kBroker, T::kGauge, U::kNone, "Sessions whose process is not known to be gone."},
    {"palimpsest_broker_attachments_total", P::kBroker, T::kCounter, U::kNone, "Attempts to attach, by outcome (attached, reattached, refused).", {"outcome"}},
    {"palimpsest_broker_descriptor_refusals_total", P::kBroker, T::kCounter, U::kNone, "Requests on the descriptor socket that were refused, by reason (identity, secret, token, protocol).", {"reason"}},
    {"palimpsest_broker_image_bytes", P::kBroker, T::kGauge, U::kBytes, "Host memory held by a tenant's parameter image; tenants with the same model share one.", {"tenant"}},
    {"palimpsest_broker_image_pack_seconds", P::kBroker, T::kHistogram, U::kSeconds, "Duration of packing a parameter image, by phase (fingerprint, pack, checksum).", {"phase"}, B::kLong},
    // Broker: blocks in tiers below T0.
    {"palimpsest_broker_tier_serving", P::kBroker, T::kGauge, U::kNone, "1 while a tier (dram, cxl, remote, nvme, directory) is used, 0 while its circuit breaker is open.", {"tier"}},
    {"palimpsest_broker_tier_breaker_openings_total", P::kBroker, T::kCounter, U::kNone, "How often a tier's circuit breaker opened.", {"tier"}},
    {"palimpsest_broker_tier_bytes", P::kBroker, T::kGauge, U::kBytes, "A tier's bytes, by kind: capacity, used (dram: chunks that have memory), quarantined (of those used, what can neither be read nor used again).", {"tier", "kind"}},
    {"palimpsest_broker_tier_bytes_per_second", P::kBroker, T::kGauge, U::kNone, "Measured bandwidth of a tier, by direction (load, store).", {"tier", "direction"}},
    {"palimpsest_broker_tier_latency_seconds", P::kBroker, T::kGauge, U::kSeconds, "Measured latency of a tier, by direction (load, store).", {"tier", "direction"}},
    {"palimpsest_broker_tier_transfers", P::kBroker, T::kGauge, U::kNone, "Transfers of a tier, by state (queued_load, queued_store, in_flight).", {"tier", "state"}},
    {"palimpsest_broker_tier_corrupt_blocks_total", P::kBroker, T::kCounter, U::kNone, "Blocks of a tier that were not served because their bytes were wrong.", {"tier"}},
    {"palimpsest_broker_blocks", P::kBroker, T::kGauge, U::kNone, "Blocks of a tenant that can be had from a tier.", {"tenant", "tier"}},
    {"palimpsest_broker_foreign_blocks", P::kBroker, T::kGauge, U::kNone, "Of those blocks, the ones that other nodes have stored in a tier that they share; they count against no budget here.", {"tenant", "tier"}},
    {"palimpsest_broker_block_bytes", P::kBroker, T::kGauge, U::kBytes, "What a tenant uses of a tier, by kind: used (with what rounding takes, and what is being written), limit; of dram also retained (of those used, what clients' hints keep there).", {"tenant", "tier", "kind"}},
    {"palimpsest_broker_block_price", P::kBroker, T::kGauge, U::kNone, "Seconds saved per byte and second that a block must be worth to be taken into a tier.", {"tenant", "tier"}},
    {"palimpsest_broker_block_moves_total", P::kBroker, T::kCounter, U::kNone, "What happened to a tenant's blocks in a tier: stored (or found, where another node stored it), removed, hit (asked for by a request and got from here), promoted (from here to dram), promotion_failed, wasted (promoted and never used), demoted (to here from above), demotion_failed; of dram also prefetched (before a request asked for it), prefetch_used, prefetch_wasted.", {"tenant", "tier", "what"}},
    {"palimpsest_broker_block_moved_bytes_total", P::kBroker, T::kCounter, U::kBytes, "The bytes of the same: hit, promoted, wasted, demoted.", {"tenant", "tier", "what"}},
    {"palimpsest_broker_block_promotion_seconds_total", P::kBroker, T::kCounter, U::kSeconds, "Time from the decision to bring a block to dram until it was there.", {"tenant", "tier"}},
    {"palimpsest_broker_block_refusals_total", P::kBroker, T::kCounter, U::kNone, "Blocks that were not taken into a tier or not brought from it, by reason (no_room, collision, no_memory, worthless, busy, broken, late).", {"tenant", "tier", "reason"}},
    // Worker: the engine.
    {"palimpsest_worker_step_seconds", P::kWorker, T::kHistogram, U::kSeconds, "Duration of the parts of a step: schedule, launch, wait (for its tokens), commit, stream (handing out tokens); on a GPU also, of some steps, device (all work of the step there) and sample (of that, choosing tokens).", {"part"}, B::kShort},
    {"palimpsest_worker_steps_total", P::kWorker, T::kCounter, U::kNone, "Steps by how they ran: graph (a captured one was replayed), eager.", {"kind"}},
    {"palimpsest_worker_batch_sequences", P::kWorker, T::kHistogram, U::kNone, "Sequences in a step.", {}, B::kCounts},
    {"palimpsest_worker_batch_tokens", P::kWorker, T::kHistogram, U::kNone, "Tokens computed in a step.", {}, B::kCounts},
    {"palimpsest_worker_tokens_total", P::kWorker, T::kCounter, U::kNone, "Tokens by kind: prompt (computed), cached (prompt tokens found in the prefix cache), generated, discarded (of sequences that had ended).", {"kind"}},
    {"palimpsest_worker_preemptions_total", P::kWorker, T::kCounter, U::kNone, "Sequences that gave up their KV blocks, by what becomes of their KV: recompute (computed again), swap (kept in host memory until it returns).", {"kind"}},
    {"palimpsest_worker_swapped_bytes_total", P::kWorker, T::kCounter, U::kBytes, "KV copied to host memory (out) and back (in), on each GPU of several.", {"direction"}},
    {"palimpsest_worker_swap_seconds_total", P::kWorker, T::kCounter, U::kSeconds, "Time that these copies took, beside the steps.", {"direction"}},
    {"palimpsest_worker_swap_wait_seconds_total", P::kWorker, T::kCounter, U::kSeconds, "Time in which nothing ran until KV had left or returned."},
    {"palimpsest_worker_swap_failures_total", P::kWorker, T::kCounter, U::kNone, "Copies of KV that failed; their sequences are computed again."},
    {"palimpsest_worker_store_blocks_total", P::kWorker, T::kCounter, U::kNone, "KV blocks by what became of them at the block store: stored (copied to tier 1), present (it had them), refused (by it), dropped (evicted before their turn), loaded (from tier 1), recomputed (tier 1 had them, computing was expected to be faster), retried (offered again, since there had been no room for them), lost (offered again, since it had them no more).", {"kind"}},
    {"palimpsest_worker_store_bytes_total", P::kWorker, T::kCounter, U::kBytes, "KV copied to the block store (out) and from it (in).", {"direction"}},
    {"palimpsest_worker_store_seconds_total", P::kWorker, T::kCounter, U::kSeconds, "Time that these copies took, checksums included, beside the steps.", {"direction"}},
    {"palimpsest_worker_store_queries_total", P::kWorker, T::kCounter, U::kNone, "Questions to the block store: first (what it has of a prompt, or that one came), promotion (again, to await what lower tiers have).", {"kind"}},
    {"palimpsest_worker_store_late_total", P::kWorker, T::kCounter, U::kNone, "What came no sooner from the block store than it could be computed, and was not awaited any longer, by kind: answer (with what lower tiers were to bring), load (a copy from tier 1).", {"kind"}},
    {"palimpsest_worker_store_failures_total", P::kWorker, T::kCounter, U::kNone, "Calls and copies that failed, or whose bytes were wrong (out: the block is not stored; in: it is computed).", {"direction"}},
    {"palimpsest_worker_head_samples_total", P::kWorker, T::kCounter, U::kNone, "Steps in which the attention mass of KV heads was sampled (engine.heads)."},
    {"palimpsest_worker_head_mass_ratio", P::kWorker, T::kGauge, U::kNone, "Smoothed share of the attention weights that far keys get, mean over a quarter of the KV heads in order of it (coldest, cool, warm, hottest).", {"quarter"}},
    {"palimpsest_worker_lossy_heads", P::kWorker, T::kGauge, U::kNone, "KV heads whose far keys are dropped (engine.heads.lossy); unless 0, what the model says is lossy."},
    {"palimpsest_worker_sequences", P::kWorker, T::kGauge, U::kNone, "Sequences by state (running, waiting).", {"state"}},
    {"palimpsest_worker_requests_total", P::kWorker, T::kCounter, U::kNone, "Finished requests by outcome: a finish reason (stop, length, cancelled) or a gRPC status code.", {"outcome"}},
    {"palimpsest_worker_time_to_first_token_seconds", P::kWorker, T::kHistogram, U::kSeconds, "Arrival of a request to its first token.", {}, B::kLong},
    {"palimpsest_worker_time_between_tokens_seconds", P::kWorker, T::kHistogram, U::kSeconds, "Time between two tokens of a sequence.", {}, B::kLong},
    // Worker: memory.
    {"palimpsest_worker_kv_blocks", P::kWorker, T::kGauge, U::kNone, "KV blocks by state (used, cached, free), and those in host memory (swapped).", {"state"}},
    {"palimpsest_worker_mapped_slabs", P::kWorker, T::kGauge, U::kNone, "Slabs mapped, by role (parameter, kv, slot: what rotating layers take turns in, or will).", {"role"}},
    {"palimpsest_worker_gpu_memory_bytes", P::kWorker, T::kGauge, U::kBytes, "GPU memory by role: slabs mapped (parameter, kv, slot, workspace) and what lies beside slabs, as measured when the worker started: context (CUDA's), compute (loaded kernels, graphs, communicators).", {"gpu", "role"}},
    {"palimpsest_worker_gate_wait_seconds", P::kWorker, T::kHistogram, U::kSeconds, "Time a step waited for the parameters of a stage.", {}, B::kShort},
    {"palimpsest_worker_fetch_seconds", P::kWorker, T::kHistogram, U::kSeconds, "Receiving the descriptors of a grant, by role (parameter, kv); part of map_seconds.", {"role"}, B::kShort},
    {"palimpsest_worker_map_seconds", P::kWorker, T::kHistogram, U::kSeconds, "Arrival of a grant to its last slab mapped, by role (parameter, kv).", {"role"}, B::kShort},
    {"palimpsest_worker_restore_seconds", P::kWorker, T::kHistogram, U::kSeconds, "Copying and verifying the parameters of a grant.", {}, B::kLong},
    {"palimpsest_worker_restored_bytes_total", P::kWorker, T::kCounter, U::kBytes, "Parameter bytes copied from the image."},
    {"palimpsest_worker_peer_image_bytes", P::kWorker, T::kGauge, U::kBytes, "What of the parameter image has a copy in another GPU's memory, of all ranks together."},
    {"palimpsest_worker_peer_filled_bytes_total", P::kWorker, T::kCounter, U::kBytes, "Bytes of the parameter image copied from host memory to another GPU, from which parameters then come."},
    {"palimpsest_worker_peer_fill_seconds_total", P::kWorker, T::kCounter, U::kSeconds, "Time that these copies took, with mapping that memory."},
    {"palimpsest_worker_rotating_layers", P::kWorker, T::kGauge, U::kNone, "Layers without memory of their own, that are copied into a slot each time they run."},
    {"palimpsest_worker_rotation_bytes_total", P::kWorker, T::kCounter, U::kBytes, "Bytes copied from the image into slots."},
    {"palimpsest_worker_rotation_stall_seconds_total", P::kWorker, T::kCounter, U::kSeconds, "Time that steps waited for rotating layers."},
    {"palimpsest_worker_phase_step_seconds", P::kWorker, T::kGauge, U::kSeconds, "Smoothed duration of a step without its waits for rotating layers, by phase: prefill (with prompt chunks), decode.", {"phase"}},
    {"palimpsest_worker_link_wait_seconds_total", P::kWorker, T::kCounter, U::kSeconds, "Time that copies were held back for rotating layers, of whatever tenant, by kind (restore, blocks).", {"kind"}},
    {"palimpsest_worker_checksum_failures_total", P::kWorker, T::kCounter, U::kNone, "Parameter slabs whose bytes did not match the image's checksum."},
    {"palimpsest_worker_broker_connected", P::kWorker, T::kGauge, U::kNone, "1 while the session with the broker stands, else 0."},
    {"palimpsest_worker_broker_reconnects_total", P::kWorker, T::kCounter, U::kNone, "Sessions brought back after the broker was lost."},
    // Router.
    {"palimpsest_router_requests_total", P::kRouter, T::kCounter, U::kNone, "Finished requests by gRPC status code.", {"tenant", "code"}},
    {"palimpsest_router_requests_in_flight", P::kRouter, T::kGauge, U::kNone, "Requests handed to a worker and not finished.", {"tenant"}},
    {"palimpsest_router_queued_requests", P::kRouter, T::kGauge, U::kNone, "Requests that wait for a worker.", {"tenant"}},
    {"palimpsest_router_queue_refusals_total", P::kRouter, T::kCounter, U::kNone, "Requests refused because the tenant's queue was full.", {"tenant"}},
    {"palimpsest_router_retries_total", P::kRouter, T::kCounter, U::kNone, "Requests sent to a worker once more before their first token.", {"tenant"}},
    {"palimpsest_router_resumes_total", P::kRouter, T::kCounter, U::kNone, "Streams that another worker continued after theirs was lost.", {"tenant"}},
    {"palimpsest_router_tokens_total", P::kRouter, T::kCounter, U::kNone, "Tokens by kind (prompt, generated).", {"tenant", "kind"}},
    {"palimpsest_router_time_to_first_token_seconds", P::kRouter, T::kHistogram, U::kSeconds, "Arrival of a request to the first token sent to the client.", {"tenant"}, B::kLong},
    {"palimpsest_router_time_between_tokens_seconds", P::kRouter, T::kHistogram, U::kSeconds, "Time between two tokens sent to the client.", {"tenant"}, B::kLong},
    {"palimpsest_router_workers", P::kRouter, T::kGauge, U::kNone, "Workers by state: healthy, draining (or no longer behind their name), unhealthy.", {"tenant", "state"}},
  });
}();
// clang-format on

// Index of the row called `name`, kMetricTable.size() if there is none.
constexpr size_t FindMetric(std::string_view name) {
  size_t i = 0;
  while (i < kMetricTable.size() && kMetricTable[i].name != name) ++i;
  return i;
}

constexpr std::string_view MetricProcessName(MetricProcess process) {
  switch (process) {
    case MetricProcess::kBroker:
      return "broker";
    case MetricProcess::kWorker:
      return "worker";
    case MetricProcess::kRouter:
      return "router";
  }
  return "";
}

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_METRICS_TABLE_H_
