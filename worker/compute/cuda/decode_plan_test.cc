#include "worker/compute/cuda/decode_plan.h"

#include <algorithm>
#include <memory>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest::cuda {
namespace {

int64_t TilesOf(const std::vector<int32_t>& lengths, int32_t chunk) {
  int64_t tiles = 0;
  for (const int32_t length : lengths) tiles += (length + chunk - 1) / chunk;
  return tiles;
}

TEST(DecodeChunkTokens, IsTheSmallestThatFits) {
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<int32_t> lengths(1 + random() % 300);
    for (int32_t& length : lengths) length = static_cast<int32_t>(1 + random() % 9000);
    const int32_t max_tiles = static_cast<int32_t>(lengths.size() + random() % 100);
    const int32_t chunk = DecodeChunkTokens(lengths, max_tiles);
    EXPECT_LE(TilesOf(lengths, chunk), max_tiles);
    if (chunk > 32) {
      EXPECT_GT(TilesOf(lengths, chunk - 1), max_tiles);
    }
  }
}

TEST(DecodeChunkTokens, DoesNotSplitShortOrManySequences) {
  EXPECT_EQ(DecodeChunkTokens({7}, 60), 32);
  EXPECT_EQ(DecodeChunkTokens(std::vector<int32_t>(128, 256), MaxDecodeTiles(128, 8, 132)), 256);
  EXPECT_LT(DecodeChunkTokens(std::vector<int32_t>(4, 4000), MaxDecodeTiles(4, 8, 132)), 300);
}

TEST(FillDecodeTiles, CoversEverySequenceInOrder) {
  std::mt19937 random(2);
  for (int round = 0; round < 200; ++round) {
    std::vector<int32_t> lengths(1 + random() % 40);
    for (int32_t& length : lengths) length = static_cast<int32_t>(1 + random() % 3000);
    const int32_t max_tiles = MaxDecodeTiles(static_cast<int32_t>(lengths.size()), 8, 132);
    const int32_t chunk = DecodeChunkTokens(lengths, max_tiles);
    std::vector<int32_t> sequence(max_tiles, -1), of_chunk(max_tiles, -1);
    std::vector<int32_t> first(lengths.size() + 1);
    const auto valid = std::make_unique<bool[]>(max_tiles);
    const bool split = FillDecodeTiles(
        lengths, chunk,
        {absl::MakeSpan(sequence), absl::MakeSpan(of_chunk),
         absl::MakeSpan(valid.get(), static_cast<size_t>(max_tiles)), absl::MakeSpan(first)});
    int32_t tile = 0;
    for (size_t i = 0; i < lengths.size(); ++i) {
      EXPECT_EQ(first[i], tile);
      for (int32_t covered = 0; covered < lengths[i]; covered += chunk, ++tile) {
        EXPECT_EQ(sequence[tile], static_cast<int32_t>(i));
        EXPECT_EQ(of_chunk[tile], covered / chunk);
        EXPECT_TRUE(valid[tile]);
      }
    }
    EXPECT_EQ(first.back(), tile);
    EXPECT_EQ(split, tile > static_cast<int32_t>(lengths.size()));
    for (; tile < max_tiles; ++tile) {
      EXPECT_FALSE(valid[tile]);
      EXPECT_EQ(sequence[tile], 0);
    }
  }
}

}  // namespace
}  // namespace palimpsest::cuda
