#include "worker/core/head_parts.h"

#include <algorithm>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <utility>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

using Groups = std::vector<std::vector<int32_t>>;

TEST(HeadParts, HoldKeysAndValuesOfTheirHeads) {
  // One layer, two heads, two tokens, rows of one byte: keys 0 1 / 2 3, values 4 5 / 6 7.
  const HeadParts parts =
      HeadParts::Create({.layers = 1, .kv_heads = 2, .block_tokens = 2, .row = Bytes(1)},
                        Groups{{1}, {0}})
          .value();
  std::vector<std::byte> block(8), part(4);
  for (size_t i = 0; i < block.size(); ++i) block[i] = static_cast<std::byte>(i);
  parts.Take(block.data(), 0, part.data());
  EXPECT_EQ(part, (std::vector<std::byte>{std::byte{1}, std::byte{3}, std::byte{5}, std::byte{7}}));
}

TEST(HeadPartsProperty, PuttingAllPartsBackGivesTheBlock) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    const HeadPartsShape shape = {.layers = 1 + static_cast<int32_t>(random() % 5),
                                  .kv_heads = 1 + static_cast<int32_t>(random() % 6),
                                  .block_tokens = 1 + static_cast<int32_t>(random() % 9),
                                  .row = Bytes(1 + random() % 20)};
    std::vector<int32_t> heads(static_cast<size_t>(shape.layers * shape.kv_heads));
    std::iota(heads.begin(), heads.end(), 0);
    std::shuffle(heads.begin(), heads.end(), random);
    size_t count = 1 + random() % heads.size();
    while (heads.size() % count != 0) --count;
    Groups groups(count);
    for (size_t i = 0; i < heads.size(); ++i) groups[i % count].push_back(heads[i]);
    const HeadParts parts = HeadParts::Create(shape, groups).value();
    std::vector<std::byte> block(static_cast<size_t>(parts.block_bytes().count()));
    for (std::byte& byte : block) byte = static_cast<std::byte>(random());
    std::vector<std::byte> back(block.size());
    std::vector<std::byte> part(static_cast<size_t>(parts.part_bytes().count()));
    for (int32_t group = 0; group < parts.count(); ++group) {
      parts.Take(block.data(), group, part.data());
      parts.Put(part.data(), group, back.data());
    }
    ASSERT_EQ(back, block) << "round " << round;
  }
}

TEST(HeadParts, RefuseWhatIsNoDivision) {
  const HeadPartsShape shape = {.layers = 2, .kv_heads = 2, .block_tokens = 4, .row = Bytes(8)};
  const auto refusal = [&shape](Groups groups) {
    return std::string(HeadParts::Create(shape, std::move(groups)).status().message());
  };
  EXPECT_TRUE(HeadParts::Create(shape, {{3, 1}, {0, 2}}).ok());
  EXPECT_THAT(refusal({{0, 1, 2}, {3}}), HasSubstr("one size"));
  EXPECT_THAT(refusal({{0, 1}, {1, 2}}), HasSubstr("once, got 1"));
  EXPECT_THAT(refusal({{0, 1}, {2, 4}}), HasSubstr("got 4"));
  EXPECT_THAT(refusal({{0, 1}}), HasSubstr("all 4 heads, got 2"));
  EXPECT_THAT(refusal({}), HasSubstr("got 0"));
}

TEST(HeadParts, HaveKeysOfTheirOwn) {
  const BlockKey a{1, 2}, b{1, 3};
  std::set<BlockKey> keys = {a, b};
  for (int32_t group = 0; group < 64; ++group) {
    keys.insert(HeadParts::KeyOf(a, group));
    keys.insert(HeadParts::KeyOf(b, group));
  }
  EXPECT_EQ(keys.size(), 130u);
}

}  // namespace
}  // namespace palimpsest
