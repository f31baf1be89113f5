// What the memory policies promise, with tenants that ask for anything at any time.
#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "broker/core/pool_config.h"
#include "broker/core/simulated_node.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

constexpr uint32_t kPool = 100;

std::vector<TenantDemand> Demands(MemoryPolicy policy) {
  const auto tenant = [](const char* name, int32_t priority, uint32_t floor, uint32_t workspace) {
    return TenantDemand{.config = {.name = name,
                                   .priority = priority,
                                   .floor_slabs = floor,
                                   .quota_slabs = kPool,
                                   .sequence_slabs = 4,
                                   .workspace_slabs = workspace},
                        .image_slabs = 20};
  };
  if (policy == MemoryPolicy::kRemap) {
    std::vector<TenantDemand> unsaid = {tenant("a", 0, 0, 2), tenant("b", 1, 0, 0),
                                        tenant("c", 0, 0, 1)};
    for (TenantDemand& demand : unsaid) demand.floor_unsaid = true;
    return WithDefaultFloors(kPool, std::move(unsaid));
  }
  return {tenant("a", 0, 35, 2), tenant("b", 1, 35, 0),
          tenant("c", 0, policy == MemoryPolicy::kStatic ? 26 : 0, 1)};
}

class Tenants {
 public:
  explicit Tenants(MemoryPolicy policy, uint32_t seed = 1)
      : random_(seed), node_({.pool_slabs = kPool}, Simulated(policy)) {
    EXPECT_TRUE(ValidatePool(kPool, Demands(policy), policy).ok())
        << ValidatePool(kPool, Demands(policy), policy);
  }
  ~Tenants() {
    node_.CheckInvariants();
    for (const std::string& problem : node_.problems()) ADD_FAILURE() << problem;
  }

  static std::vector<SimulatedTenant> Simulated(MemoryPolicy policy) {
    std::vector<SimulatedTenant> tenants;
    for (const TenantDemand& demand : Demands(policy)) {
      tenants.push_back({ConfigUnder(policy, demand), EvenStages(5, 4)});
    }
    return tenants;
  }

  uint32_t Below(uint32_t n) { return static_cast<uint32_t>(random_() % n); }
  SimulatedNode& node() { return node_; }
  uint32_t Held(uint32_t tenant, SlabRole role) { return node_.WorkerOf(tenant)->Count(role); }

  // Whatever the tenant had, its next worker has all parameters.
  void Bring(uint32_t tenant) {
    ASSERT_TRUE(node_.Attach(tenant).ok());
    node_.Activate(*node_.WorkerOf(tenant));
    node_.Settle();
    ASSERT_EQ(Held(tenant, SlabRole::kParameter), 20u) << node_.log();
  }

  // Any demand, load or death of any tenant; then whatever follows from it.
  void RandomStep() {
    const uint32_t tenant = Below(3);
    SimulatedWorker* const worker = node_.WorkerOf(tenant);
    if (worker == nullptr) {
      Bring(tenant);
      return;
    }
    const uint32_t kv = worker->Count(SlabRole::kKv);
    switch (Below(8)) {
      case 0:
        if (Below(4) == 0) {
          node_.ProcessGone(worker->session);
        } else {
          node_.Advance(absl::Milliseconds(Below(4000)));
        }
        break;
      case 1:
      case 2:
      case 3: {
        const uint32_t target = Below(kPool);
        node_.SetKvTarget(*worker, target, Below(target + 1));
        break;
      }
      default: {
        const uint32_t used = Below(kv + 1);
        node_.Report(*worker, Below(2) == 0, used, kv - used);
      }
    }
    node_.Settle();
  }

  void ExpectParametersStay() {
    for (uint32_t tenant = 0; tenant < 3; ++tenant) {
      if (node_.WorkerOf(tenant) == nullptr) continue;
      ASSERT_EQ(Held(tenant, SlabRole::kParameter), 20u) << node_.log();
    }
  }

 private:
  std::mt19937 random_;
  SimulatedNode node_;
};

class ParametersStay : public testing::TestWithParam<MemoryPolicy> {};

TEST_P(ParametersStay, WhateverOthersAskFor) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    Tenants tenants(GetParam(), seed);
    for (uint32_t i = 0; i < 3; ++i) tenants.Bring(i);
    for (int i = 0; i < 100 && !testing::Test::HasFatalFailure(); ++i) {
      tenants.RandomStep();
      tenants.ExpectParametersStay();
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, ParametersStay,
                         testing::Values(MemoryPolicy::kStatic, MemoryPolicy::kRecompute,
                                         MemoryPolicy::kSwap),
                         [](const auto& param) {
                           return std::string(MemoryPolicyName(param.param));
                         });

TEST(StaticShares, NobodyGivesAndEverybodyGetsWhatFitsItsShare) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    Tenants tenants(MemoryPolicy::kStatic, seed);
    for (uint32_t i = 0; i < 3; ++i) tenants.Bring(i);
    for (int i = 0; i < 100 && !testing::Test::HasFatalFailure(); ++i) {
      tenants.RandomStep();
      const ArbiterSnapshot snapshot = tenants.node().arbiter().Snapshot();
      for (const TenantSnapshot& tenant : snapshot.tenants) {
        const uint32_t share = tenant.config.quota_slabs;
        ASSERT_LE(tenant.parameter_slabs + tenant.kv_slabs + tenant.workspace_slabs, share);
        const uint32_t room = share - 20 - tenant.config.workspace_slabs;
        ASSERT_GE(tenant.kv_slabs, std::min(tenant.kv_target_slabs, room))
            << tenant.config.name << "\n"
            << tenants.node().log();
      }
      ASSERT_EQ(tenants.node().log().find("revoke"), std::string::npos) << tenants.node().log();
    }
  }
}

// Without floors the two others may use all KV there is for as long as they like.
TEST(DefaultFloors, WhoeverComesBackIsServedAtOnce) {
  for (uint32_t seed = 0; seed < 30; ++seed) {
    Tenants tenants(MemoryPolicy::kRemap, seed);
    SimulatedNode& node = tenants.node();
    for (uint32_t i = 0; i < 3; ++i) tenants.Bring(i);
    for (int i = 0; i < 100 && !testing::Test::HasFatalFailure(); ++i) {
      tenants.RandomStep();
      const uint32_t back = tenants.Below(3);
      if (i % 4 != 3 || node.WorkerOf(back) == nullptr) continue;
      // The others use what they have.
      for (uint32_t other = 0; other < 3; ++other) {
        SimulatedWorker* const worker = node.WorkerOf(other);
        if (worker == nullptr) continue;
        node.Report(*worker, /*active=*/true, worker->Count(SlabRole::kKv), 0);
      }
      node.Activate(*node.WorkerOf(back));
      node.SetKvTarget(*node.WorkerOf(back), 4, 4);
      node.Settle();
      ASSERT_EQ(tenants.Held(back, SlabRole::kParameter), 20u) << node.log();
      ASSERT_GE(tenants.Held(back, SlabRole::kKv), 4u) << node.log();
    }
  }
}

TEST(SharedKv, TakesWhatParametersLeave) {
  Tenants tenants(MemoryPolicy::kRecompute);
  for (uint32_t i = 0; i < 3; ++i) tenants.Bring(i);
  SimulatedNode& node = tenants.node();
  node.SetKvTarget(*node.WorkerOf(2), kPool, kPool);
  node.Settle();
  // All but three images and three slabs of workspace.
  EXPECT_EQ(tenants.Held(2, SlabRole::kKv), kPool - 63);
  // A tenant below its floor gets it back from the one that borrowed it.
  node.Report(*node.WorkerOf(2), /*active=*/true, kPool - 63, 0);
  node.Report(*node.WorkerOf(0), /*active=*/true, 0, 0);
  node.SetKvTarget(*node.WorkerOf(0), 20, 20);
  node.Settle();
  EXPECT_EQ(tenants.Held(0, SlabRole::kKv), 13u);
  EXPECT_EQ(tenants.Held(2, SlabRole::kKv), kPool - 63 - 13);
}

TEST(SharedKv, WorkerThatReturnsFindsRoomForItsParameters) {
  Tenants tenants(MemoryPolicy::kSwap);
  for (uint32_t i = 0; i < 3; ++i) tenants.Bring(i);
  SimulatedNode& node = tenants.node();
  node.ProcessGone(node.WorkerOf(2)->session);
  node.Report(*node.WorkerOf(0), /*active=*/true, 0, 0);
  node.SetKvTarget(*node.WorkerOf(0), kPool, kPool);
  node.Settle();
  node.Report(*node.WorkerOf(0), /*active=*/true, tenants.Held(0, SlabRole::kKv), 0);
  EXPECT_GT(tenants.Held(0, SlabRole::kKv), kPool - 63);
  tenants.Bring(2);
}

}  // namespace
}  // namespace palimpsest
