// Kernels for the parts of models that Llama lacks. The rules of kernels.h apply.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_SPECIAL_KERNELS_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_SPECIAL_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace palimpsest::cuda {

// What some models do to the results of Embed: embeddings are scaled, rows of a table of positions
// are added to them, rotations are stretched.
struct FinishEmbeddingArgs {
  void* hidden_states = nullptr;  // [rows, hidden]
  float scale = 1;                // of embeddings, before positions are added
  const void* table = nullptr;    // [*, hidden]; null: there is none
  const int32_t* positions = nullptr;
  int32_t table_offset = 0;     // row of the table for position 0
  float2* rotations = nullptr;  // [rows, half_dim]
  float magnitude = 1;          // of rotations
  int32_t rows = 0;
  int32_t hidden = 0;
  int32_t half_dim = 0;
};
cudaError_t FinishEmbedding(const FinishEmbeddingArgs& args, cudaStream_t stream);

enum class NormForm {
  kRms,    // x / sqrt(mean(x^2) + epsilon) * (offset + weight)
  kLayer,  // (x - mean(x)) / sqrt(variance(x) + epsilon) * weight + bias
};

struct NormArgs {
  NormForm form = NormForm::kRms;
  const void* input = nullptr;  // [*, size]
  const void* weight = nullptr;
  const void* bias = nullptr;            // kLayer
  float offset = 0;                      // kRms
  const int32_t* row_indexes = nullptr;  // as in RmsNormArgs
  void* output = nullptr;                // [rows, size]
  bool add = false;                      // to what `output` holds
  int32_t rows = 0;
  int32_t size = 0;  // at most 32,768
  float epsilon = 0;
};
cudaError_t Normalize(const NormArgs& args, cudaStream_t stream);

// output[r, i] = gelu(input[r, i]) * input[r, size + i], gelu in its tanh form.
cudaError_t GeluMultiply(const void* input, void* output, int32_t rows, int32_t size,
                         cudaStream_t stream);
// output[r, i] = max(0, input[r, i]).
cudaError_t Relu(const void* input, void* output, int32_t rows, int32_t size, cudaStream_t stream);

// values[i] = cap * tanh(values[i] / cap), in float32.
cudaError_t SoftCap(float* values, int64_t count, float cap, cudaStream_t stream);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_SPECIAL_KERNELS_H_
