// What far keys get and do in each KV head of a layer, as one token sees it
// (worker/core/head_sampler.h): a kernel beside attention, for steps that take a sample.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_HEAD_SAMPLE_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_HEAD_SAMPLE_H_

#include <cuda_runtime_api.h>

#include <cstdint>

namespace palimpsest::cuda {

// Head dimensions that the kernel takes: multiples of 32 up to this.
inline constexpr int32_t kMostSampledHeadDim = 256;

// Pointers are to device memory.
struct HeadSampleArgs {
  const void* query = nullptr;  // bf16 [kv_heads * group, head_dim], rotated
  // Of the layer in block 0, bf16 or e4m3; blocks are page_stride elements apart.
  const void* keys = nullptr;
  const void* values = nullptr;
  bool e4m3 = false;
  int64_t page_stride = 0;
  const int32_t* blocks = nullptr;  // of the sequence, from its first token on
  int32_t block_tokens = 0;
  int32_t tokens = 0;     // that the query sees, itself the last
  int32_t far_begin = 0;  // far keys: far_begin .. far_end - 1
  int32_t far_end = 0;
  int32_t kv_heads = 0;
  int32_t group = 0;  // query heads of a KV head
  int32_t head_dim = 0;
  float scale = 0;
  float soft_cap = 0;        // c > 0: scaled scores become c tanh(score / c)
  float* shares = nullptr;   // [kv_heads]
  float* effects = nullptr;  // [kv_heads]
};

// Enqueues the kernel; InvalidValue for another head_dim.
cudaError_t SampleHeads(const HeadSampleArgs& args, cudaStream_t stream);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_HEAD_SAMPLE_H_
