// An arbiter on a simulated node whose invariants are checked after each test; workers cooperate
// unless a test makes them misbehave.
#ifndef PALIMPSEST_BROKER_CORE_ARBITER_FIXTURE_H_
#define PALIMPSEST_BROKER_CORE_ARBITER_FIXTURE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "broker/core/simulated_node.h"
#include "gtest/gtest.h"

namespace palimpsest {

class ArbiterTest : public testing::Test {
 protected:
  static SimulatedTenant Tenant(const std::string& name, int32_t priority, uint32_t floor,
                                uint32_t quota = 100, bool pinned = false) {
    // Five stages of four slabs.
    return {{.name = name,
             .priority = priority,
             .pinned = pinned,
             .floor_slabs = floor,
             .quota_slabs = quota,
             .sequence_slabs = 2},
            EvenStages(5, 4)};
  }

  static SimulatedTenant WithWorkspace(SimulatedTenant tenant, uint32_t slabs) {
    tenant.config.workspace_slabs = slabs;
    return tenant;
  }

  static ArbiterOptions Options(uint32_t pool) { return ArbiterOptions{.pool_slabs = pool}; }

  void Start(ArbiterOptions options, std::vector<SimulatedTenant> tenants) {
    node_ = std::make_unique<SimulatedNode>(options, std::move(tenants));
  }
  void TearDown() override {
    node_->CheckInvariants();
    for (const std::string& problem : node_->problems()) ADD_FAILURE() << problem;
    if (HasFailure()) ADD_FAILURE() << node_->log();
  }
  SimulatedNode& node() { return *node_; }
  SimulatedWorker& worker(uint32_t tenant) { return *node_->WorkerOf(tenant); }
  uint32_t kv(uint32_t tenant) { return worker(tenant).Count(SlabRole::kKv); }
  uint32_t parameters(uint32_t tenant) { return worker(tenant).Count(SlabRole::kParameter); }
  TenantSnapshot status(uint32_t tenant) { return node_->arbiter().Snapshot().tenants[tenant]; }

  // Attached, all parameters, `kv` slabs of KV in use; active or not; past its residence.
  void Bring(uint32_t tenant, uint32_t kv_slabs, bool active) {
    ASSERT_TRUE(node_->Attach(tenant).ok());
    node_->Activate(worker(tenant));
    node_->SetKvTarget(worker(tenant), kv_slabs, kv_slabs);
    node_->Settle();
    node_->Report(worker(tenant), active, kv(tenant), 0);
    node_->Advance(absl::Seconds(3));
  }

 private:
  std::unique_ptr<SimulatedNode> node_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_BROKER_CORE_ARBITER_FIXTURE_H_
