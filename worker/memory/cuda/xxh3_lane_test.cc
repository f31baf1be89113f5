#include "worker/memory/cuda/xxh3_lane.h"

#include <xxhash.h>

#include <algorithm>
#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest::xxh3 {
namespace {

constexpr uint64_t kSecret[24] = PALIMPSEST_XXH3_SECRET;

template <typename Input>
uint64_t ByLanes(const Input& input, size_t size) {
  uint64_t lanes[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    lanes[lane] = Accumulate(kSecret, input, size, lane);
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
    ASSERT_EQ(ByLanes(Whole{data.data()}, size), XXH3_64bits(data.data(), size)) << size;
  }
  for (const size_t size : {1024u, 2048u, 16384u, 65536u}) {
    ASSERT_EQ(ByLanes(Whole{data.data()}, size), XXH3_64bits(data.data(), size)) << size;
  }
}

TEST(Xxh3Lane, MissingBytesCountAsZero) {
  std::vector<unsigned char> data(16384, 0xab);
  std::vector<unsigned char> padded(data.size(), 0);
  for (const size_t own : {16u, 240u, 1008u, 1024u, 8192u, 16320u, 16352u, 16368u}) {
    std::copy(data.begin(), data.begin() + own, padded.begin());
    ASSERT_EQ(ByLanes(Padded{data.data(), own}, data.size()),
              XXH3_64bits(padded.data(), padded.size()))
        << own;
  }
}

}  // namespace
}  // namespace palimpsest::xxh3
