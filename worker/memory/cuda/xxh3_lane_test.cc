#include "worker/memory/cuda/xxh3_lane.h"

#include <xxhash.h>

#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest::xxh3 {
namespace {

constexpr uint64_t kSecret[24] = PALIMPSEST_XXH3_SECRET;

uint64_t ByLanes(const std::vector<unsigned char>& data, size_t size) {
  uint64_t lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = Accumulate(kSecret, data.data(), size, lane);
  }
  uint64_t pairs = 0;
  for (int pair = 0; pair < kLanes / 2; ++pair) {
    pairs += MergePair(kSecret, lanes[2 * pair], lanes[2 * pair + 1], pair);
  }
  return Finish(pairs, size);
}

TEST(Xxh3Lane, LanesTogetherAreXxh3) {
  std::mt19937 random(5);
  std::vector<unsigned char> data(64 << 10);
  for (unsigned char& byte : data) byte = static_cast<unsigned char>(random());
  for (size_t size = 256; size <= data.size(); size += size < 4096 ? 16 : 1008) {
    ASSERT_EQ(ByLanes(data, size), XXH3_64bits(data.data(), size)) << size;
  }
  for (const size_t size : {1024u, 2048u, 16384u, 65536u}) {
    ASSERT_EQ(ByLanes(data, size), XXH3_64bits(data.data(), size)) << size;
  }
}

}  // namespace
}  // namespace palimpsest::xxh3
