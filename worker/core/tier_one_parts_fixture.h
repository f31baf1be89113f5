// For tests of TierOneParts: one head a group, and blocks whose tokens follow from their keys.
#ifndef PALIMPSEST_WORKER_CORE_TIER_ONE_PARTS_FIXTURE_H_
#define PALIMPSEST_WORKER_CORE_TIER_ONE_PARTS_FIXTURE_H_

#include <utility>
#include <vector>

#include "gtest/gtest.h"
#include "worker/core/tier_one_parts.h"

namespace palimpsest {

inline constexpr int32_t kBlockTokens = 16;
inline constexpr BlockKey kRoot{7, 7};
inline constexpr Bytes kPart(100);

inline HeadMass Mass(const std::vector<float>& shares, int64_t samples = 1) {
  HeadMass mass =
      HeadMass::Create({.layers = 1, .kv_heads = static_cast<int32_t>(shares.size())}).value();
  for (int64_t i = 0; i < samples; ++i) EXPECT_TRUE(mass.Sample(shares).ok());
  return mass;
}

inline TierOneParts::Options Options(int32_t groups, int64_t limit) {
  TierOneParts::Options options;
  for (int32_t group = 0; group < groups; ++group) options.groups.push_back({group});
  options.root = kRoot;
  options.block_tokens = kBlockTokens;
  options.part_bytes = kPart;
  options.limit = kPart * limit;
  return options;
}

inline std::vector<TokenId> TokensOf(const BlockKey& key) {
  return std::vector<TokenId>(kBlockTokens, static_cast<TokenId>(key.low));
}

inline BlockChain Chain(const BlockKey& parent, std::vector<BlockKey> keys) {
  BlockChain chain = {.parent = parent, .keys = std::move(keys), .tokens = {}};
  for (const BlockKey& key : chain.keys) {
    const std::vector<TokenId> tokens = TokensOf(key);
    chain.tokens.insert(chain.tokens.end(), tokens.begin(), tokens.end());
  }
  return chain;
}

inline absl::Time At(int64_t seconds) { return absl::UnixEpoch() + absl::Seconds(seconds); }

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_CORE_TIER_ONE_PARTS_FIXTURE_H_
