#include "tools/palctl/memory_history.h"

#include <algorithm>
#include <numeric>
#include <utility>

namespace palimpsest::palctl {
namespace {

using Json = nlohmann::ordered_json;

constexpr char kReversion[] = "reversion";

const v1::TenantMemory* Find(const v1::GetStatusResponse& status, const std::string& name) {
  for (const v1::TenantMemory& tenant : status.tenants()) {
    if (tenant.tenant() == name) return &tenant;
  }
  return nullptr;
}

int64_t Missing(const v1::TenantMemory& tenant) {
  return int64_t{tenant.image_slabs()} - tenant.parameter_slabs() - tenant.slot_slabs();
}

double Mean(const std::vector<uint32_t>& values) {
  if (values.empty()) return 0;
  return std::accumulate(values.begin(), values.end(), 0.0) / static_cast<double>(values.size());
}

}  // namespace

MemoryHistory::MemoryHistory(std::vector<std::string> tenants)
    : tenants_(std::move(tenants)), series_(tenants_.size()) {}

void MemoryHistory::Add(absl::Duration now, const v1::GetStatusResponse& status) {
  const bool first = seconds_.empty();
  seconds_.push_back(absl::ToDoubleMilliseconds(absl::Floor(now, absl::Milliseconds(1))) / 1e3);
  free_.push_back(status.free_slabs());
  slab_bytes_ = status.slab_bytes();
  for (size_t i = 0; i < tenants_.size(); ++i) {
    const v1::TenantMemory none;
    const v1::TenantMemory* found = Find(status, tenants_[i]);
    const v1::TenantMemory& tenant = found == nullptr ? none : *found;
    Series& series = series_[i];
    series.parameter.push_back(tenant.parameter_slabs());
    series.kv.push_back(tenant.kv_slabs());
    series.slot.push_back(tenant.slot_slabs());
    series.workspace.push_back(tenant.workspace_slabs());
    series.freed_layers.push_back(tenant.freed_layers());
    series.most_missing = std::max(series.most_missing, Missing(tenant));
    series.last = {tenant.load().rotation_stall_seconds(), tenant.load().rotation_bytes()};
    if (first) series.first = series.last;
  }
  if (first) {
    for (const v1::Transfer& transfer : status.transfers()) {
      seen_until_ = std::max(seen_until_, transfer.finished_at());
    }
  }
  AddTransfers(status);
}

void MemoryHistory::AddTransfers(const v1::GetStatusResponse& status) {
  double latest = seen_until_;
  for (const v1::Transfer& transfer : status.transfers()) {
    if (transfer.finished_at() <= seen_until_) continue;
    latest = std::max(latest, transfer.finished_at());
    for (size_t i = 0; i < tenants_.size(); ++i) {
      if (tenants_[i] != transfer.tenant()) continue;
      if (transfer.kind() == v1::Transfer::KIND_RESTORE) {
        series_[i].restored_bytes += transfer.slabs() * status.slab_bytes();
        ++series_[i].restores;
      }
      series_[i].reversions +=
          transfer.kind() == v1::Transfer::KIND_GRANT && transfer.reason() == kReversion;
    }
  }
  seen_until_ = latest;
}

Json MemoryHistory::ToJson() const {
  Json tenants = Json::array();
  for (size_t i = 0; i < tenants_.size(); ++i) {
    const Series& series = series_[i];
    const auto most = std::max_element(series.freed_layers.begin(), series.freed_layers.end());
    tenants.push_back(
        {{"name", tenants_[i]},
         {"parameter", series.parameter},
         {"kv", series.kv},
         {"slot", series.slot},
         {"workspace", series.workspace},
         {"freed_layers", series.freed_layers},
         {"mean_freed_layers", Mean(series.freed_layers)},
         {"most_freed_layers", most == series.freed_layers.end() ? 0 : *most},
         {"most_missing_bytes", static_cast<uint64_t>(series.most_missing) * slab_bytes_},
         {"stall_seconds", series.last.stall_seconds - series.first.stall_seconds},
         {"rotation_bytes", series.last.rotation_bytes - series.first.rotation_bytes},
         {"restored_bytes", series.restored_bytes},
         {"restores", series.restores},
         {"reversions", series.reversions}});
  }
  return {{"slab_bytes", slab_bytes_},
          {"seconds", seconds_},
          {"free", free_},
          {"tenants", std::move(tenants)}};
}

MemorySampler::MemorySampler(std::vector<std::string> tenants, absl::Duration interval, Ask ask)
    : interval_(interval),
      ask_(std::move(ask)),
      start_(MonotonicNow()),
      history_(std::move(tenants)),
      thread_([this] { Run(); }) {}

MemorySampler::~MemorySampler() {
  if (thread_.joinable()) Stop();
}

void MemorySampler::Sample() {
  const auto status = ask_();
  if (status.ok()) history_.Add(MonotonicNow() - start_, *status);
}

void MemorySampler::Run() {
  for (absl::Time next = start_;; next = std::max(next + interval_, MonotonicNow())) {
    {
      MutexLock lock(&mu_);
      while (!stopping_ && !changed_.WaitWithDeadline(&mu_, next)) {
      }
      if (stopping_) return;
    }
    Sample();
  }
}

MemoryHistory MemorySampler::Stop() {
  {
    MutexLock lock(&mu_);
    stopping_ = true;
    changed_.Signal();
  }
  thread_.join();
  Sample();
  return std::move(history_);
}

}  // namespace palimpsest::palctl
