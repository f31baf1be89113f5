#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>

#include "worker/compute/cuda/attention_unit.cuh"

namespace palimpsest::cuda::internal {

inline int32_t WindowLeft(const PrefillShape& shape) {
  return shape.window > 0 ? shape.window - 1 : -1;
}

template <int kHeadDim>
AttentionError PlanFa2(const PrefillShape& shape, const PrefillBuffers& buffers, PrefillPlan& plan,
                       cudaStream_t stream) {
  return Guard([&] {
    flashinfer::PrefillPlanInfo info;
    const cudaError_t error = flashinfer::PrefillPlan<int32_t>(
        buffers.floats, buffers.float_bytes, buffers.ints, buffers.pinned, buffers.int_bytes, info,
        shape.row_indptr, shape.block_indptr, shape.rows, shape.sequences, shape.heads,
        shape.kv_heads, kHeadDim, kHeadDim, shape.block_tokens, /*enable_cuda_graph=*/false,
        sizeof(__nv_bfloat16), WindowLeft(shape), /*fixed_split_size=*/-1,
        /*disable_split_kv=*/false, /*num_colocated_ctas=*/0, /*uniform_q_len=*/0,
        /*fixed_uniform_q_len=*/false, stream, sizeof(__nv_bfloat16));
    StorePlan(info, false, plan);
    return error;
  });
}

template <int kHeadDim>
AttentionError RunFa2(const PrefillPlan& plan, const PrefillShape& shape, const Queries& queries,
                      const PagedKv& kv, int32_t* row_indptr, const PrefillBuffers& buffers,
                      cudaStream_t stream) {
  using flashinfer::GetPtrFromBaseOffset;
  using T = __nv_bfloat16;
  using Params = flashinfer::BatchPrefillPagedParams<T, T, T, int32_t>;
  using Variant = flashinfer::DefaultAttention<false, /*use_sliding_window=*/true, false, false>;
  return Guard([&] {
    const auto info = LoadPlan<flashinfer::PrefillPlanInfo>(plan);
    const int64_t strides[] = {kv.page_stride, int64_t{kv.kv_heads} * kHeadDim, kHeadDim};
    flashinfer::paged_kv_t<T, int32_t> paged(kv.kv_heads, kv.block_tokens, kHeadDim, kv.sequences,
                                             flashinfer::QKVLayout::kNHD, static_cast<T*>(kv.keys),
                                             static_cast<T*>(kv.values), strides, kv.indices,
                                             kv.indptr, kv.last_block_len);
    Params params(static_cast<T*>(queries.query), paged, nullptr, row_indptr, nullptr, nullptr,
                  static_cast<T*>(queries.output), nullptr, nullptr, queries.heads,
                  static_cast<int32_t>(queries.query_stride), kHeadDim, WindowLeft(shape), 0.0f,
                  queries.scale, 1.0f, 1e4f);
    params.request_indices =
        GetPtrFromBaseOffset<int32_t>(buffers.ints, info.request_indices_offset);
    params.qo_tile_indices =
        GetPtrFromBaseOffset<int32_t>(buffers.ints, info.qo_tile_indices_offset);
    params.kv_tile_indices =
        GetPtrFromBaseOffset<int32_t>(buffers.ints, info.kv_tile_indices_offset);
    params.o_indptr = GetPtrFromBaseOffset<int32_t>(buffers.ints, info.o_indptr_offset);
    params.kv_chunk_size_ptr =
        GetPtrFromBaseOffset<int32_t>(buffers.ints, info.kv_chunk_size_ptr_offset);
    T* partial_output = nullptr;
    float* partial_lse = nullptr;
    if (info.split_kv) {
      params.merge_indptr = GetPtrFromBaseOffset<int32_t>(buffers.ints, info.merge_indptr_offset);
      partial_output = GetPtrFromBaseOffset<T>(buffers.floats, info.v_offset);
      partial_lse = GetPtrFromBaseOffset<float>(buffers.floats, info.s_offset);
    }
    params.padded_batch_size = info.padded_batch_size;
    params.max_total_num_rows = info.total_num_rows;
    const auto run = [&](auto tile) {
      return flashinfer::BatchPrefillWithPagedKVCacheDispatched<
          /*SAME_KV_STRIDES=*/true, tile.value, kHeadDim, kHeadDim,
          flashinfer::PosEncodingMode::kNone, /*USE_FP16_QK_REDUCTION=*/false,
          flashinfer::MaskMode::kCausal, /*USE_TOKEN_HEAD_SF=*/false, Variant, Params>(
          params, partial_output, partial_lse, /*enable_pdl=*/false, stream);
    };
    switch (info.cta_tile_q) {
      case 16:
        return run(std::integral_constant<uint32_t, 16>());
      case 64:
        return run(std::integral_constant<uint32_t, 64>());
      default:
        return run(std::integral_constant<uint32_t, 128>());
    }
  });
}

}  // namespace palimpsest::cuda::internal
