// FlashInfer's FA3 with three orders that FlashInfer 0.7.4 does not keep, and what all calls of it
// have in common.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_FA3_TRAITS_CUH_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_FA3_TRAITS_CUH_

#include <flashinfer/attention/hopper/default_params.cuh>
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#include <flashinfer/attention/hopper/variants.cuh>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/cutlass_utils.cuh>
#include <type_traits>

#include "worker/compute/cuda/attention_unit.cuh"

namespace palimpsest::cuda::internal {

// Keys and values from blocks are stored with cp.async. Tensor cores read them through another
// proxy and may miss such writes unless a fence stands between.
template <int kStages>
class FencedPipeline : public cutlass::PipelineAsync<kStages> {
 public:
  using Base = cutlass::PipelineAsync<kStages>;
  using Base::Base;

  CUTLASS_DEVICE void consumer_wait(typename Base::PipelineState state,
                                    cutlass::ConsumerToken token) {
    Base::consumer_wait(state, token);
    cutlass::arch::fence_view_async_shared();
  }
};

// FlashInfer keeps a tile's outputs where its values were. A thread block that goes on to another
// tile loads that one's values there as soon as the last warp has copied its share of the outputs;
// the others may not have. Here outputs have memory of their own: who stores the next tile's waits
// for all.
template <bool kTma, int kHeadDim, int kRows, int kKeys, typename T>
struct OrderedTraits : flashinfer::AttentionKernelTraits<kTma, kHeadDim, kHeadDim, kRows, kKeys,
                                                         /*NUM_STAGES=*/2, T, T, T, int32_t,
                                                         flashinfer::StandardAttention> {
  using Base = flashinfer::AttentionKernelTraits<kTma, kHeadDim, kHeadDim, kRows, kKeys, 2, T, T, T,
                                                 int32_t, flashinfer::StandardAttention>;
  using MainloopPipeline =
      std::conditional_t<kTma, typename Base::MainloopPipeline, FencedPipeline<2>>;

  struct SharedStorage {
    cute::array_aligned<T, cute::cosize_v<typename Base::SmemLayoutQ>> smem_q;
    cute::array_aligned<T, cute::cosize_v<typename Base::SmemLayoutK>> smem_k;
    cute::array_aligned<T, cute::cosize_v<typename Base::SmemLayoutV>> smem_v;
    cute::array_aligned<T, cute::cosize_v<typename Base::SmemLayoutO>> smem_o;
    cutlass::arch::ClusterTransactionBarrier barrier_Q;
    cutlass::arch::ClusterBarrier barrier_O;
    typename MainloopPipeline::SharedStorage pipeline_k;
    typename MainloopPipeline::SharedStorage pipeline_v;
  };
  static_assert(sizeof(SharedStorage) <= 227 * 1024, "more than a multiprocessor has");
};

// Before a tile's rows are copied to global memory, by warps that did not compute them, all must be
// in shared memory. FlashInfer has each warp arrive twice at a barrier that counts it once: when
// one half of the warps has arrived and waits, they go on without the other.
template <typename Traits>
struct OrderedEpilogue : flashinfer::CollectiveEpilogue<typename Traits::Base> {
  using Base = flashinfer::CollectiveEpilogue<typename Traits::Base>;

  // Without the log-sum-exps, which nobody here asks for.
  template <typename Place, typename Storage, typename Outputs, typename Sums, typename Product>
  CUTLASS_DEVICE void store(typename Base::Params const& params, Outputs const& outputs,
                            Sums const&, Storage& storage, Product product, int thread,
                            Place const& place) {
    using cutlass::arch::NamedBarrier;
    const auto [q_tile, head, kv_head, q_begin, kv_begin, q_count, kv_count, batch] = place;
    auto shared =
        cute::make_tensor(cute::make_smem_ptr(storage.smem_o.data()), typename Base::SmemLayoutO{});
    auto to_shared = cute::make_tiled_copy_C(typename Base::SmemCopyAtomO{}, product);
    auto own = to_shared.get_thread_slice(thread);
    auto rounded = flashinfer::convert_type<typename Base::DTypeO>(outputs);
    // The tile before this one has been copied.
    NamedBarrier::sync(Base::NUM_MMA_THREADS,
                       static_cast<int>(flashinfer::NamedBarriers::kValueEmpty));
    cute::copy(to_shared, own.retile_S(rounded), own.partition_D(shared));
    NamedBarrier::sync(Base::NUM_MMA_THREADS,
                       cutlass::arch::ReservedNamedBarriers::EpilogueBarrier);
    flashinfer::write_tiled<Base::NUM_COPY_THREADS>(
        params.O_ptr, typename Base::TiledCopyO{}, params.layout_O,
        cute::select<0, 1>(typename Base::TileShape_PDV{}), shared, thread, q_tile, head, q_begin,
        q_count);
  }
};

// Keys and values are counted in pages of `kv_page` tokens, of which `kv_indptr` says who has
// which.
template <int kHeadDim>
cudaError_t PlanCausalFa3(const PrefillShape& shape, int32_t* kv_indptr, int32_t kv_page,
                          const PrefillBuffers& buffers, PrefillPlan& plan, cudaStream_t stream) {
  flashinfer::PrefillPlanSM90Info info;
  const cudaError_t error = flashinfer::PrefillSM90Plan<int32_t>(
      buffers.floats, buffers.float_bytes, buffers.ints, buffers.pinned, buffers.int_bytes, info,
      shape.row_indptr, kv_indptr, shape.kv_tokens, shape.rows, shape.sequences, shape.heads,
      shape.kv_heads, kHeadDim, kHeadDim, kv_page, /*causal=*/true, /*enable_cuda_graph=*/false,
      sizeof(__nv_bfloat16), stream);
  // Beyond 4,096 tiles per head FlashInfer wants another instantiation; no step is that large.
  if (info.same_schedule_for_all_heads) return cudaErrorNotSupported;
  StorePlan(info, true, plan);
  return error;
}

// All of `params` (paged or ragged) but keys and values, and who has how many of them.
template <int kHeadDim, typename Params>
Params CausalFa3Params(const PrefillPlan& plan, const PrefillShape& shape, const Queries& queries,
                       int32_t kv_heads, const PrefillBuffers& buffers) {
  const auto info = LoadPlan<flashinfer::PrefillPlanSM90Info>(plan);
  const auto ints = [&](int64_t offset) {
    return flashinfer::GetPtrFromBaseOffset<int32_t>(buffers.ints, offset);
  };
  Params params{};
  params.q_ptr = static_cast<typename Params::DTypeQ*>(queries.query);
  params.o_ptr = static_cast<typename Params::DTypeO*>(queries.output);
  params.q_stride_n = queries.query_stride;
  params.o_stride_n = int64_t{queries.heads} * kHeadDim;
  params.q_stride_h = params.k_stride_h = params.v_stride_h = params.o_stride_h = kHeadDim;
  params.nnz_qo = shape.rows;
  params.num_qo_heads = queries.heads;
  params.num_kv_heads = kv_heads;
  params.group_size = queries.heads / kv_heads;
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
  return params;
}

}  // namespace palimpsest::cuda::internal

namespace flashinfer {

template <bool kTma, int kHeadDim, int kRows, int kKeys, typename T>
struct CollectiveEpilogue<
    palimpsest::cuda::internal::OrderedTraits<kTma, kHeadDim, kRows, kKeys, T>>
    : palimpsest::cuda::internal::OrderedEpilogue<
          palimpsest::cuda::internal::OrderedTraits<kTma, kHeadDim, kRows, kKeys, T>> {};

}  // namespace flashinfer

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_FA3_TRAITS_CUH_
