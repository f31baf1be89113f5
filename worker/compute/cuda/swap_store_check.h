// The part of swap_check that copies KV to and from a block store's memory.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_SWAP_STORE_CHECK_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_SWAP_STORE_CHECK_H_

#include "common/cuda/context.h"
#include "tools/gpu_check/check_report.h"

namespace palimpsest::cuda {

// Blocks of 2 MiB, as 16 tokens of Llama-3-8B have, between GPU `device` and chunks of memory as a
// broker makes and a worker maps and pins them.
void CheckSwapStore(CheckReport& report, const CudaContextPtr& context, int device);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_SWAP_STORE_CHECK_H_
