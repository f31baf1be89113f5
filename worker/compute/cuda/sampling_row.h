// What the sampling kernel (sampler.h) reads about one row; plain data, shared with the host.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_SAMPLING_ROW_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_SAMPLING_ROW_H_

#include <cstdint>

namespace palimpsest::cuda {

// One row's part of a step's staging buffer.
struct SamplingRow {
  uint64_t seed = 0;
  uint64_t output_index = 0;
  float temperature = 0;  // 0: the largest logit
  float top_p = 1;
  float min_p = 0;
  float repetition_penalty = 1;
  int32_t top_k = 0;
  int32_t logprobs = -1;
  // Tokens that the penalty applies to: history[history_begin .. + history_count) and, if
  // input_row is not negative, input_tokens[input_row].
  int32_t history_begin = 0;
  int32_t history_count = 0;
  int32_t input_row = -1;
  int32_t padding = 0;
};
static_assert(sizeof(SamplingRow) == 56);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_SAMPLING_ROW_H_
