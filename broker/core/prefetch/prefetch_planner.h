// What is fetched from lower tiers before a request asks for it, when, and how much of that was of
// use. Three triggers:
//
// - the next blocks by position behind those that were just used;
// - a transition that is expected, such as a tool call that usually returns in 8 s (ReturnTimes, or
//   the client's hint);
// - a request that was announced: it is queued and will run soon.
//
// Each makes a *wish*: blocks of a subject (the caller's number for a path) are wanted by a
// deadline, and not before a time, since what is there too early takes room for nothing. When a
// wish is due the caller looks where the blocks lie now, and asks the budget of each tier how many
// of them can be there by the deadline. Prefetches thereby wait for each other but for nothing
// else, and what would be late is not begun.
//
// Every block that was fetched is watched until it is used, or wasted: evicted before, or unused
// when the watch is full and it is the oldest.
//
// Bounds: max_wishes and max_watched. Complexity: O(log wishes) a call. Threads: none; times come
// with the calls and never go back.
#ifndef PALIMPSEST_BROKER_CORE_PREFETCH_PREFETCH_PLANNER_H_
#define PALIMPSEST_BROKER_CORE_PREFETCH_PREFETCH_PLANNER_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/time/time.h"
#include "common/block_key.h"
#include "common/bytes.h"
#include "common/strong_int.h"

namespace palimpsest::prefetch {

enum class Trigger : uint8_t { kNextBlocks, kTransition, kAnnounced };
inline constexpr size_t kTriggers = 3;

// What a wish is for; the caller's number.
using SubjectId = StrongInt<struct PrefetchSubjectTag, uint64_t>;

struct Wish {
  SubjectId subject;
  Trigger trigger = Trigger::kNextBlocks;
  absl::Time start;
  absl::Time deadline;
};

// The share of a tier's link that prefetches may use.
struct PrefetchBudget {
  absl::Duration latency;       // of a transfer
  double bytes_per_second = 0;  // 0: nothing is prefetched from there
};

struct PrefetchCounts {
  int64_t fetched = 0;  // blocks
  int64_t used = 0;
  int64_t wasted = 0;
  int64_t late = 0;          // wishes that were due after their deadline
  int64_t refused = 0;       // wishes for which there was no room among the others
  int64_t unaffordable = 0;  // blocks that no budget brings by the deadline

  // Of the blocks of which it is known; 0 if there are none.
  double Precision() const {
    return used + wasted == 0 ? 0 : static_cast<double>(used) / static_cast<double>(used + wasted);
  }

  friend bool operator==(const PrefetchCounts&, const PrefetchCounts&) = default;
};

class PrefetchPlanner {
 public:
  struct Options {
    std::vector<PrefetchBudget> tiers;
    size_t max_wishes = 4096;
    size_t max_watched = size_t{1} << 20;
  };

  explicit PrefetchPlanner(const Options& options);

  // Of transfers from now on. Requires a tier that there is.
  void SetBudget(size_t tier, const PrefetchBudget& budget) { tiers_[tier].budget = budget; }

  // Replaces the subject's wish, if it has one; not one of a stronger trigger (in the order of
  // Trigger) by a weaker. Requires start <= deadline. False: refused.
  bool Want(const Wish& wish);
  // The subject came, or is gone. Nothing if it has no wish.
  void Cancel(SubjectId subject);

  // When TakeDue has something to say.
  std::optional<absl::Time> NextStart() const;
  // Of the wishes that are due by now the one that began to be first. Those that are late are
  // dropped.
  std::optional<Wish> TakeDue(absl::Time now);

  struct Grant {
    size_t blocks = 0;    // that may be fetched, the first of those wanted
    absl::Time complete;  // when the last of them is there
  };
  // Takes the transfers out of the tier's budget.
  Grant Begin(absl::Time now, size_t tier, size_t blocks, Bytes block, const Wish& wish);

  // The block was fetched for a wish of this trigger; nothing if it is watched already.
  void OnFetched(BlockKey block, Trigger trigger);
  // A request used it, or it was evicted. Nothing if it is not watched.
  void OnUsed(BlockKey block) { Settle(block, true); }
  void OnGone(BlockKey block) { Settle(block, false); }

  const PrefetchCounts& counts(Trigger trigger) const {
    return counts_[static_cast<size_t>(trigger)];
  }
  PrefetchCounts all() const;
  size_t watched() const { return watched_.size(); }

 private:
  struct Tier {
    PrefetchBudget budget;
    absl::Time free = absl::InfinitePast();  // when the transfers so far are through
  };
  struct Watched {
    Trigger trigger;
    uint64_t number;
  };

  PrefetchCounts& CountsOf(Trigger trigger) { return counts_[static_cast<size_t>(trigger)]; }
  void Settle(BlockKey block, bool used);

  const size_t max_wishes_;
  const size_t max_watched_;
  std::vector<Tier> tiers_;
  absl::flat_hash_map<SubjectId, Wish> wishes_;
  std::set<std::pair<absl::Time, SubjectId>> by_start_;
  absl::flat_hash_map<BlockKey, Watched> watched_;
  // Oldest first; of those no longer watched the number differs.
  std::deque<std::pair<BlockKey, uint64_t>> order_;
  uint64_t fetched_ = 0;
  std::array<PrefetchCounts, kTriggers> counts_{};
};

}  // namespace palimpsest::prefetch

#endif  // PALIMPSEST_BROKER_CORE_PREFETCH_PREFETCH_PLANNER_H_
