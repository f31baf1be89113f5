// Steps of the GPU runner beside one another: equal results when plans are replayed or pipelined,
// harmless padding rows, refused parameters, sampling as worker/core/sampling.h does it.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_STEPPING_CHECK_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_STEPPING_CHECK_H_

#include <cstdint>
#include <vector>

#include "worker/compute/cuda/checked_model.h"

namespace palimpsest::cuda {

class SteppingCheck : public CheckedModel {
 public:
  using CheckedModel::CheckedModel;

  // Enough of everything for a run under compute-sanitizer.
  void Shorten() {
    generated_ = 3;
    repeats_ = 2;
  }

  // The same plans again and again, by two runners.
  Json Replay();
  Json Pipelined();
  // Whatever the null block holds, the real rows have the same bits.
  Json Padding();
  // Steps whose parameters do not come, at whichever stage, can be submitted again: prompts and
  // decodes then give the same tokens.
  Json Refusals();
  // The tokens and log-probabilities that worker/core/sampling.h gives for the same logits.
  Json Sampling();

 private:
  // Generates with `sequences` sequences; every token's bits, in order.
  std::vector<int64_t> Generate(GpuRunner& runner, int sequences, int steps, bool pipelined,
                                bool sampled);

  int generated_ = 20;
  int repeats_ = 8;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_STEPPING_CHECK_H_
