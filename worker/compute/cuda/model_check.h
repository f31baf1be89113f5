// Which models the GPU's kernels take. Needs no GPU.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_MODEL_CHECK_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_MODEL_CHECK_H_

#include "absl/status/status.h"
#include "worker/model/image_layout.h"
#include "worker/model/model_config.h"

namespace palimpsest::cuda {

// InvalidArgument, naming the number that does not fit, if they do not take it. `config` is that of
// one of `ranks` ranks.
absl::Status CheckModel(const ModelConfig& config, const ImageLayout& layout, int ranks);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_MODEL_CHECK_H_
