#include <flashinfer/attention/decode.cuh>
#include <flashinfer/attention/default_decode_params.cuh>
#include <flashinfer/attention/variants.cuh>

#include "worker/compute/cuda/attention_unit.cuh"

namespace palimpsest::cuda::internal {

template <int kHeadDim>
AttentionError Decode(const Queries& queries, const PagedKv& kv, const DecodeWork& work,
                      bool overlap_launch, cudaStream_t stream) {
  using T = __nv_bfloat16;
  using Params = flashinfer::BatchDecodeParams<T, T, T, int32_t>;
  using Variant = flashinfer::DefaultAttention<false, false, false, false>;
  return Guard([&] {
    const int64_t strides[] = {kv.page_stride, int64_t{kv.kv_heads} * kHeadDim, kHeadDim};
    flashinfer::paged_kv_t<T, int32_t> paged(kv.kv_heads, kv.block_tokens, kHeadDim, kv.sequences,
                                             flashinfer::QKVLayout::kNHD, static_cast<T*>(kv.keys),
                                             static_cast<T*>(kv.values), strides, kv.indices,
                                             kv.indptr, kv.last_block_len);
    Params params(static_cast<T*>(queries.query), nullptr, paged, static_cast<T*>(queries.output),
                  nullptr, nullptr, queries.heads, static_cast<int32_t>(queries.query_stride),
                  kHeadDim, -1, 0.0f, queries.scale, 1.0f, 1e4f);
    params.request_indices = work.tile_sequence;
    params.kv_tile_indices = work.tile_chunk;
    params.o_indptr = work.first_tile;
    params.kv_chunk_size_ptr = work.chunk_tokens;
    params.block_valid_mask = work.valid_tiles;
    params.padded_batch_size = work.tiles;
    return flashinfer::BatchDecodeWithPagedKVCacheDispatched<
        kHeadDim, flashinfer::PosEncodingMode::kNone, Variant, Params>(
        params, static_cast<T*>(work.partial_output), work.partial_lse, overlap_launch, stream);
  });
}

}  // namespace palimpsest::cuda::internal
