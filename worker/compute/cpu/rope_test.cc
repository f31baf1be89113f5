#include "worker/compute/cpu/rope.h"

#include <algorithm>
#include <cmath>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

ModelConfig Llama(int32_t head_dim, double theta) {
  ModelConfig config;
  config.head_dim = head_dim;
  config.rope_theta = theta;
  return config;
}

TEST(Rope, FrequenciesFallGeometrically) {
  const std::vector<float> f = RopeFrequencies(Llama(8, 10000));
  ASSERT_EQ(f.size(), 4);
  EXPECT_FLOAT_EQ(f[0], 1.0f);
  EXPECT_FLOAT_EQ(f[1], 0.1f);
  EXPECT_FLOAT_EQ(f[2], 0.01f);
  EXPECT_FLOAT_EQ(f[3], 0.001f);
}

TEST(Rope, LinearScalingDividesAll) {
  ModelConfig config = Llama(8, 10000);
  config.rope_scaling = RopeScaling{.kind = RopeScaling::Kind::kLinear, .factor = 4};
  EXPECT_FLOAT_EQ(RopeFrequencies(config)[1], 0.025f);
}

TEST(Rope, Llama3ScalingKeepsShortWavesDividesLongOnesAndBlendsBetween) {
  // Llama 3.1: theta 500000, head_dim 128.
  ModelConfig config = Llama(128, 500000);
  const std::vector<float> plain = RopeFrequencies(config);
  config.rope_scaling = RopeScaling{.kind = RopeScaling::Kind::kLlama3,
                                    .factor = 8,
                                    .low_freq_factor = 1,
                                    .high_freq_factor = 4,
                                    .original_max_position = 8192};
  const std::vector<float> scaled = RopeFrequencies(config);
  int kept = 0, divided = 0, blended = 0;
  for (size_t i = 0; i < plain.size(); ++i) {
    const double wavelength = 2 * M_PI / plain[i];
    if (wavelength < 8192.0 / 4) {
      ++kept;
      EXPECT_EQ(scaled[i], plain[i]);
    } else if (wavelength > 8192.0) {
      ++divided;
      EXPECT_FLOAT_EQ(scaled[i], plain[i] / 8);
    } else {
      ++blended;
      EXPECT_LT(scaled[i], plain[i]);
      EXPECT_GT(scaled[i], plain[i] / 8);
      EXPECT_LT(scaled[i], scaled[i - 1]);
    }
  }
  EXPECT_EQ(kept, 29);
  EXPECT_EQ(blended, 6);
  EXPECT_EQ(divided, 29);
}

TEST(Rope, YarnKeepsFastPairsDividesSlowOnesAndBlendsBetween) {
  // DeepSeek-V3: 64 rotated numbers, theta 10000, 4,096 positions times 40. 32 turns within 4,096
  // positions are made by pair 10.47 and one turn by pair 22.5.
  ModelConfig config = Llama(64, 10000);
  const std::vector<float> plain = RopeFrequencies(config);
  config.rope_scaling =
      RopeScaling{.kind = RopeScaling::Kind::kYarn, .factor = 40, .original_max_position = 4096};
  const std::vector<float> scaled = RopeFrequencies(config);
  for (size_t i = 0; i < plain.size(); ++i) {
    const double ramp = std::min(1.0, std::max(0.0, (static_cast<double>(i) - 10) / (23 - 10)));
    EXPECT_FLOAT_EQ(scaled[i], static_cast<float>(plain[i] * (1 - ramp + ramp / 40))) << i;
  }
  config.rope_scaling->magnitude = 1.25;
  EXPECT_EQ(RopeMagnitude(config), 1.25f);
}

TEST(Rope, NoAnglesWithoutRotaryEmbedding) {
  ModelConfig config = Llama(64, 10000);
  config.position_table_offset = 2;
  EXPECT_TRUE(RopeFrequencies(config).empty());
}

TEST(Rope, AnglesAreFloatProducts) {
  const std::vector<float> f = {1.0f, 0.1f};
  float cosines[2], sines[2];
  RopeAngles(f, 1.0f, 7, cosines, sines);
  EXPECT_FLOAT_EQ(cosines[0], std::cos(7.0f));
  EXPECT_FLOAT_EQ(sines[1], std::sin(7 * 0.1f));
  RopeAngles(f, 0.5f, 0, cosines, sines);
  EXPECT_EQ(cosines[1], 0.5f);
  EXPECT_EQ(sines[1], 0.0f);
}

}  // namespace
}  // namespace palimpsest
