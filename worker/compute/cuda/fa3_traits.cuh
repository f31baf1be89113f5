// FlashInfer's FA3 with two orders that FlashInfer 0.7.4 does not keep.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_FA3_TRAITS_CUH_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_FA3_TRAITS_CUH_

#include <flashinfer/attention/hopper/default_params.cuh>
#include <flashinfer/attention/hopper/prefill_sm90.cuh>
#include <flashinfer/attention/hopper/variants.cuh>
#include <flashinfer/attention/mask.cuh>
#include <flashinfer/attention/scheduler.cuh>
#include <flashinfer/cutlass_utils.cuh>
#include <type_traits>

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

}  // namespace palimpsest::cuda::internal

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_FA3_TRAITS_CUH_
