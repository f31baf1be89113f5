#include <flashinfer/attention/default_prefill_params.cuh>
#include <flashinfer/attention/prefill.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/attention/variants.cuh>

#include "worker/compute/cuda/attention_unit.cuh"

namespace palimpsest::cuda::internal {

inline int32_t WindowLeft(int32_t window) { return window > 0 ? window - 1 : -1; }

using PlainAttention = flashinfer::DefaultAttention<false, false, false, false>;
using WindowedAttention =
    flashinfer::DefaultAttention<false, /*use_sliding_window=*/true, false, false>;

// A window and a soft cap that are both told at run time.
struct CappedAttention : WindowedAttention {
  float tanh_scale = 0;

  template <typename Params>
  __device__ __host__ CappedAttention(const Params& params, uint32_t sequence, uint8_t* shared)
      : WindowedAttention(params, sequence, shared) {
    if (params.logits_soft_cap > 0) {
      tanh_scale = 2 * flashinfer::math::log2e * params.sm_scale / params.logits_soft_cap;
      sm_scale_log2 = flashinfer::math::log2e * params.logits_soft_cap;
    }
  }

  // tanh(x) = 1 - 2 / (1 + e^2x). The instruction for tanh has 11 bits only.
  REGISTER_LOGITS_TRANSFORM(params, score, sequence, row, token, head, kv_head, {
    if (tanh_scale > 0) {
      score = 1 - 2 * flashinfer::math::ptx_rcp(
                          1 + flashinfer::math::ptx_exp2(float(score) * tanh_scale));
    }
    return score;
  })
};

template <int kHeadDim>
AttentionError PlanFa2(const PrefillShape& shape, const PrefillBuffers& buffers, PrefillPlan& plan,
                       cudaStream_t stream) {
  return Guard([&] {
    flashinfer::PrefillPlanInfo info;
    const cudaError_t error = flashinfer::PrefillPlan<int32_t>(
        buffers.floats, buffers.float_bytes, buffers.ints, buffers.pinned, buffers.int_bytes, info,
        shape.row_indptr, shape.block_indptr, shape.rows, shape.sequences, shape.heads,
        shape.kv_heads, kHeadDim, kHeadDim, shape.block_tokens, /*enable_cuda_graph=*/false,
        sizeof(__nv_bfloat16), WindowLeft(shape.window), /*fixed_split_size=*/-1,
        /*disable_split_kv=*/false, /*num_colocated_ctas=*/0, /*uniform_q_len=*/0,
        /*fixed_uniform_q_len=*/false, stream, sizeof(__nv_bfloat16));
    StorePlan(info, false, plan);
    return error;
  });
}

template <typename Kv>
using Fa2Params = flashinfer::BatchPrefillPagedParams<__nv_bfloat16, Kv, __nv_bfloat16, int32_t>;

template <int kHeadDim, typename Kv>
Fa2Params<Kv> MakeFa2Params(const Queries& queries, const PagedKv& kv, int32_t* row_indptr,
                            int32_t window) {
  using T = __nv_bfloat16;
  const int64_t strides[] = {kv.page_stride, int64_t{kv.kv_heads} * kHeadDim, kHeadDim};
  flashinfer::paged_kv_t<Kv, int32_t> paged(kv.kv_heads, kv.block_tokens, kHeadDim, kv.sequences,
                                            flashinfer::QKVLayout::kNHD, static_cast<Kv*>(kv.keys),
                                            static_cast<Kv*>(kv.values), strides, kv.indices,
                                            kv.indptr, kv.last_block_len);
  return Fa2Params<Kv>(static_cast<T*>(queries.query), paged, nullptr, row_indptr, nullptr, nullptr,
                       static_cast<T*>(queries.output), nullptr, nullptr, queries.heads,
                       static_cast<int32_t>(queries.query_stride), kHeadDim, WindowLeft(window),
                       queries.soft_cap, queries.scale, 1.0f, 1e4f);
}

template <int kHeadDim, uint32_t kTileRows, typename Variant, typename Kv>
cudaError_t LaunchFa2(Fa2Params<Kv> params, void* partial_output, float* partial_lse,
                      cudaStream_t stream) {
  return flashinfer::BatchPrefillWithPagedKVCacheDispatched<
      /*SAME_KV_STRIDES=*/true, kTileRows, kHeadDim, kHeadDim, flashinfer::PosEncodingMode::kNone,
      /*USE_FP16_QK_REDUCTION=*/false, flashinfer::MaskMode::kCausal, /*USE_TOKEN_HEAD_SF=*/false,
      Variant, Fa2Params<Kv>>(params, static_cast<__nv_bfloat16*>(partial_output), partial_lse,
                              /*enable_pdl=*/false, stream);
}

template <int kHeadDim, typename Variant, typename Kv>
AttentionError RunFa2With(const PrefillPlan& plan, const PrefillShape& shape,
                          const Queries& queries, const PagedKv& kv, int32_t* row_indptr,
                          const PrefillBuffers& buffers, cudaStream_t stream) {
  return Guard([&] {
    const auto info = LoadPlan<flashinfer::PrefillPlanInfo>(plan);
    const auto ints = [&](int64_t offset) {
      return flashinfer::GetPtrFromBaseOffset<int32_t>(buffers.ints, offset);
    };
    auto params = MakeFa2Params<kHeadDim, Kv>(queries, kv, row_indptr, shape.window);
    params.request_indices = ints(info.request_indices_offset);
    params.qo_tile_indices = ints(info.qo_tile_indices_offset);
    params.kv_tile_indices = ints(info.kv_tile_indices_offset);
    params.o_indptr = ints(info.o_indptr_offset);
    params.kv_chunk_size_ptr = ints(info.kv_chunk_size_ptr_offset);
    void* partial_output = nullptr;
    float* partial_lse = nullptr;
    if (info.split_kv) {
      params.merge_indptr = ints(info.merge_indptr_offset);
      partial_output = flashinfer::GetPtrFromBaseOffset<void>(buffers.floats, info.v_offset);
      partial_lse = flashinfer::GetPtrFromBaseOffset<float>(buffers.floats, info.s_offset);
    }
    params.padded_batch_size = info.padded_batch_size;
    params.max_total_num_rows = info.total_num_rows;
    if (info.cta_tile_q == 16) {
      return LaunchFa2<kHeadDim, 16, Variant, Kv>(params, partial_output, partial_lse, stream);
    }
    // FlashInfer plans no larger tiles for wide heads.
    if constexpr (kHeadDim < 256) {
      if (info.cta_tile_q != 64) {
        return LaunchFa2<kHeadDim, 128, Variant, Kv>(params, partial_output, partial_lse, stream);
      }
    }
    return LaunchFa2<kHeadDim, 64, Variant, Kv>(params, partial_output, partial_lse, stream);
  });
}

template <int kHeadDim>
AttentionError RunFa2(const PrefillPlan& plan, const PrefillShape& shape, const Queries& queries,
                      const PagedKv& kv, int32_t* row_indptr, const PrefillBuffers& buffers,
                      cudaStream_t stream) {
  return RunFa2With<kHeadDim, WindowedAttention, __nv_bfloat16>(plan, shape, queries, kv,
                                                                row_indptr, buffers, stream);
}

template <int kHeadDim>
AttentionError RunCapped(const PrefillPlan& plan, const PrefillShape& shape, const Queries& queries,
                         const PagedKv& kv, int32_t* row_indptr, const PrefillBuffers& buffers,
                         cudaStream_t stream) {
  return RunFa2With<kHeadDim, CappedAttention, __nv_bfloat16>(plan, shape, queries, kv, row_indptr,
                                                              buffers, stream);
}

// Prefills of one row each, by the plan of decode_plan.h, with smaller tiles than FlashInfer would
// choose: more thread blocks per multiprocessor hide each other's latencies, of which a short
// sequence's block has little else.
template <int kHeadDim, typename Variant, typename Kv>
AttentionError DecodeFa2With(const Queries& queries, const PagedKv& kv, const DecodeWork& work,
                             bool overlap_launch, cudaStream_t stream) {
  using T = __nv_bfloat16;
  constexpr int kWarps = 4;
  // As many bytes of a tile are on their way, whatever a number takes.
  constexpr int kMmasOfKeys = 2 / sizeof(Kv);
  using Traits =
      flashinfer::KernelTraits<flashinfer::MaskMode::kNone, /*CTA_TILE_Q=*/16, /*NUM_MMA_Q=*/1,
                               kMmasOfKeys, kHeadDim / 16, kHeadDim / 16, /*NUM_WARPS_Q=*/1,
                               /*NUM_WARPS_KV=*/kWarps, flashinfer::PosEncodingMode::kNone, T, Kv,
                               T, float, int32_t, Variant>;
  return Guard([&] {
    const bool split = work.partial_output != nullptr;
    auto params = MakeFa2Params<kHeadDim, Kv>(queries, kv, work.counting, work.window);
    params.request_indices = work.tile_sequence;
    params.qo_tile_indices = work.zeros;
    params.kv_tile_indices = work.tile_chunk;
    params.o_indptr = split ? work.first_tile : work.counting;
    params.kv_chunk_size_ptr = work.chunk_tokens;
    params.block_valid_mask = work.valid_tiles;
    params.padded_batch_size = work.tiles;
    params.partition_kv = split;
    if (split) {
      params.o = static_cast<T*>(work.partial_output);
      params.lse = work.partial_lse;
    }
    const auto kernel = flashinfer::BatchPrefillWithPagedKVCacheKernel</*SAME_KV_STRIDES=*/true,
                                                                       Traits, Fa2Params<Kv>>;
    constexpr size_t kShared = sizeof(typename Traits::SharedStoragePaged);
    cudaError_t error =
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
    if (error != cudaSuccess) return error;
    cudaLaunchAttribute overlap = {};
    overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    overlap.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(work.tiles, 1, kv.kv_heads);
    config.blockDim = dim3(32, 1, kWarps);
    config.dynamicSmemBytes = kShared;
    config.stream = stream;
    config.attrs = &overlap;
    config.numAttrs = overlap_launch ? 1 : 0;
    error = cudaLaunchKernelEx(&config, kernel, params);
    if (error != cudaSuccess || !split) return error;
    return flashinfer::VariableLengthMergeStates(
        static_cast<T*>(work.partial_output), work.partial_lse, work.first_tile,
        static_cast<T*>(queries.output), static_cast<float*>(nullptr), kv.sequences,
        static_cast<uint32_t*>(nullptr), queries.heads, kHeadDim, overlap_launch, stream);
  });
}

template <int kHeadDim>
AttentionError DecodeFa2(const Queries& queries, const PagedKv& kv, const DecodeWork& work,
                         bool overlap_launch, cudaStream_t stream) {
  return DecodeFa2With<kHeadDim, PlainAttention, __nv_bfloat16>(queries, kv, work, overlap_launch,
                                                                stream);
}

// A tile whose tokens have all left the window has no keys: its partial result has weight 0.
template <int kHeadDim>
AttentionError DecodeMasked(const Queries& queries, const PagedKv& kv, const DecodeWork& work,
                            bool overlap_launch, cudaStream_t stream) {
  return DecodeFa2With<kHeadDim, CappedAttention, __nv_bfloat16>(queries, kv, work, overlap_launch,
                                                                 stream);
}

template <int kHeadDim>
AttentionError RunFp8(const PrefillPlan& plan, const PrefillShape& shape, const Queries& queries,
                      const PagedKv& kv, int32_t* row_indptr, const PrefillBuffers& buffers,
                      cudaStream_t stream) {
  return RunFa2With<kHeadDim, WindowedAttention, __nv_fp8_e4m3>(plan, shape, queries, kv,
                                                                row_indptr, buffers, stream);
}

template <int kHeadDim>
AttentionError DecodeFp8(const Queries& queries, const PagedKv& kv, const DecodeWork& work,
                         bool overlap_launch, cudaStream_t stream) {
  return DecodeFa2With<kHeadDim, WindowedAttention, __nv_fp8_e4m3>(queries, kv, work,
                                                                   overlap_launch, stream);
}

}  // namespace palimpsest::cuda::internal
