#include "worker/model/dummy_weights.h"

#include <cmath>
#include <vector>

#include "gtest/gtest.h"
#include "worker/model/float16.h"

namespace palimpsest {
namespace {

std::vector<float> Floats(const DummyTensor& tensor, int64_t first, size_t count) {
  std::vector<float> out(count);
  tensor.ReadFloats(first, absl::MakeSpan(out));
  return out;
}

TEST(DummyTensor, AnyPieceIsThatPieceOfTheWhole) {
  const DummyTensor tensor(5, "model.layers.1.mlp.up_proj.weight", 100, 0);
  const std::vector<float> whole = Floats(tensor, 0, 1000);
  for (int64_t first = 0; first < 20; ++first) {
    for (size_t count = 0; count < 20; ++count) {
      EXPECT_EQ(Floats(tensor, first, count),
                std::vector<float>(whole.begin() + first,
                                   whole.begin() + first + static_cast<int64_t>(count)));
    }
  }
  std::vector<uint16_t> bits(whole.size());
  tensor.ReadBf16(0, absl::MakeSpan(bits));
  for (size_t i = 0; i < bits.size(); ++i) EXPECT_EQ(FloatFromBf16(bits[i]), whole[i]);
}

TEST(DummyTensor, DependsOnSeedAndName) {
  const std::vector<float> base = Floats(DummyTensor(1, "lm_head.weight", 64, 0), 0, 64);
  EXPECT_EQ(Floats(DummyTensor(1, "lm_head.weight", 64, 0), 0, 64), base);
  EXPECT_NE(Floats(DummyTensor(2, "lm_head.weight", 64, 0), 0, 64), base);
  EXPECT_NE(Floats(DummyTensor(1, "lm_heaf.weight", 64, 0), 0, 64), base);
}

TEST(DummyTensor, RangesFollowTheRole) {
  const struct {
    const char* name;
    int64_t cols;
    float offset;
    double center, spread;
  } cases[] = {
      {"model.layers.0.self_attn.q_proj.weight", 48, 0, 0, 0.25},
      {"model.layers.0.self_attn.q_proj.weight", 3, 0, 0, 1},
      {"model.embed_tokens.weight", 3, 0, 0, 0.25},
      {"model.decoder.embed_positions.weight", 3, 0, 0, 0.25},
      {"model.norm.weight", 0, 0, 1, 0.25},
      {"model.norm.weight", 0, 1, 0, 0.25},
      {"model.decoder.final_layer_norm.bias", 0, 0, 0, 0.25},
  };
  for (const auto& c : cases) {
    constexpr size_t kCount = 10000;
    const std::vector<float> x = Floats(DummyTensor(9, c.name, c.cols, c.offset), 0, kCount);
    double sum = 0, squares = 0, most = 0;
    for (const float v : x) {
      sum += v;
      squares += (v - c.center) * (v - c.center);
      most = std::max(most, std::abs(v - c.center));
    }
    EXPECT_NEAR(sum / kCount, c.center, 0.03 * c.spread) << c.name;
    EXPECT_NEAR(std::sqrt(squares / kCount), c.spread / std::sqrt(3.0), 0.02 * c.spread) << c.name;
    EXPECT_LE(most, c.spread + 1.0 / 256) << c.name;
    EXPECT_GT(most, 0.99 * c.spread) << c.name;
  }
}

}  // namespace
}  // namespace palimpsest
