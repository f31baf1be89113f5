// How many KV slabs a worker should ask the broker for: what its sequences need, and a reserve that
// is refilled ahead of need.
//
// The target stays where it is while the reserve is between the low-water and the high-water mark;
// otherwise it is set to the middle of the two. It rises at once, and falls only when demand has
// been lower for `shrink_delay`, so that bursts do not make slabs travel.
//
// Not thread-safe. Does not block.
#ifndef PALIMPSEST_WORKER_CORE_KV_TARGET_H_
#define PALIMPSEST_WORKER_CORE_KV_TARGET_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/time/time.h"

namespace palimpsest {

// In slabs.
struct KvDemand {
  // Without these the running sequences cannot take their next step.
  int32_t needed = 0;
  // Running sequences and those that could run beside them.
  int32_t wanted = 0;
};

class KvTargetPolicy {
 public:
  struct Config {
    int32_t low_water_slabs = 2;
    int32_t high_water_slabs = 8;
    absl::Duration shrink_delay = absl::Seconds(10);
    // Never ask for more: the size of the KV region.
    int32_t max_slabs = 0;

    absl::Status Validate() const;
  };

  struct Target {
    int32_t target_slabs = 0;
    int32_t needed_slabs = 0;

    friend bool operator==(const Target&, const Target&) = default;
  };

  explicit KvTargetPolicy(const Config& config) : config_(config) {}

  // Requires times that do not decrease.
  Target Update(const KvDemand& demand, absl::Time now);

 private:
  const Config config_;
  int32_t target_ = 0;
  absl::Time high_since_ = absl::InfiniteFuture();  // the reserve is above high water since then
  int32_t peak_ = 0;                                // largest demand since then
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_KV_TARGET_H_
