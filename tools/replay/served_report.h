// What a node made of a trace that was sent to it, beside what a simulated replay of the same
// requests expects. Rates are shares of the prompts' tokens, from 0 to 1 in JSON and in percent in
// tables.
#ifndef PALIMPSEST_TOOLS_REPLAY_SERVED_REPORT_H_
#define PALIMPSEST_TOOLS_REPLAY_SERVED_REPORT_H_

#include <cstddef>
#include <cstdint>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "tools/load/latency.h"
#include "tools/replay/replay_report.h"

namespace palimpsest::replay {

// A tier below T0, by the broker's own count during the run.
struct ServedTier {
  std::string name;  // the broker's: "dram", "cxl", "nvme", "remote", "directory"
  // Blocks that a request asked for and got from here.
  int64_t hit_blocks = 0;
};

struct ServedReport {
  size_t too_long = 0;  // requests that were left out
  uint64_t salt = 0;
  double speed = 1;
  load::LoadSummary summary;
  std::string error;  // of the first request that failed
  int64_t kv_block_tokens = 0;
  std::vector<ServedTier> tiers;  // from fast to slow; none: the node keeps blocks in T0 alone
};

// What the records of all requests say; the rest is left as it is.
void CountServed(absl::Span<const load::RequestRecord> records, absl::Duration window,
                 ServedReport& served);

// A row for each tier, T0 first. What is not computed and was in none of the lower ones was in T0.
// What a tier gave counts for it although the worker may have found computing faster.
struct ServedShare {
  std::string tier;  // "T0", "T1 dram"
  double served = 0;
  std::optional<double> expected;  // of tiers that the replay had too
};
std::vector<ServedShare> ServedShares(const ReplayReport& expected, const ServedReport& served);

nlohmann::json ServedJson(const ReplayReport& expected, const ServedReport& served);
std::string ServedTable(const ReplayReport& expected, const ServedReport& served);

}  // namespace palimpsest::replay

#endif  // PALIMPSEST_TOOLS_REPLAY_SERVED_REPORT_H_
