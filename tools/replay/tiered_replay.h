// Runs a trace through the tiers of a node on the trace's clock: what comes from which tier, how
// soon first tokens are there, what is moved for it, and what of it was in vain. The caches,
// policies, placement and prefetch are those of the broker; equal inputs give equal results.
//
// A request loads the leading blocks that are cached, tier after tier, or computes from the end of
// one tier's part on if that is sooner (never slower than computing all of it), and then computes
// the rest. Requests do not wait for each other, as traces do not say how long they ran: times are
// those of an idle machine.
//
// Prefetches go to the second tier, from those below it that grant a part of their bandwidth.
#ifndef PALIMPSEST_TOOLS_REPLAY_TIERED_REPLAY_H_
#define PALIMPSEST_TOOLS_REPLAY_TIERED_REPLAY_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "broker/core/prefetch/prefetch_planner.h"
#include "common/bytes.h"
#include "tools/replay/replayer.h"
#include "tools/replay/tier_costs.h"
#include "tools/replay/tiered_cache.h"
#include "tools/replay/trace.h"

namespace palimpsest::replay {

struct FirstTokenTimes {
  absl::Duration p50, p99, mean;

  friend bool operator==(const FirstTokenTimes&, const FirstTokenTimes&) = default;
};

struct TieredResult {
  ReplayCounts all;
  std::vector<TierCounts> tiers;
  std::vector<double> prices;  // at the end, in seconds saved per byte-second
  // Of blocks: those loaded for requests, from each tier.
  std::vector<int64_t> loaded;
  FirstTokenTimes first_token;
  FirstTokenTimes recomputed;  // if nothing were cached
  absl::Duration saved;        // of all requests together, against that
  std::array<prefetch::PrefetchCounts, prefetch::kTriggers> prefetches{};
  prefetch::PrefetchCounts all_prefetches;

  friend bool operator==(const TieredResult&, const TieredResult&) = default;
};

// InvalidArgument if the policy does not run with leaves first. Of the options `blocks` and
// `discipline` are not looked at.
absl::StatusOr<TieredResult> ReplayTiers(const Trace& trace, const ReplayPolicy& policy,
                                         const ReplayOptions& options, const TierCosts& costs,
                                         Bytes token_bytes);

}  // namespace palimpsest::replay

#endif  // PALIMPSEST_TOOLS_REPLAY_TIERED_REPLAY_H_
