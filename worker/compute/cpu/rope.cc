#include "worker/compute/cpu/rope.h"

#include <algorithm>
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

// Which pairs YaRN blends: up to `low` they are left alone, from `high` on divided by the factor.
struct Blend {
  double low;
  double high;
};

Blend YarnBlend(const ModelConfig& config) {
  const RopeScaling& scaling = *config.rope_scaling;
  const double dims = config.rotary_dim();
  // The pair that turns so many times within the original context.
  const auto pair = [&](double turns) {
    return dims * std::log(scaling.original_max_position / (turns * 2 * std::numbers::pi)) /
           (2 * std::log(config.rope_theta));
  };
  Blend blend = {pair(scaling.beta_fast), pair(scaling.beta_slow)};
  if (scaling.truncate) blend = {std::floor(blend.low), std::ceil(blend.high)};
  blend = {std::max(blend.low, 0.0), std::min(blend.high, dims - 1)};
  if (blend.low == blend.high) blend.high += 0.001;
  return blend;
}

double ScaleYarn(double frequency, double i, const Blend& blend, double factor) {
  const double ramp = std::clamp((i - blend.low) / (blend.high - blend.low), 0.0, 1.0);
  return frequency / factor * ramp + frequency * (1 - ramp);
}

}  // namespace

std::vector<float> RopeFrequencies(const ModelConfig& config) {
  if (!config.rotary()) return {};
  const int32_t dims = config.rotary_dim();
  const bool scaled = config.rope_scaling.has_value();
  const RopeScaling scaling = config.rope_scaling.value_or(RopeScaling());
  Blend blend = {};
  if (scaled && scaling.kind == RopeScaling::Kind::kYarn) blend = YarnBlend(config);
  std::vector<float> frequencies(static_cast<size_t>(dims / 2));
  for (size_t i = 0; i < frequencies.size(); ++i) {
    double frequency = std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / dims);
    if (scaled && scaling.kind == RopeScaling::Kind::kLinear) frequency /= scaling.factor;
    if (scaled && scaling.kind == RopeScaling::Kind::kLlama3) {
      frequency = ScaleLlama3(frequency, scaling);
    }
    if (scaled && scaling.kind == RopeScaling::Kind::kYarn) {
      frequency = ScaleYarn(frequency, static_cast<double>(i), blend, scaling.factor);
    }
    frequencies[i] = static_cast<float>(frequency);
  }
  return frequencies;
}

float RopeMagnitude(const ModelConfig& config) {
  return config.rope_scaling ? static_cast<float>(config.rope_scaling->magnitude) : 1.0f;
}

void RopeAngles(absl::Span<const float> frequencies, float magnitude, int32_t position,
                float* cosines, float* sines) {
  for (size_t i = 0; i < frequencies.size(); ++i) {
    const float angle = static_cast<float>(position) * frequencies[i];
    cosines[i] = static_cast<float>(std::cos(double{angle})) * magnitude;
    sines[i] = static_cast<float>(std::sin(double{angle})) * magnitude;
  }
}

}  // namespace palimpsest
