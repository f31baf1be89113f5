// Are the norms right, on this GPU, for rows of every width that a model may have? Against fp64.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_NORM_CHECK_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_NORM_CHECK_H_

#include "worker/compute/cuda/checked_model.h"

namespace palimpsest::cuda {

// Plain root mean squares, with an offset and added to what is there, and layer norms, of rows that
// are picked. Fails where an element is further off than two roundings to bf16, or a launch is
// refused.
Json CheckNorms();

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_NORM_CHECK_H_
