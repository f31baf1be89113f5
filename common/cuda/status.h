// From CUDA's error codes to absl::Status. A sticky error (an illegal access, a lost device) makes
// every later call of the process fail: the caller ends the process.
#ifndef PALIMPSEST_COMMON_CUDA_STATUS_H_
#define PALIMPSEST_COMMON_CUDA_STATUS_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace palimpsest::cuda {

// OK, ResourceExhausted for want of memory, or Internal; the message is `what`, the error's name
// and its description.
absl::Status CudaStatus(cudaError_t error, absl::string_view what);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_COMMON_CUDA_STATUS_H_
