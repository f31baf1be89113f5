// What keeping a block in a tier is worth, and what a place there costs (docs/policies.md,
// Placement). Pure arithmetic.
//
//   worth(block, tier) = P(reuse) x (seconds of the cheapest other source - load seconds)
//                        - seconds of moving it there, never below 0
//   rate(block, tier)  = worth x (hits per second / P(reuse)) / bytes
//
// The rate is in seconds saved per byte-second: P(reuse) / (hits per second) is how long the block
// is expected to be held until it is used or given up. A tier's price is the smoothed loss of what
// it evicted: the rate that it had there, less what it gains where it goes. Moving a block takes
// from others what its transfer makes loads wait: its length times the share of the link that loads
// keep busy.
//
// Threads: none.
#ifndef PALIMPSEST_BROKER_CORE_BLOCKS_PLACEMENT_H_
#define PALIMPSEST_BROKER_CORE_BLOCKS_PLACEMENT_H_

#include "absl/time/time.h"
#include "broker/core/cache/eviction_policy.h"
#include "common/bytes.h"

namespace palimpsest::blocks {

struct PlacementCosts {
  absl::Duration otherwise;  // of the cheapest source that remains without this copy
  absl::Duration load;       // from the tier
  absl::Duration move;       // there
};

// In seconds.
double Worth(const cache::Outlook& outlook, const PlacementCosts& costs);
// In seconds per byte-second. Requires bytes >= 1.
double WorthRate(const cache::Outlook& outlook, const PlacementCosts& costs, Bytes bytes);

class TierPrice {
 public:
  // Weight of one eviction in the mean.
  static constexpr double kWeight = 1.0 / 32;
  // The price follows the mean when they differ by this share of the price.
  static constexpr double kBand = 0.25;
  // Without evictions there is room: the mean falls by half in this time.
  static constexpr absl::Duration kHalfLife = absl::Seconds(60);

  // A block was evicted that lost so much. Times do not go back.
  void OnEvicted(double loss, absl::Time now);
  double At(absl::Time now) const;
  // As of the last eviction.
  double last() const { return price_; }

 private:
  double MeanAt(absl::Time now) const;

  double mean_ = 0;
  double price_ = 0;
  absl::Time updated_ = absl::InfinitePast();
};

// How much of the time loads keep a link busy: a mean over about kMemory.
class LinkUse {
 public:
  static constexpr absl::Duration kMemory = absl::Minutes(1);

  // A load that takes so long. Times do not go back.
  void OnLoad(absl::Duration length, absl::Time now);
  // 0 to 1.
  double ShareAt(absl::Time now) const;

 private:
  double SecondsAt(absl::Time now) const;

  double seconds_ = 0;  // decayed
  absl::Time updated_ = absl::InfinitePast();
};

}  // namespace palimpsest::blocks

#endif  // PALIMPSEST_BROKER_CORE_BLOCKS_PLACEMENT_H_
