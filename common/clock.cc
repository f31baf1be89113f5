#include "common/clock.h"

#include "common/monotonic_time.h"

namespace palimpsest {
namespace {

class RealClock : public Clock {
 public:
  absl::Time Now() const override { return MonotonicNow(); }
};

}  // namespace

const Clock& Clock::Real() {
  static const RealClock* const clock = new RealClock;
  return *clock;
}

}  // namespace palimpsest
