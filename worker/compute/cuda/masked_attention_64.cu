#include "worker/compute/cuda/prefill_fa2.cuh"

template palimpsest::cuda::AttentionError palimpsest::cuda::internal::DecodeMasked<64>(
    const Queries&, const PagedKv&, const DecodeWork&, bool, cudaStream_t);
