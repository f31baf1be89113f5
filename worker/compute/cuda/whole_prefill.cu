#include "worker/compute/cuda/fa3_traits.cuh"
#include "worker/compute/cuda/whole_prefill.h"

namespace palimpsest::cuda {
namespace {

constexpr int kHeadDim = 128;

}  // namespace

bool IsWholePrefill(const PrefillShape& shape) {
  if (shape.head_dim != kHeadDim) return false;
  for (int32_t i = 0; i < shape.sequences; ++i) {
    if (shape.kv_tokens[i] != shape.row_indptr[i + 1] - shape.row_indptr[i]) return false;
  }
  return true;
}

AttentionError PlanWholePrefill(const PrefillShape& shape, const PrefillBuffers& buffers,
                                PrefillPlan& plan, cudaStream_t stream) {
  return internal::Guard([&] {
    return internal::PlanCausalFa3<kHeadDim>(shape, shape.row_indptr, /*kv_page=*/1, buffers, plan,
                                             stream);
  });
}

AttentionError RunWholePrefill(const PrefillPlan& plan, const PrefillShape& shape,
                               const Queries& queries, const PrefillBuffers& buffers,
                               cudaStream_t stream) {
  using T = flashinfer::cutlass_dtype_t<__nv_bfloat16>;
  using Params = flashinfer::BatchPrefillRaggedParams<T, T, T, int32_t>;
  // FlashInfer's tiles for this head dimension with a causal mask.
  using Traits = internal::OrderedTraits</*kTma=*/true, kHeadDim, /*kRows=*/128, /*kKeys=*/128, T>;
  return internal::Guard([&] {
    auto params =
        internal::CausalFa3Params<kHeadDim, Params>(plan, shape, queries, shape.kv_heads, buffers);
    params.k_ptr = params.q_ptr + int64_t{queries.heads} * kHeadDim;
    params.v_ptr = params.k_ptr + int64_t{shape.kv_heads} * kHeadDim;
    params.k_stride_n = params.v_stride_n = queries.query_stride;
    params.nnz_kv = shape.rows;
    return flashinfer::BatchPrefillWithRaggedKVCacheKernelTraitsDispatched<
        Traits, /*LEFT_SLIDING_WINDOW=*/false, /*CAUSAL=*/true,
        /*SAME_SCHEDULE_FOR_ALL_HEADS=*/false>(params, stream);
  });
}

}  // namespace palimpsest::cuda
