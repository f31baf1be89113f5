#include "tools/replay/tiered_replay.h"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <limits>
#include <queue>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "broker/core/prefetch/return_times.h"

namespace palimpsest::replay {
namespace {

using prefetch::PrefetchPlanner;
using prefetch::SubjectId;
using prefetch::Trigger;
using prefetch::Wish;

constexpr size_t kInto = 1;  // the tier that prefetches go to
// A continuation may lack so many of the last blocks of what it goes on from (client_hints.h).
constexpr size_t kSlack = 2;
// Transitions that are less likely than that are not prefetched for.
constexpr double kLeastProbability = 0.25;
constexpr size_t kNextBlocks = 8;
constexpr absl::Duration kNextBlocksDeadline = absl::Seconds(10);
constexpr uint32_t kNobody = std::numeric_limits<uint32_t>::max();

FirstTokenTimes TimesOf(std::vector<double> seconds) {
  if (seconds.empty()) return {};
  std::sort(seconds.begin(), seconds.end());
  const auto rank = [&seconds](double share) {
    const auto index = static_cast<size_t>(std::ceil(share * static_cast<double>(seconds.size())));
    return absl::Seconds(seconds[std::max<size_t>(index, 1) - 1]);
  };
  double sum = 0;
  for (const double second : seconds) sum += second;
  return {.p50 = rank(0.5),
          .p99 = rank(0.99),
          .mean = absl::Seconds(sum / static_cast<double>(seconds.size()))};
}

PrefetchPlanner::Options PlannerOptions(const TierCosts& costs) {
  PrefetchPlanner::Options options;
  for (size_t i = 0; i < costs.tiers.size(); ++i) {
    const ReplayTier& tier = costs.tiers[i];
    options.tiers.push_back({.latency = tier.latency,
                             .bytes_per_second = i > kInto ? tier.prefetch_bytes_per_second : 0});
  }
  return options;
}

// What is fetched ahead: who is expected to come, and what they will want.
class Prefetches {
 public:
  Prefetches(const Trace& trace, const TierCosts& costs, Bytes block, TieredCache& cache)
      : trace_(trace),
        costs_(costs),
        block_(block),
        cache_(cache),
        planner_(PlannerOptions(costs)),
        last_use_(trace.distinct_blocks(), kNobody),
        subjects_(trace.requests().size()) {
    for (size_t i = kInto + 1; i < costs.tiers.size(); ++i) {
      rate_ = std::max(rate_, costs.tiers[i].prefetch_bytes_per_second);
    }
    cache_.OnEvict([this](size_t tier, BlockKey key) {
      if (tier == kInto) planner_.OnGone(key);
    });
  }

  const PrefetchPlanner& planner() const { return planner_; }

  // All that happens until then.
  void RunUntil(absl::Time now) {
    while (costs_.announce > absl::ZeroDuration() && announced_ < trace_.requests().size() &&
           ArrivalOf(announced_) - costs_.announce <= now) {
      const absl::Time arrival = ArrivalOf(announced_);
      Offer({.subject = SubjectId(kAnnouncedSubjects + announced_),
             .trigger = Trigger::kAnnounced,
             .start = std::max(arrival - costs_.announce, now_),
             .deadline = arrival},
            {announced_, trace_.path(announced_).size()});
      ++announced_;
    }
    for (absl::Time next = NextTime(); next <= now; next = NextTime()) Step(next);
    now_ = std::max(now_, now);
  }

  // A request begins, of which the leading `hit` blocks were cached.
  void OnRequest(size_t request, size_t hit) {
    Cancel(SubjectId(kAnnouncedSubjects + request));
    const absl::Span<const uint32_t> path = trace_.path(request);
    if (planner_.watched() > 0) {
      for (size_t i = 0; i < hit; ++i) planner_.OnUsed({0, path[i]});
    }
    subjects_[request] = request;
    size_t known = path.size();
    while (known > 0 && last_use_[path[known - 1]] == kNobody) --known;
    if (known > 1) {
      const uint32_t before = last_use_[path[known - 1]];
      if (known + kSlack >= trace_.path(before).size()) {
        subjects_[request] = subjects_[before];
        returns_.OnReturn(trace_.requests()[before].ending,
                          trace_.requests()[request].arrival - trace_.requests()[before].arrival);
        Cancel(SubjectId(subjects_[request]));
      }
    }
  }

  void OnEnd(size_t request, const ClientHint& hint) {
    const absl::Span<const uint32_t> path = trace_.path(request);
    WantNextBlocks(path);
    for (const uint32_t block : path) last_use_[block] = static_cast<uint32_t>(request);
    const cache::Ending how = trace_.requests()[request].ending;
    const std::optional<prefetch::ReturnWindow> window = returns_.Expect(how);
    returns_.OnEnd(how);
    if (hint.last_turn || rate_ == 0) return;
    absl::Time early, late;
    double probability = 1;
    if (hint.expected_idle.has_value()) {
      early = late = now_ + *hint.expected_idle;
    } else if (window.has_value() && window->probability >= kLeastProbability) {
      early = now_ + window->early;
      late = now_ + window->late;
      probability = window->probability;
    } else {
      return;
    }
    // Twice what the transfer takes, as others may be before it.
    const absl::Duration transfer = absl::Seconds(
        2 * static_cast<double>((block_ * static_cast<int64_t>(path.size())).count()) / rate_);
    Offer({.subject = SubjectId(subjects_[request]),
           .trigger = Trigger::kTransition,
           .start = std::max(now_, early - transfer),
           .deadline = late},
          {request, path.size(), probability});
  }

 private:
  static constexpr uint64_t kAnnouncedSubjects = uint64_t{1} << 32;
  static constexpr uint64_t kNextSubjects = uint64_t{1} << 33;
  // The head of a request's path, and how likely it is wanted.
  struct Target {
    size_t request = 0;
    size_t blocks = 0;
    double probability = 1;
  };
  struct Arriving {
    absl::Time complete;
    uint64_t number;  // in order of their begin
    Target target;
    Trigger trigger;

    friend bool operator<(const Arriving& a, const Arriving& b) {
      return std::pair(b.complete, b.number) < std::pair(a.complete, a.number);
    }
  };

  absl::Time ArrivalOf(size_t request) const {
    return absl::UnixEpoch() + trace_.requests()[request].arrival;
  }
  absl::Time NextTime() const {
    const absl::Time next = planner_.NextStart().value_or(absl::InfiniteFuture());
    return arriving_.empty() ? next : std::min(next, arriving_.top().complete);
  }

  void Offer(const Wish& wish, const Target& target) {
    if (rate_ > 0 && planner_.Want(wish)) targets_[wish.subject] = target;
  }

  void Cancel(SubjectId subject) {
    planner_.Cancel(subject);
    targets_.erase(subject);
  }

  // The blocks behind the last one, as the request before that used it had them.
  void WantNextBlocks(absl::Span<const uint32_t> path) {
    if (path.empty() || last_use_[path.back()] == kNobody) return;
    const uint32_t before = last_use_[path.back()];
    const size_t longer = trace_.path(before).size();
    if (longer <= path.size() || trace_.path(before)[path.size() - 1] != path.back()) return;
    Offer({.subject = SubjectId(kNextSubjects + path.back()),
           .trigger = Trigger::kNextBlocks,
           .start = now_,
           .deadline = now_ + kNextBlocksDeadline},
          {before, std::min(longer, path.size() + kNextBlocks)});
  }

  // What is next, at that time.
  void Step(absl::Time time) {
    now_ = std::max(now_, time);
    if (!arriving_.empty() && arriving_.top().complete <= now_) {
      const Arriving arrived = arriving_.top();
      arriving_.pop();
      cache_.Prefetch(kInto, now_, KeysOf(arrived.target),
                      [&](BlockKey key) { planner_.OnFetched(key, arrived.trigger); });
      return;
    }
    const std::optional<Wish> wish = planner_.TakeDue(now_);
    if (!wish.has_value()) return;  // those that were due were late
    const auto target = targets_.find(wish->subject);
    assert(target != targets_.end());
    Begin(*wish, target->second);
    targets_.erase(target);
  }

  // From the first block that neither the first tier nor the second has.
  void Begin(const Wish& wish, const Target& target) {
    const std::vector<BlockKey> path = KeysOf(target);
    size_t at = 0;
    while (at < path.size() && (cache_.IsCached(0, path[at]) || cache_.IsCached(kInto, path[at]))) {
      ++at;
    }
    for (size_t tier = kInto + 1; tier < cache_.tiers(); ++tier) {
      size_t end = at;
      while (end < path.size() && cache_.IsCached(tier, path[end])) ++end;
      if (end == at) continue;
      if (cache_.PrefetchGain(tier, kInto, target.probability, wish.deadline - now_, now_) <= 0) {
        return;
      }
      const PrefetchPlanner::Grant grant = planner_.Begin(now_, tier, end - at, block_, wish);
      if (grant.blocks == 0) return;
      arriving_.push({.complete = grant.complete,
                      .number = ++begun_,
                      .target = {target.request, at + grant.blocks},
                      .trigger = wish.trigger});
      at += grant.blocks;
      if (at < end) return;
    }
  }

  std::vector<BlockKey> KeysOf(const Target& target) const {
    std::vector<BlockKey> keys;
    for (const uint32_t block : trace_.path(target.request).subspan(0, target.blocks)) {
      keys.push_back({0, block});
    }
    return keys;
  }

  const Trace& trace_;
  const TierCosts& costs_;
  const Bytes block_;
  TieredCache& cache_;
  PrefetchPlanner planner_;
  prefetch::ReturnTimes returns_;
  double rate_ = 0;                 // the best at which prefetches come; 0: there are none
  std::vector<uint32_t> last_use_;  // by block: the request that used it last
  std::vector<uint64_t> subjects_;  // by request: the first request of its conversation
  absl::flat_hash_map<SubjectId, Target> targets_;
  std::priority_queue<Arriving> arriving_;
  uint64_t begun_ = 0;
  size_t announced_ = 0;
  absl::Time now_ = absl::InfinitePast();
};

// Seconds until the first token, and which part of the path is loaded for it.
struct Start {
  absl::Duration time;
  size_t loaded = 0;
};

// Of a request whose path is cached as TieredCache::Begin says. Loading a block of a tier takes the
// same wherever it stands and computing it the longer the later it stands, so if any of a tier's
// part is loaded, all is.
Start BestStart(const TierCosts& costs, Bytes block, int64_t block_tokens, int64_t input_tokens,
                const std::vector<size_t>& ends) {
  absl::Duration load;
  Start best{.time = costs.Recompute(0, input_tokens)};
  size_t begin = 0;
  for (size_t tier = 0; tier < ends.size(); ++tier) {
    if (ends[tier] == begin) continue;
    load += costs.tiers[tier].Load(block * static_cast<int64_t>(ends[tier] - begin));
    begin = ends[tier];
    // The last token is computed in any case.
    const int64_t first = std::min(static_cast<int64_t>(begin) * block_tokens,
                                   std::max<int64_t>(input_tokens, 1) - 1);
    const absl::Duration time = load + costs.Recompute(first, input_tokens);
    if (time < best.time) best = {.time = time, .loaded = begin};
  }
  best.time += costs.first_token;
  return best;
}

}  // namespace

absl::StatusOr<TieredResult> ReplayTiers(const Trace& trace, const ReplayPolicy& policy,
                                         const ReplayOptions& options, const TierCosts& costs,
                                         Bytes token_bytes) {
  if (policy.only == cache::Discipline::kPlain || policy.unbounded) {
    return absl::InvalidArgumentError(
        absl::StrCat("policy '", policy.name, "' does not run in tiers, where leaves go first"));
  }
  const Bytes block = token_bytes * trace.block_tokens();
  TieredCache cache(costs, block, trace.block_tokens(), options.history,
                    [&](size_t blocks) { return policy.make(blocks, trace); });
  Prefetches prefetches(trace, costs, block, cache);
  const std::vector<ClientHint> hints = HintsFromTheFuture(trace, options.hints);
  TieredResult result;
  result.loaded.resize(costs.tiers.size());
  std::vector<double> seconds, recomputed;
  std::vector<BlockKey> path;
  for (size_t i = 0; i < trace.requests().size(); ++i) {
    const TraceRequest& request = trace.requests()[i];
    path.clear();
    for (const uint32_t id : trace.path(i)) path.push_back({0, id});
    const cache::RequestId id(i + 1);
    const absl::Time now = absl::UnixEpoch() + request.arrival;
    prefetches.RunUntil(now);
    const std::vector<size_t> ends = cache.Begin({.id = id,
                                                  .arrival = now,
                                                  .conversation = request.conversation,
                                                  .input_tokens = request.input_tokens},
                                                 path);
    prefetches.OnRequest(i, ends.back());
    const Start start = BestStart(costs, block, trace.block_tokens(), request.input_tokens, ends);
    for (size_t tier = 0, begin = 0; tier < ends.size() && begin < start.loaded; ++tier) {
      const auto blocks = static_cast<int64_t>(ends[tier] - begin);
      result.loaded[tier] += blocks;
      cache.OnLoad(tier, now, block * blocks);
      begin = ends[tier];
    }
    seconds.push_back(absl::ToDoubleSeconds(start.time));
    recomputed.push_back(
        absl::ToDoubleSeconds(costs.first_token + costs.Recompute(0, request.input_tokens)));
    result.saved += absl::Seconds(recomputed.back() - seconds.back());
    result.all.Add(request, path.size(), ends.back(), trace.block_tokens());
    cache.End({.id = id,
               .time = now,
               .how = request.ending,
               .output_tokens = request.output_tokens,
               .expected_idle = hints[i].expected_idle,
               .last_turn = hints[i].last_turn});
    prefetches.OnEnd(i, hints[i]);
  }
  for (size_t tier = 0; tier < cache.tiers(); ++tier) {
    result.tiers.push_back(cache.counts(tier));
    result.prices.push_back(cache.price(tier));
  }
  result.first_token = TimesOf(std::move(seconds));
  result.recomputed = TimesOf(std::move(recomputed));
  for (size_t trigger = 0; trigger < prefetch::kTriggers; ++trigger) {
    result.prefetches[trigger] = prefetches.planner().counts(static_cast<Trigger>(trigger));
  }
  result.all_prefetches = prefetches.planner().all();
  return result;
}

}  // namespace palimpsest::replay
