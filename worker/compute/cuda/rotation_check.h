// Checks rotating layers on GPUs: random schedules of steps, in which what rotates changes, beside
// the same steps without.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_ROTATION_CHECK_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_ROTATION_CHECK_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "nlohmann/json.hpp"
#include "worker/compute/cuda/gpu_model.h"

namespace palimpsest::cuda {

// `model` has parameters; it keeps its image afterwards. "ok": whether tokens and log-probabilities
// have the same bits, whatever rotated, over `schedules` schedules of prompt chunks, decodes,
// pipelined decodes and steps that were refused in the middle. Memory that was taken from layers
// held NaN.
absl::StatusOr<nlohmann::ordered_json> RunRotationCheck(GpuModel& model, ImagePlace place,
                                                        int32_t block_tokens, int schedules);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_ROTATION_CHECK_H_
