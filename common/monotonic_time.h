// The time of waits, deadlines and measurements. The wall clock (absl::Now, the system clock) may
// be set at any moment, which would lengthen waits or fire them: it is read only for what people
// see. tools/lint keeps it out of everything else.
#ifndef PALIMPSEST_COMMON_MONOTONIC_TIME_H_
#define PALIMPSEST_COMMON_MONOTONIC_TIME_H_

#include "absl/time/time.h"

namespace palimpsest {

// The wall time of the first call plus the monotonic time since: never goes back, does not jump
// when the wall clock is set. Times of two processes compare only if it was not set between their
// first calls. Thread-safe.
absl::Time MonotonicNow();

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_MONOTONIC_TIME_H_
