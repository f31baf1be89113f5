// Prefill attention on Hopper of sequences that begin with their step: all their keys and values
// are rows of the step, so they are read from there by the copy engine, not gathered from blocks.
// Functions only enqueue on `stream`. See attention.h for the types.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_WHOLE_PREFILL_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_WHOLE_PREFILL_H_

#include <cuda_runtime_api.h>

#include "worker/compute/cuda/attention.h"

namespace palimpsest::cuda {

// Whether every sequence begins with the step, and there is a kernel for it: head_dim 128.
bool IsWholePrefill(const PrefillShape& shape);

// As PlanPrefill and RunPrefill. `queries` points at rows of queries, keys and values, all rotated.
AttentionError PlanWholePrefill(const PrefillShape& shape, const PrefillBuffers& buffers,
                                PrefillPlan& plan, cudaStream_t stream);
AttentionError RunWholePrefill(const PrefillPlan& plan, const PrefillShape& shape,
                               const Queries& queries, const PrefillBuffers& buffers,
                               cudaStream_t stream);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_WHOLE_PREFILL_H_
