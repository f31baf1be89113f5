// Greedy choice of tokens: for each row of logits the index of the largest, the smallest index
// among equals. NaN counts as minus infinity, as in worker/core/sampling.h.
//
// The caller owns all memory, which must stay valid until the launched work has run. Any thread may
// launch; a launch does not block or allocate and may be captured in a CUDA graph. Needs compute
// capability 9.0.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_ARGMAX_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_ARGMAX_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace palimpsest {

// fp32 logits [rows, columns], `stride` elements between rows; token [rows]. With `programmatic`
// the launch overlaps the end of the kernel before it, and waits for its output.
cudaError_t LaunchArgmax(const float* logits, int64_t stride, int32_t rows, int32_t columns,
                         int32_t* token, bool programmatic, cudaStream_t stream);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_ARGMAX_H_
