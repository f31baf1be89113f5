// Rotary position embedding: the angles. Pure.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_ROPE_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_ROPE_H_

#include <cstdint>
#include <vector>

#include "absl/types/span.h"
#include "worker/model/model_config.h"

namespace palimpsest {

// Radians per position of each of the rotary_dim() / 2 pairs, with the config's scaling applied:
// theta^(-2i / rotary_dim) (Su et al., arXiv:2104.09864); linear scaling divides by the factor;
// Llama 3's leaves short wavelengths, divides long ones and blends between; so does YaRN
// (arXiv:2309.00071), whose blend is linear in i. Empty if the model has no rotary embedding.
std::vector<float> RopeFrequencies(const ModelConfig& config);

// What cosines and sines are multiplied by.
float RopeMagnitude(const ModelConfig& config);

// Cosine and sine of position * frequency for each pair, times `magnitude`. The angle is a float
// product, as in the reference implementations the models were trained with.
void RopeAngles(absl::Span<const float> frequencies, float magnitude, int32_t position,
                float* cosines, float* sines);

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_ROPE_H_
