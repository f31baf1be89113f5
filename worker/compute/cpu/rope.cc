#include "worker/compute/cpu/rope.h"

#include <cmath>
#include <numbers>

namespace palimpsest {
namespace {

double ScaleLlama3(double frequency, const RopeScaling& scaling) {
  const double turns = scaling.original_max_position * frequency / (2 * std::numbers::pi);
  if (turns < scaling.low_freq_factor) return frequency / scaling.factor;
  if (turns > scaling.high_freq_factor) return frequency;
  const double smooth =
      (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor);
  return (1 - smooth) * frequency / scaling.factor + smooth * frequency;
}

}  // namespace

std::vector<float> RopeFrequencies(const ModelConfig& config) {
  std::vector<float> frequencies(config.head_dim / 2);
  for (size_t i = 0; i < frequencies.size(); ++i) {
    double frequency = std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / config.head_dim);
    if (config.rope_scaling.has_value()) {
      frequency = config.rope_scaling->kind == RopeScaling::Kind::kLinear
                      ? frequency / config.rope_scaling->factor
                      : ScaleLlama3(frequency, *config.rope_scaling);
    }
    frequencies[i] = static_cast<float>(frequency);
  }
  return frequencies;
}

void RopeAngles(absl::Span<const float> frequencies, int32_t position, float* cosines,
                float* sines) {
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    cosines[i] = static_cast<float>(std::cos(double{angle}));
    sines[i] = static_cast<float>(std::sin(double{angle}));
  }
}

}  // namespace palimpsest
