// Waiting, in tests, for what must happen but cannot be waited on.
#ifndef PALIMPSEST_COMMON_TESTING_EVENTUALLY_H_
#define PALIMPSEST_COMMON_TESTING_EVENTUALLY_H_

#include <functional>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "common/monotonic_time.h"

namespace palimpsest {

// Looks at `holds` again and again until it is true; false after `timeout`.
inline bool Eventually(const std::function<bool()>& holds,
                       absl::Duration timeout = absl::Seconds(20)) {
  const absl::Time deadline = MonotonicNow() + timeout;
  while (!holds()) {
    if (MonotonicNow() > deadline) return false;
    absl::SleepFor(absl::Milliseconds(2));
  }
  return true;
}

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_TESTING_EVENTUALLY_H_
