// What a replay found, for people and as JSON. Rates are shares from 0 to 1 in JSON and percent in
// tables.
#ifndef PALIMPSEST_TOOLS_REPLAY_REPLAY_REPORT_H_
#define PALIMPSEST_TOOLS_REPLAY_REPLAY_REPORT_H_

#include <cstddef>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>

#include "common/bytes.h"
#include "tools/replay/replayer.h"
#include "tools/replay/tiered_replay.h"
#include "tools/replay/trace_formats.h"

namespace palimpsest::replay {

struct ReplayReport {
  TraceSource source;
  std::string policy;
  ReplayOptions options;
  Bytes token_bytes;  // of KV
  // Of the trace.
  size_t requests = 0;
  size_t distinct_blocks = 0;
  int64_t block_tokens = 0;
  absl::Duration length;

  ReplayResult result;
  ReplayBounds bounds;

  struct Tiers {
    TierCosts costs;
    TieredResult result;
    TieredResult lru;         // the same tiers
    TieredResult first_only;  // LRU in the first tier, and no other
  };
  std::optional<Tiers> tiers;
};

// Replays the trace under the policy and under those that stand beside it. With `tiers` also
// through these.
absl::StatusOr<ReplayReport> MakeReplayReport(const TraceSource& source, const Trace& trace,
                                              const std::string& policy,
                                              const ReplayOptions& options, Bytes token_bytes,
                                              const std::optional<TierCosts>& tiers = std::nullopt);

nlohmann::json ReplayJson(const ReplayReport& report);
std::string ReplayTable(const ReplayReport& report);

}  // namespace palimpsest::replay

#endif  // PALIMPSEST_TOOLS_REPLAY_REPLAY_REPORT_H_
