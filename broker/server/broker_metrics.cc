#include "broker/server/broker_metrics.h"

#include <algorithm>
#include <map>

namespace palimpsest {

absl::string_view TransferKindName(TransferKind kind) {
  switch (kind) {
    case TransferKind::kRevoke:
      return "revoke";
    case TransferKind::kGrant:
      return "grant";
    case TransferKind::kRestore:
      return "restore";
    case TransferKind::kClean:
      return "scrub";
    case TransferKind::kRotate:
      return "rotate";
  }
  return "";
}

void BrokerMetrics::Attached(AttachOutcome outcome) {
  metrics_
      .Counter<"palimpsest_broker_attachments_total">(
          outcome == AttachOutcome::kAttached     ? "attached"
          : outcome == AttachOutcome::kReattached ? "reattached"
                                                  : "refused")
      .Increment();
}

void BrokerMetrics::Moved(const TransferFinished& transfer, const std::string& tenant) {
  const std::string kind(TransferKindName(transfer.kind));
  const std::string reason(MoveReasonName(transfer.reason));
  metrics_.Counter<"palimpsest_broker_transfers_total">(kind, reason).Increment();
  metrics_.Counter<"palimpsest_broker_transferred_slabs_total">(kind, reason)
      .Increment(transfer.slabs);
  metrics_.Histogram<"palimpsest_broker_transfer_seconds">(kind, reason)
      .Observe(absl::ToDoubleSeconds(transfer.duration));
  if (transfer.kind == TransferKind::kRotate) {
    metrics_.Counter<"palimpsest_broker_rotation_changes_total">(tenant, reason).Increment();
  }
  if (transfer.kind == TransferKind::kGrant && transfer.reason == MoveReason::kActivation) {
    metrics_.Counter<"palimpsest_broker_activations_total">(tenant, "granted").Increment();
  }
}

void BrokerMetrics::TurnBegan(const SendTakeTurn& turn, const std::string& tenant) {
  metrics_.Counter<"palimpsest_broker_turns_total">(tenant).Increment();
  metrics_.Histogram<"palimpsest_broker_turn_wait_seconds">(tenant).Observe(
      absl::ToDoubleSeconds(turn.waited));
}

void BrokerMetrics::KvPressure(const std::string& tenant) {
  metrics_.Counter<"palimpsest_broker_kv_pressure_total">(tenant).Increment();
}

void BrokerMetrics::ActivationRefused(const std::string& tenant) {
  metrics_.Counter<"palimpsest_broker_activations_total">(tenant, "refused").Increment();
}

void BrokerMetrics::RevokeDeadlineMissed(const std::string& tenant) {
  metrics_.Counter<"palimpsest_broker_revoke_deadline_misses_total">(tenant).Increment();
}

void BrokerMetrics::LinkMeasured(int gpu, const SlabDevice::Link& link) {
  const auto set = [&](const char* direction, double speed) {
    metrics_.Gauge<"palimpsest_broker_link_bytes_per_second">(std::to_string(gpu), direction)
        .Set(speed);
  };
  set("to_device", link.to_device);
  set("from_device", link.from_device);
}

void BrokerMetrics::ImagePhase(absl::string_view phase, absl::Duration duration) {
  metrics_.Histogram<"palimpsest_broker_image_pack_seconds">(std::string(phase))
      .Observe(absl::ToDoubleSeconds(duration));
}

void BrokerMetrics::AdvanceTo(prometheus::Counter& counter, double total) {
  const double missing = total - counter.Value();
  if (missing > 0) counter.Increment(missing);
}

void BrokerMetrics::AddWorkerTotals(const v1::TenantMemory& tenant) {
  WorkerTotals& seen = workers_[tenant.tenant()];
  const v1::Report& load = tenant.load();
  const WorkerTotals now{.pid = tenant.pid(),
                         .stall_seconds = load.rotation_stall_seconds(),
                         .rotation_bytes = static_cast<double>(load.rotation_bytes()),
                         .restored_bytes = static_cast<double>(load.restored_bytes()),
                         .block_bytes = static_cast<double>(load.block_bytes())};
  // A worker that has attached but not reported says nothing yet.
  if (now.pid == 0 || now.rotation_bytes + now.restored_bytes + now.block_bytes == 0) return;
  if (now.pid != seen.pid) seen = WorkerTotals{.pid = now.pid};
  metrics_.Counter<"palimpsest_broker_rotation_stall_seconds_total">(tenant.tenant())
      .Increment(std::max(now.stall_seconds - seen.stall_seconds, 0.0));
  const auto add = [&](const char* kind, double bytes, double before) {
    metrics_.Counter<"palimpsest_broker_link_bytes_total">(tenant.tenant(), kind)
        .Increment(std::max(bytes - before, 0.0));
  };
  add("rotation", now.rotation_bytes, seen.rotation_bytes);
  add("restore", now.restored_bytes, seen.restored_bytes);
  add("blocks", now.block_bytes, seen.block_bytes);
  seen = now;
}

void BrokerMetrics::Refresh(const v1::GetStatusResponse& status,
                            const DescriptorServerStats& descriptors, size_t sessions) {
  MutexLock lock(&refresh_mu_);
  Metrics& m = metrics_;
  m.Gauge<"palimpsest_broker_slabs">("free").Set(status.free_slabs());
  m.Gauge<"palimpsest_broker_slabs">("granted").Set(status.granted_slabs());
  m.Gauge<"palimpsest_broker_slabs">("revoking").Set(status.revoking_slabs());
  m.Gauge<"palimpsest_broker_slabs">("cleaning").Set(status.cleaning_slabs());
  m.Gauge<"palimpsest_broker_slabs">("quarantined").Set(status.quarantined_slabs());
  m.Gauge<"palimpsest_broker_slab_bytes">().Set(static_cast<double>(status.slab_bytes()));
  m.Gauge<"palimpsest_broker_generation">().Set(status.broker_generation());
  m.Gauge<"palimpsest_broker_sessions">().Set(static_cast<double>(sessions));
  double waiting = 0;
  for (const v1::TenantMemory& tenant : status.tenants()) {
    const std::string& name = tenant.tenant();
    m.Gauge<"palimpsest_broker_tenant_slabs">(name, "parameter").Set(tenant.parameter_slabs());
    m.Gauge<"palimpsest_broker_tenant_slabs">(name, "kv").Set(tenant.kv_slabs());
    m.Gauge<"palimpsest_broker_tenant_slabs">(name, "slot").Set(tenant.slot_slabs());
    m.Gauge<"palimpsest_broker_tenant_slabs">(name, "workspace").Set(tenant.workspace_slabs());
    m.Gauge<"palimpsest_broker_tenant_context_bytes">(name, "allowed")
        .Set(static_cast<double>(tenant.context_allowance_bytes()));
    m.Gauge<"palimpsest_broker_tenant_context_bytes">(name, "measured")
        .Set(static_cast<double>(tenant.load().context_bytes()));
    m.Gauge<"palimpsest_broker_tenant_freed_layers">(name).Set(tenant.freed_layers());
    m.Gauge<"palimpsest_broker_tenant_link_limit_bytes_per_second">(name).Set(
        tenant.link_limit_bytes_per_second());
    AddWorkerTotals(tenant);
    m.Gauge<"palimpsest_broker_tenant_floor_slabs">(name).Set(tenant.floor_slabs());
    m.Gauge<"palimpsest_broker_tenant_quota_slabs">(name).Set(tenant.quota_slabs());
    m.Gauge<"palimpsest_broker_tenant_kv_target_slabs">(name).Set(tenant.kv_target_slabs());
    m.Gauge<"palimpsest_broker_image_bytes">(name).Set(
        tenant.fingerprint().empty()
            ? 0
            : static_cast<double>(tenant.image_slabs()) * static_cast<double>(status.slab_bytes()));
    waiting += tenant.activation_waiting() ? 1 : 0;
  }
  m.Gauge<"palimpsest_broker_activations_waiting">().Set(waiting);
  for (const v1::TierMemory& tier : status.tiers()) RefreshTier(tier);
  const auto refused = [&m](const char* reason) -> prometheus::Counter& {
    return m.Counter<"palimpsest_broker_descriptor_refusals_total">(reason);
  };
  AdvanceTo(refused("identity"), static_cast<double>(descriptors.identity_refusals.load()));
  AdvanceTo(refused("secret"), static_cast<double>(descriptors.secret_refusals.load()));
  AdvanceTo(refused("token"), static_cast<double>(descriptors.token_refusals.load()));
  AdvanceTo(refused("protocol"), static_cast<double>(descriptors.protocol_refusals.load()));
}

void BrokerMetrics::RefreshTier(const v1::TierMemory& tier) {
  Metrics& m = metrics_;
  const std::string& name = tier.tier();
  const auto number = [](uint64_t value) { return static_cast<double>(value); };
  m.Gauge<"palimpsest_broker_tier_serving">(name).Set(tier.serving() ? 1 : 0);
  AdvanceTo(m.Counter<"palimpsest_broker_tier_breaker_openings_total">(name),
            number(tier.breaker_openings()));
  AdvanceTo(m.Counter<"palimpsest_broker_tier_corrupt_blocks_total">(name),
            number(tier.corrupt_blocks()));
  const auto bytes = [&](const char* kind, uint64_t value) {
    m.Gauge<"palimpsest_broker_tier_bytes">(name, kind).Set(number(value));
  };
  bytes("capacity", tier.capacity_bytes());
  bytes("used", tier.used_bytes());
  bytes("quarantined", tier.quarantined_bytes());
  const auto speed = [&](const char* direction, double latency, double rate) {
    m.Gauge<"palimpsest_broker_tier_latency_seconds">(name, direction).Set(latency);
    m.Gauge<"palimpsest_broker_tier_bytes_per_second">(name, direction).Set(rate);
  };
  speed("load", tier.load_latency_seconds(), tier.load_bytes_per_second());
  speed("store", tier.store_latency_seconds(), tier.store_bytes_per_second());
  const auto transfers = [&](const char* state, uint32_t value) {
    m.Gauge<"palimpsest_broker_tier_transfers">(name, state).Set(value);
  };
  transfers("queued_load", tier.queued_loads());
  transfers("queued_store", tier.queued_stores());
  transfers("in_flight", tier.in_flight());
  for (const v1::TenantTier& tenant : tier.tenants()) RefreshBlocks(name, tenant);
}

void BrokerMetrics::RefreshBlocks(const std::string& tier, const v1::TenantTier& tenant) {
  Metrics& m = metrics_;
  const std::string& name = tenant.tenant();
  const auto number = [](uint64_t value) { return static_cast<double>(value); };
  m.Gauge<"palimpsest_broker_blocks">(name, tier).Set(number(tenant.blocks()));
  m.Gauge<"palimpsest_broker_block_bytes">(name, tier, "used").Set(number(tenant.used_bytes()));
  m.Gauge<"palimpsest_broker_block_bytes">(name, tier, "limit").Set(number(tenant.limit_bytes()));
  m.Gauge<"palimpsest_broker_block_price">(name, tier).Set(tenant.price());
  const auto moves = [&](const char* what, uint64_t count) {
    AdvanceTo(m.Counter<"palimpsest_broker_block_moves_total">(name, tier, what), number(count));
  };
  moves("stored", tenant.stored_blocks());
  moves("removed", tenant.removed_blocks());
  moves("hit", tenant.hit_blocks());
  moves("promoted", tenant.promoted_blocks());
  moves("promotion_failed", tenant.failed_promotions());
  moves("wasted", tenant.wasted_blocks());
  moves("demoted", tenant.demoted_blocks());
  moves("demotion_failed", tenant.failed_demotions());
  if (tier == "dram") {
    moves("prefetched", tenant.prefetched_blocks());
    moves("prefetch_used", tenant.prefetched_used_blocks());
    moves("prefetch_wasted", tenant.prefetched_wasted_blocks());
  }
  const auto moved = [&](const char* what, uint64_t count) {
    AdvanceTo(m.Counter<"palimpsest_broker_block_moved_bytes_total">(name, tier, what),
              number(count));
  };
  moved("hit", tenant.hit_bytes());
  moved("promoted", tenant.promoted_bytes());
  moved("wasted", tenant.wasted_bytes());
  moved("demoted", tenant.demoted_bytes());
  AdvanceTo(m.Counter<"palimpsest_broker_block_promotion_seconds_total">(name, tier),
            tenant.promotion_seconds());
  for (const v1::TierRefusals& refusals : tenant.refusals()) {
    AdvanceTo(m.Counter<"palimpsest_broker_block_refusals_total">(name, tier, refusals.reason()),
              number(refusals.blocks()));
  }
}

void BrokerMetrics::ForeignBlocks(const std::string& tenant, const std::string& tier,
                                  uint64_t blocks) {
  metrics_.Gauge<"palimpsest_broker_foreign_blocks">(tenant, tier).Set(static_cast<double>(blocks));
}

void BrokerMetrics::RetainedBytes(const std::string& tenant, Bytes retained) {
  metrics_.Gauge<"palimpsest_broker_block_bytes">(tenant, "dram", "retained")
      .Set(static_cast<double>(retained.count()));
}

void BrokerMetrics::RefreshRemaps(const v1::GetRemapLogResponse& log) {
  MutexLock lock(&refresh_mu_);
  std::map<std::string, uint64_t> slabs;
  for (const v1::RemapTotal& total : log.totals()) {
    AdvanceTo(
        metrics_.Counter<"palimpsest_broker_remap_candidates_total">(total.rule(), total.outcome()),
        static_cast<double>(total.candidates()));
    slabs[total.rule()] += total.slabs();
  }
  for (const auto& [rule, count] : slabs) {
    AdvanceTo(metrics_.Counter<"palimpsest_broker_remap_slabs_total">(rule),
              static_cast<double>(count));
  }
}

}  // namespace palimpsest
