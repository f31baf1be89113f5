// A norm that is taken of sums over ranks, as it passes through collectives to their kernels.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_SUMMED_NORM_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_SUMMED_NORM_H_

#include <cstdint>

namespace palimpsest::cuda {

// Each sums up every so many vectors of 8 numbers of a row, at most 4 of them.
inline constexpr int kSummedNormThreads = 256;
inline constexpr int kSummedNormVectors = 4;

// output = x / sqrt(mean(x^2) + epsilon) * weight, row by row; bfloat16.
struct SummedNorm {
  const void* weight = nullptr;  // [size]
  void* output = nullptr;        // [rows, size]
  int32_t rows = 0;
  int32_t size = 0;
  float epsilon = 0;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_SUMMED_NORM_H_
