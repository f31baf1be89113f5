// Where the tokens of a measurement's prompts came from: T0, the tiers below it, or computing.
// Pure.
#ifndef PALIMPSEST_TOOLS_PALCTL_TIER_HITS_H_
#define PALIMPSEST_TOOLS_PALCTL_TIER_HITS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "proto/palimpsest/v1/broker.pb.h"
#include "proto/palimpsest/v1/worker.pb.h"

namespace palimpsest::palctl {

// What a node says of itself at one moment.
struct NodeCounters {
  v1::GetStatusResponse broker;
  std::vector<v1::WorkerStats> workers;
};

// Tokens of a block, which workers do not change.
inline constexpr int64_t kBlockTokens = 16;

// Sums over all tenants between two moments at which no request ran: {"prompt_tokens", "t0": share
// of them that T0 had, "tiers": [{"tier", "hits": share, "used_bytes" (at the end), and counts of
// blocks: "hit", "stored", "removed", "promoted", "demoted", "wasted", "prefetched", "refused"}],
// "computed": what is left}. A tier's hits are blocks that a request asked for and got from there,
// whether its worker then loaded them or found computing them sooner.
nlohmann::ordered_json TierHitsJson(const NodeCounters& before, const NodeCounters& after);

// A line for each of "points" that has "hits"; empty if none has.
std::string TierHitsTable(const nlohmann::ordered_json& points);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_TIER_HITS_H_
