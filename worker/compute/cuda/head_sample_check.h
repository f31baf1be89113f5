// Are samples of heads right, on this GPU? Against fp64.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_HEAD_SAMPLE_CHECK_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_HEAD_SAMPLE_CHECK_H_

#include "worker/compute/cuda/checked_model.h"

namespace palimpsest::cuda {

// Heads of several shapes, contexts and both types of KV, in scattered blocks; with the time that a
// sample of a layer takes. Fails where a share or an effect is off by more than 0.01.
Json CheckHeadSamples();

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_HEAD_SAMPLE_CHECK_H_
