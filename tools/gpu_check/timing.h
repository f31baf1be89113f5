// How the checks measure.
#ifndef PALIMPSEST_TOOLS_GPU_CHECK_TIMING_H_
#define PALIMPSEST_TOOLS_GPU_CHECK_TIMING_H_

#include <algorithm>
#include <functional>
#include <vector>

#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/monotonic_time.h"

namespace palimpsest {

inline double GigabytesPerSecond(Bytes bytes, absl::Duration duration) {
  return static_cast<double>(bytes.count()) / 1e9 / absl::ToDoubleSeconds(duration);
}

inline absl::Duration Median(std::vector<absl::Duration> times) {
  const auto middle = times.begin() + static_cast<std::ptrdiff_t>(times.size() / 2);
  std::nth_element(times.begin(), middle, times.end());
  return *middle;
}

inline absl::Duration Timed(const std::function<void()>& work) {
  const absl::Time start = MonotonicNow();
  work();
  return MonotonicNow() - start;
}

}  // namespace palimpsest

#endif  // PALIMPSEST_TOOLS_GPU_CHECK_TIMING_H_
