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
    return PlanCausalFa3<kHeadDim>(shape, shape.block_indptr, shape.block_tokens, buffers, plan,
                                   stream);
  });
}

template <int kHeadDim>
AttentionError RunFa3(const PrefillPlan& plan, const PrefillShape& shape, const Queries& queries,
                      const PagedKv& kv, int32_t*, const PrefillBuffers& buffers,
                      cudaStream_t stream) {
  using T = flashinfer::cutlass_dtype_t<__nv_bfloat16>;
  using Params = flashinfer::BatchPrefillPagedParams<T, T, T, int32_t>;
  return Guard([&] {
    auto params = CausalFa3Params<kHeadDim, Params>(plan, shape, queries, kv.kv_heads, buffers);
    params.k_ptr = static_cast<T*>(kv.keys);
    params.v_ptr = static_cast<T*>(kv.values);
    params.k_stride_n = params.v_stride_n = int64_t{kv.kv_heads} * kHeadDim;
    params.k_page_stride = params.v_page_stride = kv.page_stride;
    params.page_size = kv.block_tokens;
    params.kv_indices = kv.indices;
    return flashinfer::BatchPrefillWithPagedKVCacheKernelTraitsDispatched<
        Fa3Traits<kHeadDim, T>, /*LEFT_SLIDING_WINDOW=*/false, /*CAUSAL=*/true,
        /*SAME_SCHEDULE_FOR_ALL_HEADS=*/false, Params>(params, stream);
  });
}

}  // namespace palimpsest::cuda::internal
