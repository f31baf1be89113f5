#include "worker/compute/cuda/prefill_fa3.cuh"

template palimpsest::cuda::AttentionError palimpsest::cuda::internal::PlanFa3<64>(
    const PrefillShape&, const PrefillBuffers&, PrefillPlan&, cudaStream_t);
template palimpsest::cuda::AttentionError palimpsest::cuda::internal::RunFa3<64>(
    const PrefillPlan&, const PrefillShape&, const Queries&, const PagedKv&, int32_t*,
    const PrefillBuffers&, cudaStream_t);
