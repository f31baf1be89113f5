#include "broker/core/prefetch/prefetch_planner.h"

#include <algorithm>
#include <cassert>
#include <cmath>

namespace palimpsest::prefetch {

PrefetchPlanner::PrefetchPlanner(const Options& options)
    : max_wishes_(options.max_wishes), max_watched_(options.max_watched) {
  assert(max_wishes_ > 0 && max_watched_ > 0);
  for (const PrefetchBudget& budget : options.tiers) tiers_.push_back({.budget = budget});
}

bool PrefetchPlanner::Want(const Wish& wish) {
  assert(wish.start <= wish.deadline);
  const auto old = wishes_.find(wish.subject);
  if (old != wishes_.end()) {
    if (old->second.trigger > wish.trigger) return false;
    by_start_.erase({old->second.start, wish.subject});
    old->second = wish;
  } else {
    if (wishes_.size() >= max_wishes_) {
      ++CountsOf(wish.trigger).refused;
      return false;
    }
    wishes_.emplace(wish.subject, wish);
  }
  by_start_.emplace(wish.start, wish.subject);
  return true;
}

void PrefetchPlanner::Cancel(SubjectId subject) {
  const auto wish = wishes_.find(subject);
  if (wish == wishes_.end()) return;
  by_start_.erase({wish->second.start, subject});
  wishes_.erase(wish);
}

std::optional<absl::Time> PrefetchPlanner::NextStart() const {
  if (by_start_.empty()) return std::nullopt;
  return by_start_.begin()->first;
}

std::optional<Wish> PrefetchPlanner::TakeDue(absl::Time now) {
  while (!by_start_.empty() && by_start_.begin()->first <= now) {
    const Wish wish = wishes_.at(by_start_.begin()->second);
    Cancel(wish.subject);
    if (wish.deadline >= now) return wish;
    ++CountsOf(wish.trigger).late;
  }
  return std::nullopt;
}

PrefetchPlanner::Grant PrefetchPlanner::Begin(absl::Time now, size_t tier, size_t blocks,
                                              Bytes block, const Wish& wish) {
  assert(tier < tiers_.size() && block.count() > 0);
  Tier& link = tiers_[tier];
  const absl::Time start = std::max(now, link.free);
  Grant grant{.blocks = 0, .complete = start};
  const double seconds = absl::ToDoubleSeconds(wish.deadline - start - link.budget.latency);
  if (link.budget.bytes_per_second > 0 && seconds > 0) {
    const double fit =
        std::floor(seconds * link.budget.bytes_per_second / static_cast<double>(block.count()));
    grant.blocks = fit >= static_cast<double>(blocks) ? blocks : static_cast<size_t>(fit);
  }
  CountsOf(wish.trigger).unaffordable += static_cast<int64_t>(blocks - grant.blocks);
  if (grant.blocks == 0) return grant;
  const double bytes = static_cast<double>(grant.blocks) * static_cast<double>(block.count());
  grant.complete =
      start + link.budget.latency + absl::Seconds(bytes / link.budget.bytes_per_second);
  link.free = grant.complete;
  return grant;
}

void PrefetchPlanner::OnFetched(BlockKey block, Trigger trigger) {
  if (!watched_.try_emplace(block, Watched{trigger, fetched_}).second) return;
  ++CountsOf(trigger).fetched;
  order_.emplace_back(block, fetched_++);
  while (watched_.size() > max_watched_ || order_.size() > 2 * max_watched_) {
    const auto [oldest, number] = order_.front();
    order_.pop_front();
    const auto found = watched_.find(oldest);
    if (found != watched_.end() && found->second.number == number) Settle(oldest, false);
  }
}

void PrefetchPlanner::Settle(BlockKey block, bool used) {
  const auto found = watched_.find(block);
  if (found == watched_.end()) return;
  PrefetchCounts& counts = CountsOf(found->second.trigger);
  ++(used ? counts.used : counts.wasted);
  watched_.erase(found);
}

PrefetchCounts PrefetchPlanner::all() const {
  PrefetchCounts sum;
  for (const PrefetchCounts& counts : counts_) {
    sum.fetched += counts.fetched;
    sum.used += counts.used;
    sum.wasted += counts.wasted;
    sum.late += counts.late;
    sum.refused += counts.refused;
    sum.unaffordable += counts.unaffordable;
  }
  return sum;
}

}  // namespace palimpsest::prefetch
