// Chooses the next token of each row on the GPU, with the fields, the order of filters and the
// random numbers of worker/core/sampling.h. Probabilities are summed as 2^-40 integers, so that a
// result depends on its row alone, bit for bit, and not on the order of threads.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_SAMPLER_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_SAMPLER_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "worker/compute/cuda/sampling_row.h"

namespace palimpsest::cuda {

// Most alternatives whose log-probabilities are reported.
inline constexpr int32_t kMaxTop = 20;

struct SampleArgs {
  const float* logits = nullptr;  // [rows, vocabulary]
  const SamplingRow* requests = nullptr;
  const int32_t* history = nullptr;
  const int32_t* input_tokens = nullptr;
  int32_t* tokens = nullptr;      // out: [rows]
  float* logprobs = nullptr;      // out: [rows]
  int32_t* top_tokens = nullptr;  // out: [rows, kMaxTop]
  float* top_logprobs = nullptr;  // out: [rows, kMaxTop]
  int32_t rows = 0;
  int32_t vocabulary = 0;
  bool clusters = false;  // the GPU has clusters of thread blocks
};

// Largest vocabulary that SampleRows takes.
inline constexpr int32_t kMaxVocabulary = 1 << 20;

// Raises the kernel's shared memory limit; once per device, before the first SampleRows.
cudaError_t PrepareSampler(int32_t vocabulary);

// Enqueues; may be captured into a graph.
cudaError_t SampleRows(const SampleArgs& args, cudaStream_t stream);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_SAMPLER_H_
