// Runs a trace through a cache of one size under a policy, on the trace's own clock: the policies
// and the cache are those of the broker, and equal inputs give equal results.
//
// A trace says when requests came, not how long they ran, so each ends before the next begins.
#ifndef PALIMPSEST_TOOLS_REPLAY_REPLAYER_H_
#define PALIMPSEST_TOOLS_REPLAY_REPLAYER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "broker/core/cache/block_cache.h"
#include "broker/core/reuse/calibration.h"
#include "tools/replay/client_hints.h"
#include "tools/replay/trace.h"

namespace palimpsest::replay {

inline constexpr size_t kMostBlocks = size_t{1} << 26;  // of a cache

// An entry of the table of policies.
struct ReplayPolicy {
  absl::string_view name;
  // How it runs whatever is asked for; none: either way.
  std::optional<cache::Discipline> only;
  // As large as it takes to keep everything.
  bool unbounded = false;
  std::unique_ptr<cache::EvictionPolicy> (*make)(size_t capacity, const Trace& trace);
  // Blocks are stored when their request has ended (cache::BlockCacheOptions::store_at_end).
  bool at_end = false;
};

std::vector<std::string> ReplayPolicies();

// InvalidArgument names those there are.
absl::StatusOr<const ReplayPolicy*> FindReplayPolicy(absl::string_view name);

struct ReplayOptions {
  size_t blocks = 0;  // 1 .. kMostBlocks
  // Blocks of which a policy may know something although they are not cached
  // (cache::BlockCacheOptions).
  size_t history = size_t{1} << 16;
  cache::Discipline discipline = cache::Discipline::kPlain;
  Hints hints = Hints::kNone;
};

// Counts of a range of requests.
struct ReplayCounts {
  int64_t blocks = 0;  // in the paths
  int64_t hit_blocks = 0;
  int64_t tokens = 0;  // of the prompts
  int64_t hit_tokens = 0;

  // A request whose path has `path` blocks, of which the leading `hit` are cached.
  void Add(const TraceRequest& request, size_t path, size_t hit, int64_t block_tokens);
  // 0 to 1; 0 if there are none.
  double BlockRate() const;
  double TokenRate() const;

  friend bool operator==(const ReplayCounts&, const ReplayCounts&) = default;
};

struct ReplayResult {
  ReplayCounts all;
  std::array<ReplayCounts, 2> halves;  // of the requests
  int64_t stored_blocks = 0;
  int64_t evicted_blocks = 0;
  int64_t wasted_blocks = 0;  // of these, those that were not used since they were stored
  cache::Discipline discipline = cache::Discipline::kPlain;
  // Of policies that predict.
  std::optional<reuse::Calibration> calibration;

  friend bool operator==(const ReplayResult&, const ReplayResult&) = default;
};

// A policy may refuse to store (cache::BlockCacheOptions::may_refuse).
ReplayResult Replay(const Trace& trace, const ReplayPolicy& policy, const ReplayOptions& options);

// What any result is to be read beside.
struct ReplayBounds {
  ReplayResult infinite, belady, lru, lru_leaves_first;
};

ReplayBounds ReplayAllBounds(const Trace& trace, const ReplayOptions& options);

// The share of the way from plain LRU to Belady's optimum that a rate by blocks has gone; none if
// the way is shorter than kLeastGap.
inline constexpr double kLeastGap = 1e-4;
std::optional<double> GapClosed(double rate, double lru, double belady);

}  // namespace palimpsest::replay

#endif  // PALIMPSEST_TOOLS_REPLAY_REPLAYER_H_
