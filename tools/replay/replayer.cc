#include "tools/replay/replayer.h"

#include <algorithm>
#include <cassert>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "broker/core/cache/queue_policies.h"
#include "broker/core/cache/score_policies.h"
#include "broker/core/reuse/predictive_policy.h"
#include "tools/replay/belady_policy.h"

namespace palimpsest::replay {
namespace {

using cache::Discipline;
using PolicyPointer = std::unique_ptr<cache::EvictionPolicy>;

template <typename Policy>
PolicyPointer Make(size_t, const Trace&) {
  return std::make_unique<Policy>();
}

template <typename Policy>
PolicyPointer MakeSized(size_t capacity, const Trace&) {
  return std::make_unique<Policy>(capacity);
}

template <bool pairs, bool features>
PolicyPointer MakePredictive(size_t, const Trace&) {
  return std::make_unique<reuse::PredictivePolicy>(
      reuse::HazardModelOptions{.pairs = pairs, .features = features});
}

PolicyPointer MakeBelady(size_t, const Trace& trace) {
  return std::make_unique<BeladyPolicy>(trace.accesses(), trace.distinct_blocks());
}

constexpr ReplayPolicy kPolicies[] = {
    {"predictive", Discipline::kLeavesFirst, false, MakePredictive<true, true>, true},
    {"predictive-pairs", Discipline::kLeavesFirst, false, MakePredictive<true, false>, true},
    {"predictive-features", Discipline::kLeavesFirst, false, MakePredictive<false, true>, true},
    {"lru", {}, false, Make<cache::LruPolicy>},
    {"lfu", {}, false, Make<cache::LfuPolicy>},
    {"arc", {}, false, MakeSized<cache::ArcPolicy>},
    {"s3fifo", {}, false, MakeSized<cache::S3FifoPolicy>},
    {"tinylfu", {}, false, MakeSized<cache::TinyLfuPolicy>},
    {"gdsf", {}, false, Make<cache::GdsfPolicy>},
    {"belady", Discipline::kPlain, false, MakeBelady},
    {"infinite", Discipline::kLeavesFirst, true, Make<cache::LruPolicy>},
};

double Share(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

ReplayResult ReplayNamed(const Trace& trace, absl::string_view name, ReplayOptions options,
                         Discipline discipline) {
  options.discipline = discipline;
  return Replay(trace, **FindReplayPolicy(name), options);
}

}  // namespace

std::vector<std::string> ReplayPolicies() {
  std::vector<std::string> names;
  for (const ReplayPolicy& policy : kPolicies) names.emplace_back(policy.name);
  return names;
}

absl::StatusOr<const ReplayPolicy*> FindReplayPolicy(absl::string_view name) {
  for (const ReplayPolicy& policy : kPolicies) {
    if (policy.name == name) return &policy;
  }
  return absl::InvalidArgumentError(
      absl::StrCat("policy '", name, "': expected one of ", absl::StrJoin(ReplayPolicies(), ", ")));
}

void ReplayCounts::Add(const TraceRequest& request, size_t path, size_t hit, int64_t block_tokens) {
  blocks += static_cast<int64_t>(path);
  hit_blocks += static_cast<int64_t>(hit);
  tokens += request.input_tokens;
  hit_tokens += std::min(request.input_tokens, static_cast<int64_t>(hit) * block_tokens);
}

double ReplayCounts::BlockRate() const { return Share(hit_blocks, blocks); }
double ReplayCounts::TokenRate() const { return Share(hit_tokens, tokens); }

ReplayResult Replay(const Trace& trace, const ReplayPolicy& policy, const ReplayOptions& options) {
  assert(options.blocks > 0 && options.blocks <= kMostBlocks);
  const size_t capacity =
      policy.unbounded ? std::max<size_t>(1, trace.distinct_blocks()) : options.blocks;
  ReplayResult result;
  result.discipline = policy.only.value_or(options.discipline);
  cache::BlockCache cache({.capacity = capacity,
                           .history = options.history,
                           .discipline = result.discipline,
                           .may_refuse = true,
                           .store_at_end = policy.at_end},
                          policy.make(capacity, trace));
  const std::vector<ClientHint> hints = HintsFromTheFuture(trace, options.hints);
  std::vector<BlockKey> path;
  const std::vector<TraceRequest>& requests = trace.requests();
  for (size_t i = 0; i < requests.size(); ++i) {
    path.clear();
    for (const uint32_t block : trace.path(i)) path.push_back({0, block});
    const cache::RequestId id(i + 1);
    const absl::Time now = absl::UnixEpoch() + requests[i].arrival;
    const cache::BlockCache::Outcome outcome =
        cache.Begin({.id = id,
                     .arrival = now,
                     .conversation = requests[i].conversation,
                     .input_tokens = requests[i].input_tokens},
                    path);
    const cache::BlockCache::Outcome end = cache.End({.id = id,
                                                      .time = now,
                                                      .how = requests[i].ending,
                                                      .output_tokens = requests[i].output_tokens,
                                                      .expected_idle = hints[i].expected_idle,
                                                      .last_turn = hints[i].last_turn});
    result.halves[i * 2 < requests.size() ? 0 : 1].Add(requests[i], path.size(), outcome.cached,
                                                       trace.block_tokens());
    result.stored_blocks += static_cast<int64_t>(outcome.stored + end.stored);
    result.evicted_blocks += static_cast<int64_t>(outcome.evicted + end.evicted);
    result.wasted_blocks += static_cast<int64_t>(outcome.wasted + end.wasted);
  }
  if (const auto* predictive = dynamic_cast<const reuse::PredictivePolicy*>(&cache.policy())) {
    result.calibration = predictive->calibration();
  }
  for (const ReplayCounts& half : result.halves) {
    result.all.blocks += half.blocks;
    result.all.hit_blocks += half.hit_blocks;
    result.all.tokens += half.tokens;
    result.all.hit_tokens += half.hit_tokens;
  }
  return result;
}

ReplayBounds ReplayAllBounds(const Trace& trace, const ReplayOptions& options) {
  return {.infinite = ReplayNamed(trace, "infinite", options, Discipline::kLeavesFirst),
          .belady = ReplayNamed(trace, "belady", options, Discipline::kPlain),
          .lru = ReplayNamed(trace, "lru", options, Discipline::kPlain),
          .lru_leaves_first = ReplayNamed(trace, "lru", options, Discipline::kLeavesFirst)};
}

std::optional<double> GapClosed(double rate, double lru, double belady) {
  if (belady - lru < kLeastGap) return std::nullopt;
  return (rate - lru) / (belady - lru);
}

}  // namespace palimpsest::replay
