// When conversations come back, by how their last request ended: learned from those that did. "A
// tool call usually returns in 8 seconds" is a window of time and the chance that it holds.
//
// Gaps are counted in the age bins of reuse/age_bins.h, and evidence decays by count: each request
// that ends multiplies what its ending has by 1 - 1/kMemory.
//
// Complexity: O(age bins) a call. Threads: none.
#ifndef PALIMPSEST_BROKER_CORE_PREFETCH_RETURN_TIMES_H_
#define PALIMPSEST_BROKER_CORE_PREFETCH_RETURN_TIMES_H_

#include <array>
#include <optional>

#include "absl/time/time.h"
#include "broker/core/cache/eviction_policy.h"
#include "broker/core/reuse/age_bins.h"

namespace palimpsest::prefetch {

struct ReturnWindow {
  double probability = 0;  // of coming back within the window
  absl::Duration early, late;
};

class ReturnTimes {
 public:
  static constexpr double kMemory = 1024;
  // Nothing is expected before so many came back.
  static constexpr double kLeastReturns = 16;
  // The window leaves out this share of the returns on either side.
  static constexpr double kTail = 0.1;

  void OnEnd(cache::Ending how);
  // A conversation whose last request ended so goes on after `gap`.
  void OnReturn(cache::Ending how, absl::Duration gap);

  // None: too few came back to say.
  std::optional<ReturnWindow> Expect(cache::Ending how) const;

 private:
  static constexpr size_t kEndings = 3;
  struct Evidence {
    double ended = 0;
    double returned = 0;
    std::array<double, reuse::kAgeBins> gaps{};
  };

  std::array<Evidence, kEndings> by_ending_{};
};

}  // namespace palimpsest::prefetch

#endif  // PALIMPSEST_BROKER_CORE_PREFETCH_RETURN_TIMES_H_
