// What tests of KV blocks below T0 have in common: a node that lacks KV slabs, beside tiers that
// are worth their while on any machine.
#ifndef PALIMPSEST_TESTS_NODE_TIERS_H_
#define PALIMPSEST_TESTS_NODE_TIERS_H_

#include <algorithm>
#include <string>

#include "absl/strings/str_cat.h"
#include "tests/node.h"

namespace palimpsest {

// Longer than the KV slabs of ScarceKv hold beside another one. More than 50 full blocks.
inline std::string LongText(int number) {
  std::string text = absl::StrCat("Story ", number, ". ");
  while (text.size() < 900) {
    absl::StrAppend(&text, "In year ", 1000 + 37 * number + text.size(), " it rained. ");
  }
  return text;
}

// A tier below T1 whose speed is the same on any machine: how fast a disk is decides whether so
// small a model's blocks are worth their way there.
inline constexpr char kBelow[] =
    "cxl: {bytes: 256 MiB, emulated: {bytes_per_second: 4 GiB, latency: 10us}}";

// One tenant, alpha, with a few KV slabs, and a model that takes some time: beside one that does
// not, no tier below T1 is worth anything. No tiers yet.
inline NodeOptions ScarceKv() {
  NodeOptions options;
  options.intermediate_size = 1024;
  options.tenants = {{.name = "alpha", .quota_slabs = Node::kImageSlabs + 5}};
  options.pool_slabs = Node::kImageSlabs + 5;
  options.engine = {"kv_low_water_slabs: 0", "kv_high_water_slabs: 4"};
  return options;
}

// `dram`: the options of T1.
inline void AddTiers(NodeOptions& options,
                     const std::string& dram = "bytes: 64 MiB, chunk_bytes: 16 MiB") {
  options.tiers = {absl::StrCat("dram: {", dram, "}"), kBelow, "staging: 16 MiB", "policy: lru"};
}

// Until the broker has measured that all tiers below T1 are fast: a machine that was busy when they
// were opened makes it think that blocks are not worth their way there.
inline void AwaitFastTiers(Node& node) {
  node.Await("measuring that tiers are fast", [&] {
    const auto status = node.BrokerStatus();
    return status.ok() && status->tiers_size() > 1 &&
           std::all_of(status->tiers().begin() + 1, status->tiers().end(),
                       [](const v1::TierMemory& tier) {
                         return tier.serving() && tier.load_latency_seconds() < 5e-4;
                       });
  });
}

// Alpha's row of a tier; empty until it has one.
inline v1::TenantTier TierRow(Node& node, const std::string& tier) {
  const auto status = node.BrokerStatus();
  if (!status.ok()) return {};
  for (const v1::TierMemory& memory : status->tiers()) {
    if (memory.tier() == tier && memory.tenants_size() > 0) return memory.tenants(0);
  }
  return {};
}

}  // namespace palimpsest

#endif  // PALIMPSEST_TESTS_NODE_TIERS_H_
