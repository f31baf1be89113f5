#include "worker/compute/cuda/attention_unit.cuh"
#include "worker/compute/cuda/fa3_traits.cuh"

namespace palimpsest::cuda::internal {

// FlashInfer's tiles for these head dimensions.
template <int kHeadDim, typename T>
using Fa3Traits = OrderedTraits</*kTma=*/false, kHeadDim, /*kRows=*/kHeadDim == 64 ? 192 : 128,
                                /*kKeys=*/96, T>;

template <int kHeadDim>
AttentionError PlanFa3(const PrefillShape& shape, const PrefillBuffers& buffers, PrefillPlan& plan,
                       cudaStream_t stream) {
  return Guard([&] {
    flashinfer::PrefillPlanSM90Info info;
    const cudaError_t error = flashinfer::PrefillSM90Plan<int32_t>(
        buffers.floats, buffers.float_bytes, buffers.ints, buffers.pinned, buffers.int_bytes, info,
        shape.row_indptr, shape.block_indptr, shape.kv_tokens, shape.rows, shape.sequences,
        shape.heads, shape.kv_heads, kHeadDim, kHeadDim, shape.block_tokens, /*causal=*/true,
        /*enable_cuda_graph=*/false, sizeof(__nv_bfloat16), stream);
    // Beyond 4,096 tiles per head FlashInfer wants another instantiation; no step is that large.
    if (info.same_schedule_for_all_heads) return cudaErrorNotSupported;
    StorePlan(info, true, plan);
    return error;
  });
}

template <int kHeadDim>
AttentionError RunFa3(const PrefillPlan& plan, const PrefillShape& shape, const Queries& queries,
                      const PagedKv& kv, int32_t*, const PrefillBuffers& buffers,
                      cudaStream_t stream) {
  using flashinfer::GetPtrFromBaseOffset;
  using T = flashinfer::cutlass_dtype_t<__nv_bfloat16>;
  using Params = flashinfer::BatchPrefillPagedParams<T, T, T, int32_t>;
  return Guard([&] {
    const auto info = LoadPlan<flashinfer::PrefillPlanSM90Info>(plan);
    const auto ints = [&](int64_t offset) {
      return GetPtrFromBaseOffset<int32_t>(buffers.ints, offset);
    };
    Params params{};
    params.q_ptr = static_cast<T*>(queries.query);
    params.k_ptr = static_cast<T*>(kv.keys);
    params.v_ptr = static_cast<T*>(kv.values);
    params.o_ptr = static_cast<T*>(queries.output);
    params.q_stride_n = queries.query_stride;
    params.q_stride_h = kHeadDim;
    params.o_stride_n = int64_t{queries.heads} * kHeadDim;
    params.o_stride_h = kHeadDim;
    params.k_stride_n = params.v_stride_n = int64_t{kv.kv_heads} * kHeadDim;
    params.k_stride_h = params.v_stride_h = kHeadDim;
    params.k_page_stride = params.v_page_stride = kv.page_stride;
    params.nnz_qo = shape.rows;
    params.num_qo_heads = queries.heads;
    params.num_kv_heads = kv.kv_heads;
    params.group_size = queries.heads / kv.kv_heads;
    params.page_size = kv.block_tokens;
    params.window_left = -1;
    params.causal = true;
    params.qo_tile_indices = ints(info.qo_tile_indices_offset);
    params.qo_indptr = ints(info.qo_indptr_offset);
    params.kv_indptr = ints(info.kv_indptr_offset);
    params.qo_lens = ints(info.qo_len_offset);
    params.kv_lens = ints(info.kv_len_offset);
    params.head_indices = ints(info.head_indices_offset);
    params.work_indptr = ints(info.work_indptr_offset);
    params.batch_indices = ints(info.batch_indices_offset);
    params.kv_indices = kv.indices;
    params.additional_params.sm_scale = queries.scale;
    return flashinfer::BatchPrefillWithPagedKVCacheKernelTraitsDispatched<
        Fa3Traits<kHeadDim, T>, /*LEFT_SLIDING_WINDOW=*/false, /*CAUSAL=*/true,
        /*SAME_SCHEDULE_FOR_ALL_HEADS=*/false, Params>(params, stream);
  });
}

}  // namespace palimpsest::cuda::internal
