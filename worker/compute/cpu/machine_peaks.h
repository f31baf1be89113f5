// What this machine can do at best: the yardsticks of the benchmark. Blocking, about 0.2 s each.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_MACHINE_PEAKS_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_MACHINE_PEAKS_H_

#include <cstddef>

#include "absl/types/span.h"

namespace palimpsest {

// Float32 operations (two per fused multiply-add) per second of `threads` threads together.
double MeasureFlops(int threads);

// Bytes per second that `threads` threads read from `memory` together, which should be several
// times larger than the caches.
double MeasureReadBandwidth(int threads, absl::Span<const std::byte> memory);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_MACHINE_PEAKS_H_
