#include "tools/palctl/memory_history.h"

#include <gtest/gtest.h>

#include "common/mutex.h"

namespace palimpsest::palctl {
namespace {

using Json = nlohmann::ordered_json;

v1::TenantMemory& AddTenant(v1::GetStatusResponse& status, const std::string& name,
                            uint32_t parameter, uint32_t kv, uint32_t slot) {
  v1::TenantMemory& tenant = *status.add_tenants();
  tenant.set_tenant(name);
  tenant.set_image_slabs(40);
  tenant.set_parameter_slabs(parameter);
  tenant.set_kv_slabs(kv);
  tenant.set_slot_slabs(slot);
  return tenant;
}

void AddTransfer(v1::GetStatusResponse& status, v1::Transfer::Kind kind, const std::string& reason,
                 uint32_t slabs, double finished_at) {
  v1::Transfer& transfer = *status.add_transfers();
  transfer.set_kind(kind);
  transfer.set_tenant("a");
  transfer.set_reason(reason);
  transfer.set_slabs(slabs);
  transfer.set_finished_at(finished_at);
}

TEST(MemoryHistory, FollowsSlabsAndFreedLayers) {
  MemoryHistory history({"a", "b"});
  v1::GetStatusResponse status;
  status.set_slab_bytes(100);
  status.set_free_slabs(7);
  AddTenant(status, "a", 40, 1, 0);
  history.Add(absl::ZeroDuration(), status);
  // Three of ten layers have no slabs of their own, and take turns in the slot of one.
  status.mutable_tenants(0)->set_parameter_slabs(28);
  status.mutable_tenants(0)->set_slot_slabs(4);
  status.mutable_tenants(0)->set_freed_layers(2);
  history.Add(absl::Milliseconds(250), status);
  const Json json = history.ToJson();
  EXPECT_EQ(json["seconds"], Json({0.0, 0.25}));
  EXPECT_EQ(json["free"], Json({7, 7}));
  const Json& a = json["tenants"][0];
  EXPECT_EQ(a["parameter"], Json({40, 28}));
  EXPECT_EQ(a["slot"], Json({0, 4}));
  EXPECT_EQ(a["freed_layers"], Json({0, 2}));
  EXPECT_EQ(a["most_freed_layers"], 2);
  EXPECT_EQ(a["most_missing_bytes"], 800);
  EXPECT_EQ(a["mean_freed_layers"], 1.0);
  // The broker does not know b (yet).
  EXPECT_EQ(json["tenants"][1]["kv"], Json({0, 0}));
}

TEST(MemoryHistory, CountsWhatHappenedSinceTheFirstAnswer) {
  MemoryHistory history({"a"});
  v1::GetStatusResponse status;
  status.set_slab_bytes(100);
  v1::Report& load = *AddTenant(status, "a", 40, 1, 0).mutable_load();
  load.set_rotation_stall_seconds(1.5);
  load.set_rotation_bytes(1000);
  AddTransfer(status, v1::Transfer::KIND_RESTORE, "activation", 40, 10);
  history.Add(absl::ZeroDuration(), status);
  load.set_rotation_stall_seconds(1.75);
  load.set_rotation_bytes(5000);
  AddTransfer(status, v1::Transfer::KIND_RESTORE, "reversion", 8, 11);
  AddTransfer(status, v1::Transfer::KIND_GRANT, "reversion", 8, 11.5);
  AddTransfer(status, v1::Transfer::KIND_GRANT, "kv_demand", 8, 11.5);
  history.Add(absl::Seconds(1), status);
  // The broker's list keeps what was counted.
  history.Add(absl::Seconds(2), status);
  const Json tenant = history.ToJson()["tenants"][0];
  EXPECT_EQ(tenant["stall_seconds"], 0.25);
  EXPECT_EQ(tenant["rotation_bytes"], 4000);
  EXPECT_EQ(tenant["restored_bytes"], 800);
  EXPECT_EQ(tenant["restores"], 1);
  EXPECT_EQ(tenant["reversions"], 1);
}

TEST(MemorySampler, AsksAtIntervalsAndOnceMoreAtTheEnd) {
  Mutex mu;
  CondVar changed;
  int asked = 0;
  MemorySampler sampler({"a"}, absl::Milliseconds(1),
                        [&]() -> absl::StatusOr<v1::GetStatusResponse> {
                          MutexLock lock(&mu);
                          ++asked;
                          changed.SignalAll();
                          if (asked == 2) return absl::UnavailableError("the broker restarts");
                          return v1::GetStatusResponse();
                        });
  {
    MutexLock lock(&mu);
    while (asked < 4) changed.Wait(&mu);
  }
  const size_t answers = sampler.Stop().ToJson()["seconds"].size();
  MutexLock lock(&mu);
  EXPECT_EQ(answers, static_cast<size_t>(asked - 1));
  EXPECT_GE(asked, 5);
}

}  // namespace
}  // namespace palimpsest::palctl
