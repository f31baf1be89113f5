#include "worker/core/block_keys.h"

#include <set>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST(ChainKey, IsTheBeginningOfSha256) {
  // Of 16 zero bytes, and 1 and 2 as 32-bit little-endian numbers.
  const std::vector<TokenId> tokens = {1, 2};
  const BlockKey key = ChainKey(BlockKey{}, tokens);
  EXPECT_EQ(key.high, 0xf7cdcf8edfaaf5c3u);
  EXPECT_EQ(key.low, 0x9a212626acaecae6u);
}

TEST(ChainKey, DependsOnParentAndTokens) {
  std::set<BlockKey> keys;
  for (const BlockKey& parent : {BlockKey{}, BlockKey{1, 0}, BlockKey{0, 1}}) {
    for (const std::vector<TokenId>& tokens :
         std::vector<std::vector<TokenId>>{{1, 2}, {2, 1}, {1}, {1, 2, 0}}) {
      EXPECT_TRUE(keys.insert(ChainKey(parent, tokens)).second);
      EXPECT_EQ(ChainKey(parent, tokens), ChainKey(parent, tokens));
    }
  }
}

TEST(RootKey, DependsOnEachPart) {
  const std::vector<BlockKeyRoot> roots = {
      {"salt", "print", "bf16", "pages", 16}, {"tlas", "print", "bf16", "pages", 16},
      {"salt", "other", "bf16", "pages", 16}, {"salt", "print", "fp8_e4m3", "pages", 16},
      {"salt", "print", "bf16", "heads", 16}, {"salt", "print", "bf16", "pages", 32},
      {"saltp", "rint", "bf16", "pages", 16}, {"", "print", "bf16", "pages", 16},
  };
  std::set<BlockKey> keys = {BlockKey{}};
  for (const BlockKeyRoot& root : roots) EXPECT_TRUE(keys.insert(RootKey(root)).second);
}

}  // namespace
}  // namespace palimpsest
