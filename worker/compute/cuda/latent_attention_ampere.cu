#include <flashinfer/attention/mla.cuh>

#include "worker/compute/cuda/latent_attention_unit.cuh"

namespace palimpsest::cuda {
namespace {

using T = __nv_bfloat16;

template <uint32_t kStages, uint32_t kTileTokens, bool kShard>
cudaError_t Launch(const LatentAttentionArgs& args, cudaStream_t stream) {
  using Traits =
      flashinfer::mla::KernelTraits</*CAUSAL=*/true, kStages, kShard, kLatentRank, kLatentRotary,
                                    /*CTA_TILE_Q=*/64, kTileTokens, T, T, T, int32_t>;
  internal::LatentParams params = internal::MakeLatentParams(args);
  void* parameters[] = {&params};
  const auto kernel = flashinfer::mla::BatchMLAPagedAttentionKernel<Traits, internal::LatentParams>;
  constexpr size_t kShared = sizeof(typename Traits::SharedStorage);
  const cudaError_t error =
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kShared);
  if (error != cudaSuccess) return error;
  return cudaLaunchCooperativeKernel(reinterpret_cast<const void*>(kernel),
                                     dim3(args.team_blocks, args.teams), dim3(32, 4, 2), parameters,
                                     kShared, stream);
}

}  // namespace

// The largest of FlashInfer's configurations that fits: sm_80 has 164 KiB of shared memory, sm_86
// and sm_89 have 100.
AttentionError LatentAttentionAmpere(const LatentAttentionArgs& args, cudaStream_t stream) {
  return internal::Guard([&] {
    int device = 0, shared = 0;
    cudaError_t error = cudaGetDevice(&device);
    if (error == cudaSuccess) {
      error = cudaDeviceGetAttribute(&shared, cudaDevAttrMaxSharedMemoryPerBlockOptin, device);
    }
    if (error != cudaSuccess) return error;
    constexpr int kLarge = 147968;
    return shared >= kLarge ? Launch<2, 32, true>(args, stream)
                            : Launch<1, 16, false>(args, stream);
  });
}

}  // namespace palimpsest::cuda
