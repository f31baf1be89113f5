#include "common/grpc_time.h"

#include <algorithm>

#include "common/monotonic_time.h"

namespace palimpsest {

gpr_timespec GrpcTimeout(absl::Duration timeout) {
  if (timeout == absl::InfiniteDuration()) return gpr_inf_future(GPR_CLOCK_MONOTONIC);
  // More than a lifetime, and far from what would overflow.
  const absl::Duration bounded =
      std::clamp(timeout, absl::ZeroDuration(), absl::Hours(24) * 365 * 100);
  const timespec span = absl::ToTimespec(bounded);
  return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                      gpr_timespec{span.tv_sec, static_cast<int32_t>(span.tv_nsec), GPR_TIMESPAN});
}

gpr_timespec GrpcDeadline(absl::Time deadline) { return GrpcTimeout(deadline - MonotonicNow()); }

absl::Time FromGrpcDeadline(gpr_timespec deadline) {
  if (gpr_time_cmp(deadline, gpr_inf_future(deadline.clock_type)) == 0) {
    return absl::InfiniteFuture();
  }
  const gpr_timespec left = gpr_time_sub(deadline, gpr_now(deadline.clock_type));
  return MonotonicNow() + absl::Seconds(left.tv_sec) + absl::Nanoseconds(left.tv_nsec);
}

}  // namespace palimpsest
