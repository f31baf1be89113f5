#include "common/clock.h"

#include <chrono>

#include "absl/time/clock.h"

namespace palimpsest {
namespace {

class RealClock : public Clock {
 public:
  absl::Time Now() const override {
    return wall_start_ + absl::FromChrono(std::chrono::steady_clock::now() - steady_start_);
  }

 private:
  const std::chrono::steady_clock::time_point steady_start_ = std::chrono::steady_clock::now();
  const absl::Time wall_start_ = absl::Now();
};

}  // namespace

const Clock& Clock::Real() {
  static const RealClock* const clock = new RealClock;
  return *clock;
}

}  // namespace palimpsest
