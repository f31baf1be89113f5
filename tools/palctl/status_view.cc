#include "tools/palctl/status_view.h"

#include <map>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/strip.h"
#include "common/bytes.h"
#include "tools/palctl/text_table.h"

namespace palimpsest::palctl {
namespace {

using nlohmann::json;

std::string RoleName(v1::SlabRole role) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::SlabRole_Name(role), "SLAB_ROLE_"));
}

std::string KindName(v1::Transfer::Kind kind) {
  return absl::AsciiStrToLower(absl::StripPrefix(v1::Transfer::Kind_Name(kind), "KIND_"));
}

json TenantJson(const v1::TenantMemory& t) {
  return {{"tenant", t.tenant()},
          {"priority", t.priority()},
          {"pinned", t.pinned()},
          {"attached", t.attached()},
          {"pid", t.pid()},
          {"active", t.load().active()},
          {"running_sequences", t.load().running_sequences()},
          {"waiting_sequences", t.load().waiting_sequences()},
          {"kv_slabs_used", t.load().kv_slabs_used()},
          {"kv_slabs_cached", t.load().kv_slabs_cached()},
          {"kv_slabs_free", t.load().kv_slabs_free()},
          {"parameter_slabs", t.parameter_slabs()},
          {"kv_slabs", t.kv_slabs()},
          {"slot_slabs", t.slot_slabs()},
          {"freed_layers", t.freed_layers()},
          {"rotating_stages",
           std::vector<uint32_t>(t.rotating_stages().begin(), t.rotating_stages().end())},
          {"rotation_stall_seconds", t.load().rotation_stall_seconds()},
          {"rotation_bytes", t.load().rotation_bytes()},
          {"restored_bytes", t.load().restored_bytes()},
          {"block_bytes", t.load().block_bytes()},
          {"link_limit_bytes_per_second", t.link_limit_bytes_per_second()},
          {"workspace_slabs", t.workspace_slabs()},
          {"image_slabs", t.image_slabs()},
          {"peer_image_slabs", t.peer_image_slabs()},
          {"context_bytes", t.load().context_bytes()},
          {"context_allowance_bytes", t.context_allowance_bytes()},
          {"floor_slabs", t.floor_slabs()},
          {"quota_slabs", t.quota_slabs()},
          {"grants_in_flight", t.grants_in_flight()},
          {"revokes_in_flight", t.revokes_in_flight()},
          {"activation_waiting", t.activation_waiting()},
          {"kv_target_slabs", t.kv_target_slabs()},
          {"has_turn", t.has_turn()},
          {"waits_for_turn", t.waits_for_turn()},
          {"fingerprint", t.fingerprint()}};
}

json TransferJson(const v1::Transfer& t) {
  return {{"kind", KindName(t.kind())},    {"tenant", t.tenant()},
          {"role", RoleName(t.role())},    {"slabs", t.slabs()},
          {"seconds", t.seconds()},        {"reason", t.reason()},
          {"finished_at", t.finished_at()}};
}

json RouterTenantJson(const v1::GetTenantStatusResponse& t) {
  json workers = json::array();
  for (const v1::WorkerStatus& w : t.workers()) {
    workers.push_back({{"model", w.model()},
                       {"address", w.address()},
                       {"healthy", w.healthy()},
                       {"draining", w.draining()},
                       {"problem", w.problem()},
                       {"requests_in_flight", w.requests_in_flight()},
                       {"running_sequences", w.running_sequences()},
                       {"waiting_sequences", w.waiting_sequences()}});
  }
  return {{"tenant", t.tenant()},
          {"requests_in_flight", t.requests_in_flight()},
          {"request_limit", t.request_limit()},
          {"requests_waiting", t.requests_waiting()},
          {"queue_limit", t.queue_limit()},
          {"workers", std::move(workers)}};
}

std::string TenantState(const v1::TenantMemory& t) {
  if (!t.attached()) return "no worker";
  if (t.waits_for_turn()) return "waits for its turn";
  if (t.activation_waiting()) return "waits for memory";
  return t.load().active() ? "active" : "idle";
}

// What lies beside slabs: measured of what is allowed.
std::string ContextCell(const v1::TenantMemory& t) {
  if (t.context_allowance_bytes() == 0 && t.load().context_bytes() == 0) return "-";
  const auto text = [](uint64_t bytes) { return Bytes(static_cast<int64_t>(bytes)).ToString(); };
  return absl::StrCat(text(t.load().context_bytes()), "/", text(t.context_allowance_bytes()));
}

// Who has copies of its image on another GPU; empty if nobody may.
std::string PeerLine(const v1::GetStatusResponse& broker) {
  if (broker.peer_slabs() == 0) return "";
  std::string line = absl::StrCat("copies of images on another GPU: ", broker.peer_slabs_free(),
                                  " of ", broker.peer_slabs(), " slabs free");
  for (const v1::TenantMemory& t : broker.tenants()) {
    if (t.peer_image_slabs() > 0) {
      absl::StrAppend(&line, ", ", t.tenant(), " ", t.peer_image_slabs());
    }
  }
  return line + "\n";
}

std::string TenantsTable(const v1::GetStatusResponse& broker) {
  TextTable table({"TENANT", ">PID", "STATE", ">PARAMETER", ">FREED", ">KV", ">USED", ">CACHED",
                   ">TARGET", ">OTHER", ">CONTEXT", ">FLOOR", ">QUOTA", ">RUNNING", ">WAITING",
                   ">GRANTS", ">REVOKES"});
  for (const v1::TenantMemory& t : broker.tenants()) {
    table.AddRow(
        {absl::StrCat(t.tenant(), t.pinned() ? " (pinned)" : ""),
         t.pid() == 0 ? "-" : absl::StrCat(t.pid()), TenantState(t),
         absl::StrCat(t.parameter_slabs(), "/", t.image_slabs()), absl::StrCat(t.freed_layers()),
         absl::StrCat(t.kv_slabs()), absl::StrCat(t.load().kv_slabs_used()),
         absl::StrCat(t.load().kv_slabs_cached()), absl::StrCat(t.kv_target_slabs()),
         absl::StrCat(t.slot_slabs() + t.workspace_slabs()), ContextCell(t),
         absl::StrCat(t.floor_slabs()), absl::StrCat(t.quota_slabs()),
         absl::StrCat(t.load().running_sequences()), absl::StrCat(t.load().waiting_sequences()),
         absl::StrCat(t.grants_in_flight()), absl::StrCat(t.revokes_in_flight())});
  }
  return table.ToString();
}

json TierTenantJson(const v1::TenantTier& t) {
  json refusals = json::object();
  for (const v1::TierRefusals& r : t.refusals()) refusals[r.reason()] = r.blocks();
  return {{"tenant", t.tenant()},
          {"used_bytes", t.used_bytes()},
          {"limit_bytes", t.limit_bytes()},
          {"blocks", t.blocks()},
          {"stored_blocks", t.stored_blocks()},
          {"removed_blocks", t.removed_blocks()},
          {"hit_blocks", t.hit_blocks()},
          {"hit_bytes", t.hit_bytes()},
          {"promoted_blocks", t.promoted_blocks()},
          {"failed_promotions", t.failed_promotions()},
          {"promoted_bytes", t.promoted_bytes()},
          {"promotion_seconds", t.promotion_seconds()},
          {"wasted_blocks", t.wasted_blocks()},
          {"wasted_bytes", t.wasted_bytes()},
          {"demoted_blocks", t.demoted_blocks()},
          {"failed_demotions", t.failed_demotions()},
          {"demoted_bytes", t.demoted_bytes()},
          {"refusals", std::move(refusals)},
          {"price", t.price()},
          {"prefetched_blocks", t.prefetched_blocks()},
          {"prefetched_used_blocks", t.prefetched_used_blocks()},
          {"prefetched_wasted_blocks", t.prefetched_wasted_blocks()}};
}

json TierJson(const v1::TierMemory& t) {
  json tenants = json::array();
  for (const v1::TenantTier& tenant : t.tenants()) tenants.push_back(TierTenantJson(tenant));
  return {{"tier", t.tier()},
          {"name", t.name()},
          {"serving", t.serving()},
          {"breaker_openings", t.breaker_openings()},
          {"last_failure", t.last_failure()},
          {"capacity_bytes", t.capacity_bytes()},
          {"used_bytes", t.used_bytes()},
          {"quarantined_bytes", t.quarantined_bytes()},
          {"load_latency_seconds", t.load_latency_seconds()},
          {"load_bytes_per_second", t.load_bytes_per_second()},
          {"store_latency_seconds", t.store_latency_seconds()},
          {"store_bytes_per_second", t.store_bytes_per_second()},
          {"queued_loads", t.queued_loads()},
          {"queued_stores", t.queued_stores()},
          {"in_flight", t.in_flight()},
          {"corrupt_blocks", t.corrupt_blocks()},
          {"tenants", std::move(tenants)}};
}

// One line for each tenant in each tier; empty without tiers.
std::string TiersTable(const v1::GetStatusResponse& broker) {
  if (broker.tiers().empty()) return "";
  const auto size = [](uint64_t bytes) { return Bytes(static_cast<int64_t>(bytes)).ToString(); };
  TextTable table({"TIER", "STATE", ">USED", ">LOAD MB/S", "TENANT", ">BLOCKS", ">USED", ">LIMIT",
                   ">HITS", ">PROMOTED", ">WASTED", ">DEMOTED", ">CORRUPT"});
  for (const v1::TierMemory& tier : broker.tiers()) {
    std::vector<std::string> first = {
        tier.name(), tier.serving() ? "serves" : absl::StrCat("left alone: ", tier.last_failure()),
        absl::StrCat(size(tier.used_bytes()), "/", size(tier.capacity_bytes())),
        tier.load_bytes_per_second() > 0
            ? absl::StrFormat("%.0f", tier.load_bytes_per_second() / 1e6)
            : "-"};
    std::string corrupt = absl::StrCat(tier.corrupt_blocks());
    for (const v1::TenantTier& t : tier.tenants()) {
      std::vector<std::string> row = std::exchange(first, {"", "", "", ""});
      for (std::string cell : {t.tenant(), absl::StrCat(t.blocks()), size(t.used_bytes()),
                               size(t.limit_bytes()), absl::StrCat(t.hit_blocks()),
                               absl::StrCat(t.promoted_blocks()), absl::StrCat(t.wasted_blocks()),
                               absl::StrCat(t.demoted_blocks()), std::exchange(corrupt, "")}) {
        row.push_back(std::move(cell));
      }
      table.AddRow(std::move(row));
    }
  }
  return absl::StrCat("\ntiers:\n", table.ToString());
}

std::string WorkerState(const v1::WorkerStatus& worker) {
  if (worker.draining()) return "draining";
  return worker.healthy() ? "healthy" : absl::StrCat("unhealthy: ", worker.problem());
}

std::string RouterTable(const NodeStatus& status) {
  TextTable table({"TENANT", ">IN FLIGHT", ">QUEUED", "MODEL", "WORKER", ">REQUESTS", ">RUNNING",
                   ">WAITING", "STATE"});
  for (const v1::GetTenantStatusResponse& t : status.router) {
    std::vector<std::string> first = {t.tenant(),
                                      absl::StrCat(t.requests_in_flight(), "/", t.request_limit()),
                                      absl::StrCat(t.requests_waiting(), "/", t.queue_limit())};
    for (const v1::WorkerStatus& w : t.workers()) {
      std::vector<std::string> row = std::exchange(first, {"", "", ""});
      for (std::string cell : {w.model(), w.address(), absl::StrCat(w.requests_in_flight()),
                               absl::StrCat(w.running_sequences()),
                               absl::StrCat(w.waiting_sequences()), WorkerState(w)}) {
        row.push_back(std::move(cell));
      }
      table.AddRow(std::move(row));
    }
    if (t.workers().empty()) table.AddRow(std::move(first));
  }
  return table.ToString();
}

}  // namespace

json StatusJson(const NodeStatus& status) {
  const v1::GetStatusResponse& broker = status.broker;
  json result = {{"broker_generation", broker.broker_generation()},
                 {"backend", broker.backend()},
                 {"memory_policy", broker.memory_policy()},
                 {"slab_pieces", broker.slab_pieces()},
                 {"slab_bytes", broker.slab_bytes()},
                 {"peer_slabs", broker.peer_slabs()},
                 {"peer_slabs_free", broker.peer_slabs_free()},
                 {"pool_slabs", broker.pool_slabs()},
                 {"free_slabs", broker.free_slabs()},
                 {"granted_slabs", broker.granted_slabs()},
                 {"revoking_slabs", broker.revoking_slabs()},
                 {"cleaning_slabs", broker.cleaning_slabs()},
                 {"quarantined_slabs", broker.quarantined_slabs()},
                 {"tenants", json::array()},
                 {"transfers", json::array()},
                 {"tiers", json::array()},
                 {"router", json::array()},
                 {"router_errors", json::array()}};
  for (const v1::TenantMemory& t : broker.tenants()) result["tenants"].push_back(TenantJson(t));
  for (const v1::Transfer& t : broker.transfers()) result["transfers"].push_back(TransferJson(t));
  for (const v1::TierMemory& t : broker.tiers()) result["tiers"].push_back(TierJson(t));
  for (const v1::GetTenantStatusResponse& t : status.router) {
    result["router"].push_back(RouterTenantJson(t));
  }
  for (const RouterProblem& p : status.router_problems) {
    result["router_errors"].push_back({{"tenant", p.tenant}, {"error", p.error}});
  }
  return result;
}

std::string StatusTable(const NodeStatus& status) {
  const v1::GetStatusResponse& broker = status.broker;
  const Bytes slab(static_cast<int64_t>(broker.slab_bytes()));
  const std::string each =
      broker.slab_pieces() > 1 ? absl::StrCat(" on each of ", broker.slab_pieces(), " GPUs") : "";
  std::string text = absl::StrCat(
      "broker: generation ", broker.broker_generation(), ", ", broker.backend(), " back-end, pool ",
      broker.pool_slabs(), " slabs of ", slab.ToString(), " (",
      (slab * static_cast<int64_t>(broker.pool_slabs())).ToString(), each, "), memory policy ",
      broker.memory_policy(), "\n", "slabs: ", broker.free_slabs(), " free, ",
      broker.granted_slabs(), " granted, ", broker.revoking_slabs(), " revoking, ",
      broker.cleaning_slabs(), " cleaning, ", broker.quarantined_slabs(), " quarantined\n",
      PeerLine(broker), "\n", TenantsTable(broker), TiersTable(broker));
  if (!status.router.empty()) absl::StrAppend(&text, "\nrouter:\n", RouterTable(status));
  for (const RouterProblem& p : status.router_problems) {
    absl::StrAppend(&text, "\nrouter, tenant ", p.tenant, ": ", p.error, "\n");
  }
  return text;
}

std::string TransferTable(const v1::GetStatusResponse& broker, double since) {
  struct Sum {
    int count = 0;
    uint64_t slabs = 0;
    double seconds = 0;
  };
  std::map<std::pair<std::string, std::string>, Sum> sums;
  for (const v1::Transfer& t : broker.transfers()) {
    if (t.finished_at() <= since) continue;
    Sum& sum = sums[{KindName(t.kind()), t.reason()}];
    ++sum.count;
    sum.slabs += t.slabs();
    sum.seconds += t.seconds();
  }
  TextTable table({"MOVEMENT", "REASON", ">TIMES", ">SLABS", ">MEAN MS"});
  for (const auto& [key, sum] : sums) {
    table.AddRow({key.first, key.second, absl::StrCat(sum.count), absl::StrCat(sum.slabs),
                  absl::StrFormat("%.1f", 1e3 * sum.seconds / sum.count)});
  }
  return table.ToString();
}

}  // namespace palimpsest::palctl
