#include "worker/compute/cuda/decode_attention.cuh"

template palimpsest::cuda::AttentionError palimpsest::cuda::internal::Decode<64>(
    const Queries&, const PagedKv&, const DecodeWork&, bool, cudaStream_t);
