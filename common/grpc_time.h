// Deadlines of gRPC on the monotonic clock. gRPC's interfaces for the system clock go wrong when
// that is set between the computation of a deadline and its use.
#ifndef PALIMPSEST_COMMON_GRPC_TIME_H_
#define PALIMPSEST_COMMON_GRPC_TIME_H_

#include <grpc/support/time.h>

#include "absl/time/time.h"

namespace palimpsest {

// For set_deadline of a client's context and Shutdown of a server: `timeout` from now, or at
// `deadline`, a time of MonotonicNow. Infinite ones are never.
gpr_timespec GrpcTimeout(absl::Duration timeout);
gpr_timespec GrpcDeadline(absl::Time deadline);

// The time of MonotonicNow of a server context's raw_deadline(); InfiniteFuture if the client set
// none.
absl::Time FromGrpcDeadline(gpr_timespec deadline);

}  // namespace palimpsest

#endif  // PALIMPSEST_COMMON_GRPC_TIME_H_
