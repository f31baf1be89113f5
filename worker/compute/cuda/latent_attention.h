// Attention over cached latents (multi-head latent attention, absorbed) by FlashInfer's MLA
// kernels, behind plain structs as in attention.h. All heads meet the same cached vector of a
// token: kLatentRank numbers that are its value as well, then kLatentRotary rotated ones.
//
// One launch serves the whole step, decodes and prompt chunks alike. It is cooperative, one thread
// block for each multiprocessor, waits for the kernel before to end and may be captured into a
// graph.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_LATENT_ATTENTION_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_LATENT_ATTENTION_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "worker/compute/cuda/attention.h"

namespace palimpsest::cuda {

inline constexpr int32_t kLatentRank = 512;
inline constexpr int32_t kLatentRotary = 64;
inline constexpr int32_t kLatentWidth = kLatentRank + kLatentRotary;

// Everything is bf16 in device memory; strides count elements, multiples of 8.
struct LatentAttentionArgs {
  // Row r, head h at absorbed + (r * heads + h) * kLatentRank. The output takes the same place: a
  // block has read its queries when it writes there.
  void* absorbed = nullptr;
  // Row r, head h at rotary + r * rotary_row + h * rotary_head.
  void* rotary = nullptr;
  uint32_t rotary_row = 0;
  uint32_t rotary_head = 0;
  int32_t heads = 0;
  float scale = 0;
  // Of one layer, in block 0; token t of block b at latents + b * block_stride + t * kLatentWidth.
  void* latents = nullptr;
  uint32_t block_stride = 0;
  int32_t block_tokens = 0;
  int32_t* block_ids = nullptr;
  // A LatentPlan's arrays (latent_plan.h).
  int32_t *first_row = nullptr, *first_block = nullptr, *rows = nullptr, *tokens = nullptr,
          *tile = nullptr, *begin = nullptr, *end = nullptr, *partial = nullptr,
          *team_pieces = nullptr, *merge_begin = nullptr, *merge_end = nullptr,
          *merge_partial_begin = nullptr, *merge_partial_end = nullptr, *merge_stride = nullptr;
  int32_t team_blocks = 0;
  int32_t teams = 0;
  void* partial_output = nullptr;  // [LatentPartialRows, kLatentRank]
  float* partial_lse = nullptr;    // [LatentPartialRows]
};

// For sm_90a.
AttentionError LatentAttentionHopper(const LatentAttentionArgs& args, cudaStream_t stream);
// For sm_80 to sm_89.
AttentionError LatentAttentionAmpere(const LatentAttentionArgs& args, cudaStream_t stream);

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_LATENT_ATTENTION_H_
