#include "common/monotonic_time.h"

#include <chrono>

#include "absl/time/clock.h"

namespace palimpsest {

absl::Time MonotonicNow() {
  using Steady = std::chrono::steady_clock;
  struct Start {
    const Steady::time_point steady = Steady::now();
    const absl::Time wall = absl::Now();
  };
  static const Start start;
  return start.wall + absl::FromChrono(Steady::now() - start.steady);
}

}  // namespace palimpsest
