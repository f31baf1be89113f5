// Logits of the GPU runner beside those that transformers gives for the same weights.
#ifndef PALIMPSEST_WORKER_COMPUTE_CUDA_LOGITS_CHECK_H_
#define PALIMPSEST_WORKER_COMPUTE_CUDA_LOGITS_CHECK_H_

#include <cstdint>
#include <map>
#include <vector>

#include "worker/compute/cuda/checked_model.h"

namespace palimpsest::cuda {

class LogitsCheck : public CheckedModel {
 public:
  // `reference` is what tests/reference/make_reference.py wrote.
  LogitsCheck(GpuModel& model, const Json& reference, int32_t block_tokens);

  // One token after another, through the graphs; `sequences` times the same.
  Json DecodeLogits(size_t sequences);
  Json PrefillLogits();
  // Decodes and prompt chunks of several sequences in one step.
  Json MixedLogits();
  // Logits and greedy tokens beside those of the same model on one GPU.
  Json AgainstOneGpu(GpuModel& one);
  // What KV in eight bits costs: logits beside exact ones and beside those with KV in bf16, and how
  // far rounding KV alone takes the reference from exact ones.
  Json AgainstWideKv(GpuModel& wide);

 private:
  struct Difference;

  Json Judge(const Difference& got) const;
  // Logits of a chunk that ends with token `last`, if the reference has them.
  void Compare(GpuRunner& runner, size_t chunk, size_t last, Difference& got);
  // The prompt up to a position, in chunks of one length of which the first is what remains.
  void Prefill(GpuRunner& runner, size_t past, size_t length, Difference& got);

  // Of the reference, by position.
  std::map<size_t, std::vector<float>> expected_;
  // Without rounding, if `expected_` rounds KV to eight bits.
  std::map<size_t, std::vector<float>> exact_;
  double kv_max_ = 0;
  double kv_mean_ = 0;
  const double own_max_;
  const double own_mean_;
};

}  // namespace palimpsest::cuda

#endif  // PALIMPSEST_WORKER_COMPUTE_CUDA_LOGITS_CHECK_H_
