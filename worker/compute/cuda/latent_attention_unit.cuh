#include <cuda_bf16.h>

#include <flashinfer/attention/mla_params.cuh>

#include "worker/compute/cuda/attention_unit.cuh"
#include "worker/compute/cuda/latent_attention.h"

namespace palimpsest::cuda::internal {

using LatentParams = flashinfer::MLAParams<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16, int32_t>;

inline LatentParams MakeLatentParams(const LatentAttentionArgs& args) {
  using T = __nv_bfloat16;
  LatentParams params{};
  params.q_nope = static_cast<T*>(args.absorbed);
  params.q_pe = static_cast<T*>(args.rotary);
  params.ckv = static_cast<T*>(args.latents);
  params.kpe = params.ckv + kLatentRank;
  params.partial_o = static_cast<T*>(args.partial_output);
  params.partial_lse = args.partial_lse;
  params.final_o = params.q_nope;
  params.q_indptr = args.first_row;
  params.kv_indptr = args.first_block;
  params.partial_indptr = args.partial;
  params.merge_packed_offset_start = args.merge_begin;
  params.merge_packed_offset_end = args.merge_end;
  params.merge_partial_packed_offset_start = args.merge_partial_begin;
  params.merge_partial_packed_offset_end = args.merge_partial_end;
  params.merge_partial_stride = args.merge_stride;
  params.kv_indices = args.block_ids;
  params.q_len = args.rows;
  params.kv_len = args.tokens;
  params.q_start = args.tile;
  params.kv_start = args.begin;
  params.kv_end = args.end;
  params.work_indptr = args.team_pieces;
  params.block_size = flashinfer::uint_fastdiv(args.block_tokens);
  params.num_heads = flashinfer::uint_fastdiv(args.heads);
  params.q_nope_stride_n = params.o_stride_n = args.heads * kLatentRank;
  params.q_nope_stride_h = params.o_stride_h = kLatentRank;
  params.q_pe_stride_n = args.rotary_row;
  params.q_pe_stride_h = args.rotary_head;
  params.ckv_stride_page = params.kpe_stride_page = args.block_stride;
  params.ckv_stride_n = params.kpe_stride_n = kLatentWidth;
  params.sm_scale = args.scale;
  return params;
}

}  // namespace palimpsest::cuda::internal
