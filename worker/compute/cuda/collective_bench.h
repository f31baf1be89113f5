// Checks and measures the exchange between GPUs by itself: sums against the host's, times of small
// messages exchanged directly and through NCCL, and that an abort ends what waits.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_COLLECTIVE_BENCH_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_COLLECTIVE_BENCH_H_

#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"

namespace palimpsest::cuda {

// "ok": whether every check passed. Errors are those of CUDA and NCCL.
absl::StatusOr<nlohmann::ordered_json> MeasureCollectives(const std::vector<int>& devices);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_COLLECTIVE_BENCH_H_
