// The cost of the events that move the most slabs, on a pool of 65,536 slabs (2 TiB of 32 MiB) with
// 32 tenants: grants and revokes of 1,000 KV slabs.
#include <benchmark/benchmark.h>

#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "broker/core/arbiter.h"

namespace palimpsest {
namespace {

constexpr uint32_t kPool = 65536;
constexpr uint32_t kTenants = 32;
constexpr uint32_t kMoved = 1000;

struct Node {
  Node() : arbiter(ArbiterOptions{.pool_slabs = kPool}) {
    for (uint32_t i = 0; i < kTenants; ++i) {
      (void)arbiter.AddTenant(TenantConfig{
          .name = "tenant" + std::to_string(i), .floor_slabs = 600, .quota_slabs = kPool});
      std::vector<ParameterStage> stages;
      for (uint32_t s = 0; s < 50; ++s) stages.push_back({s * 10, 10});
      sessions.push_back(*arbiter.OnAttach(TenantId(i), stages, now));
      arbiter.OnActivate(sessions.back(), ActivateReason::kRequest, now);
      MapAll();
      arbiter.OnReport(sessions.back(), SessionLoad{.active = true}, now);
    }
  }

  // Maps what was granted; returns the slabs.
  std::vector<SlabId> MapAll() {
    std::vector<SlabId> slabs;
    for (const ArbiterAction& action : arbiter.TakeActions()) {
      const auto* grant = std::get_if<SendGrant>(&action);
      if (grant == nullptr) continue;
      for (const GrantedSlab& slab : grant->slabs) slabs.push_back(slab.slab);
      arbiter.OnGrantMapped(grant->session, grant->grant, {}, {}, now);
    }
    return slabs;
  }

  absl::Time now = absl::FromUnixSeconds(1);
  Arbiter arbiter;
  std::vector<SessionId> sessions;
};

void BM_GrantKv(benchmark::State& state) {
  Node node;
  for (auto _ : state) {
    node.arbiter.OnSetKvTarget(node.sessions[0], kMoved, kMoved, node.now);
    state.PauseTiming();
    const std::vector<SlabId> slabs = node.MapAll();
    if (slabs.size() != kMoved) state.SkipWithError("not granted");
    node.arbiter.OnSetKvTarget(node.sessions[0], 0, 0, node.now);
    node.arbiter.OnReleaseKv(node.sessions[0], slabs, node.now);
    (void)node.arbiter.OnSlabsClean(slabs, node.now);
    (void)node.arbiter.TakeActions();
    state.ResumeTiming();
  }
}
BENCHMARK(BM_GrantKv)->Unit(benchmark::kMicrosecond);

// 1,000 idle slabs of one tenant are asked back for another, given back, cleaned and granted; then
// the two change places.
void BM_RevokeKv(benchmark::State& state) {
  Node node;
  const uint32_t rest = kPool - kTenants * 500 - kMoved;
  node.arbiter.OnSetKvTarget(node.sessions[2], rest, rest, node.now);
  (void)node.MapAll();
  SessionId holder = node.sessions[0], taker = node.sessions[1];
  node.arbiter.OnSetKvTarget(holder, kMoved, kMoved, node.now);
  std::vector<SlabId> slabs = node.MapAll();
  for (auto _ : state) {
    state.PauseTiming();
    node.arbiter.OnSetKvTarget(holder, 0, 0, node.now);
    node.arbiter.OnReport(holder, SessionLoad{.active = true, .kv_slabs_free = kMoved}, node.now);
    state.ResumeTiming();
    node.arbiter.OnSetKvTarget(taker, kMoved, kMoved, node.now);
    RevokeId revoke;
    for (const ArbiterAction& action : node.arbiter.TakeActions()) {
      if (const auto* send = std::get_if<SendRevoke>(&action)) revoke = send->revoke;
    }
    node.arbiter.OnRevokeDone(holder, revoke, slabs, node.now);
    (void)node.arbiter.OnSlabsClean(slabs, node.now);
    state.PauseTiming();
    slabs = node.MapAll();
    if (slabs.size() != kMoved) state.SkipWithError("not moved");
    std::swap(holder, taker);
    state.ResumeTiming();
  }
}
BENCHMARK(BM_RevokeKv)->Unit(benchmark::kMicrosecond);

}  // namespace
}  // namespace palimpsest

BENCHMARK_MAIN();
