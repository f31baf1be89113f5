// Which models the CPU's kernels take.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_MODEL_CHECK_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_MODEL_CHECK_H_

#include "absl/status/status.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest {

// InvalidArgument, naming the number that does not fit, if they do not take it.
absl::Status CheckModel(const ModelConfig& config, const ImageLayout& layout);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_MODEL_CHECK_H_
