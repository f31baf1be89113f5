#include "worker/compute/cuda/attention_unit.cuh"
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
    flashinfer::PrefillPlanSM90Info info;
    const cudaError_t error = flashinfer::PrefillSM90Plan<int32_t>(
        buffers.floats, buffers.float_bytes, buffers.ints, buffers.pinned, buffers.int_bytes, info,
        shape.row_indptr, shape.row_indptr, shape.kv_tokens, shape.rows, shape.sequences,
        shape.heads, shape.kv_heads, kHeadDim, kHeadDim, /*page_size=*/1, /*causal=*/true,
        /*enable_cuda_graph=*/false, sizeof(__nv_bfloat16), stream);
    // Beyond 4,096 tiles per head FlashInfer wants another instantiation; no step is that large.
    if (info.same_schedule_for_all_heads) return cudaErrorNotSupported;
    internal::StorePlan(info, true, plan);
    return error;
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
    const auto info = internal::LoadPlan<flashinfer::PrefillPlanSM90Info>(plan);
    const auto ints = [&](int64_t offset) {
      return flashinfer::GetPtrFromBaseOffset<int32_t>(buffers.ints, offset);
    };
    Params params{};
    params.q_ptr = static_cast<T*>(queries.query);
    params.k_ptr = params.q_ptr + int64_t{queries.heads} * kHeadDim;
    params.v_ptr = params.k_ptr + int64_t{shape.kv_heads} * kHeadDim;
    params.o_ptr = static_cast<T*>(queries.output);
    params.q_stride_n = params.k_stride_n = params.v_stride_n = queries.query_stride;
    params.q_stride_h = params.k_stride_h = params.v_stride_h = kHeadDim;
    params.o_stride_n = int64_t{queries.heads} * kHeadDim;
    params.o_stride_h = kHeadDim;
    params.nnz_qo = params.nnz_kv = shape.rows;
    params.num_qo_heads = queries.heads;
    params.num_kv_heads = shape.kv_heads;
    params.group_size = queries.heads / shape.kv_heads;
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
    params.additional_params.sm_scale = queries.scale;
    return flashinfer::BatchPrefillWithRaggedKVCacheKernelTraitsDispatched<
        Traits, /*LEFT_SLIDING_WINDOW=*/false, /*CAUSAL=*/true,
        /*SAME_SCHEDULE_FOR_ALL_HEADS=*/false>(params, stream);
  });
}

}  // namespace palimpsest::cuda
