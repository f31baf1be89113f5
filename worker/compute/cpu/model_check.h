// Which models the CPU's kernels take.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_MODEL_CHECK_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_MODEL_CHECK_H_

#include "absl/status/status.h"
#include "worker/core/head_profile.h"
#include "worker/core/head_sampler.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest {

// InvalidArgument, naming the number that does not fit, if they do not take it.
absl::Status CheckModel(const ModelConfig& config, const ImageLayout& layout);

// InvalidArgument if the model's heads can't be sampled or dropped, or not those.
absl::Status CheckHeads(const ModelConfig& config, const HeadSampling& sampling,
                        const LossyHeads& lossy);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_MODEL_CHECK_H_
