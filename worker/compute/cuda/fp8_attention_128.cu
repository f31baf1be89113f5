#include "worker/compute/cuda/prefill_fa2.cuh"

template palimpsest::cuda::AttentionError palimpsest::cuda::internal::RunFp8<128>(
    const PrefillPlan&, const PrefillShape&, const Queries&, const PagedKv&, int32_t*,
    const PrefillBuffers&, cudaStream_t);
template palimpsest::cuda::AttentionError palimpsest::cuda::internal::DecodeFp8<128>(
    const Queries&, const PagedKv&, const DecodeWork&, bool, cudaStream_t);
