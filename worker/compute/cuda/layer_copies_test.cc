#include "worker/compute/cuda/layer_copies.h"

#include <algorithm>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest::cuda {
namespace {

using ::testing::HasSubstr;

constexpr int32_t kLayers = 6;

ModelConfig Llama() {
  ModelConfig config;
  config.num_layers = kLayers;
  config.hidden_size = 128;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_dim = 64;
  config.intermediate_size = 512;
  config.vocab_size = 1000;
  config.max_position = 512;
  return config;
}

class LayerCopiesTest : public ::testing::Test {
 protected:
  void LayOut(const ModelConfig& config, Bytes slab = KiB(64)) {
    layout_ = LayOutImage(config, slab, WeightFormat::kRowMajor).value();
    parameters_.assign(static_cast<size_t>(layout_.total.count()), std::byte{0});
    image_ = parameters_;
    memory_.parameters = parameters_.data();
    memory_.image = {{image_.data(), layout_.total}};
  }

  ImageLayout layout_;
  std::vector<std::byte> parameters_, image_;
  ModelMemory memory_;
};

TEST_F(LayerCopiesTest, ALayerEndsWithItsLastTensor) {
  ModelConfig config = Llama();
  LayOut(config);
  const int64_t numbers = int64_t{config.hidden_size} * (4 + 2 * 2) * 64 +
                          int64_t{config.hidden_size} * 4 * 64 +
                          int64_t{config.hidden_size} * 3 * 512 + 2 * config.hidden_size;
  for (int32_t layer = 0; layer < kLayers; ++layer) {
    const StagePlacement& stage = layout_.stages[static_cast<size_t>(layer) + 1];
    const Bytes bytes = LayerBytes(layout_, layer);
    EXPECT_GE(bytes.count(), 2 * numbers);
    EXPECT_LT(bytes.count(), 2 * numbers + 256 * 16);
    EXPECT_EQ(CeilDiv(bytes, layout_.slab_bytes), stage.slab_count);
  }
  config.qkv_bias = config.o_bias = config.mlp_bias = true;
  const Bytes before = LayerBytes(layout_, 0);
  LayOut(config);
  EXPECT_GT(LayerBytes(layout_, 0), before);
}

TEST_F(LayerCopiesTest, CopiesMoveEachByteOfALayerToItsPlaceWhateverPiecesTheImageIsIn) {
  LayOut(Llama());
  std::mt19937 random(3);
  for (std::byte& byte : image_) byte = static_cast<std::byte>(random());
  for (int round = 0; round < 10; ++round) {
    memory_.image.clear();
    for (int64_t at = 0; at < layout_.total.count();) {
      const int64_t size = std::min<int64_t>(1 + random() % 60000, layout_.total.count() - at);
      memory_.image.push_back({image_.data() + at, Bytes(size)});
      at += size;
    }
    const int stage = 1 + static_cast<int>(random() % kLayers);
    const Bytes begin = layout_.slab_bytes * layout_.stages[stage].first_slab;
    const Bytes end = begin + LayerBytes(layout_, stage - 1);
    std::vector<bool> written(parameters_.size(), false);
    for (const LayerCopy& copy : LayerCopies(layout_, memory_, stage)) {
      const int64_t to = static_cast<std::byte*>(copy.to) - parameters_.data();
      EXPECT_EQ(to, static_cast<const std::byte*>(copy.from) - image_.data());
      for (size_t i = 0; i < copy.bytes; ++i) {
        ASSERT_FALSE(written[static_cast<size_t>(to) + i]);
        written[static_cast<size_t>(to) + i] = true;
      }
    }
    for (int64_t i = 0; i < layout_.total.count(); ++i) {
      ASSERT_EQ(written[static_cast<size_t>(i)], i >= begin.count() && i < end.count()) << i;
    }
  }
}

TEST_F(LayerCopiesTest, OnlyLayersWithAnImageRotate) {
  LayOut(Llama());
  EXPECT_TRUE(CheckRotation(layout_, memory_, {}).ok());
  EXPECT_TRUE(CheckRotation(layout_, memory_, EvenRotation(1, kLayers, 3, 2)).ok());
  const auto refusal = [&](const Rotation& rotation) {
    return CheckRotation(layout_, memory_, rotation);
  };
  EXPECT_EQ(refusal({{0, 2}, 1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(refusal({{2, kLayers + 1}, 1}).message(), HasSubstr("head"));
  EXPECT_EQ(refusal({{2, kLayers + 2}, 1}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(refusal({{2, 3}, 2}).code(), absl::StatusCode::kInvalidArgument);
  layout_.stages[3].slab_count += 1;
  EXPECT_THAT(refusal({{2, 3}, 1}).message(), HasSubstr("slabs"));
  memory_.image.clear();
  EXPECT_EQ(refusal({{1, 2}, 1}).code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_TRUE(CheckRotation(layout_, memory_, {}).ok());
}

}  // namespace
}  // namespace palimpsest::cuda
