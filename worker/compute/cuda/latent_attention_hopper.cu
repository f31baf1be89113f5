#include <flashinfer/attention/mla_hopper.cuh>

#include "worker/compute/cuda/latent_attention_unit.cuh"

namespace palimpsest::cuda {

AttentionError LatentAttentionHopper(const LatentAttentionArgs& args, cudaStream_t stream) {
  return internal::Guard([&] {
    return flashinfer::mla::BatchMLAPageAttentionHopper<flashinfer::MaskMode::kCausal, kLatentRank,
                                                        kLatentRotary>(
        internal::MakeLatentParams(args), static_cast<uint32_t>(args.team_blocks),
        static_cast<uint32_t>(args.teams), stream);
  });
}

}  // namespace palimpsest::cuda
