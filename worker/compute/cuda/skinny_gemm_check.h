// Is the skinny matrix product right, on this GPU? Against fp64, with every fused part, for shapes
// that use whole and partial tiles.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_SKINNY_GEMM_CHECK_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_SKINNY_GEMM_CHECK_H_

#include <cuda_runtime_api.h>

#include "worker/compute/cuda/skinny_gemm.h"

namespace palimpsest::bench {

using SkinnyLauncher = cudaError_t (*)(const SkinnyGemm&, cudaStream_t);

struct SkinnyCheck {
  bool passed = true;
  double fp32_error = 0;   // largest relative error (2-norms) of plain products with fp32 output
  double fused_error = 0;  // largest of bf16 outputs with fused parts
  int cases = 0;
};

// Prints each failure. A case fails if the error is above 5e-5 (fp32) or 6e-3 (fused, bf16), if a
// second run or another number of tokens gives a row other bits, or if memory around y changes.
SkinnyCheck CheckSkinnyGemm(SkinnyLauncher launch);

}  // namespace palimpsest::bench

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_SKINNY_GEMM_CHECK_H_
