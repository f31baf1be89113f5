#include "broker/core/sizing/kv_sizing.h"

#include <algorithm>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "common/kv_format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

using Random = std::mt19937_64;

int64_t Between(Random& random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random);
}

KvSizing Sizing(std::vector<KvGroup> groups, int64_t block_tokens) {
  auto sizing = KvSizing::Create(std::move(groups), block_tokens);
  EXPECT_TRUE(sizing.ok()) << sizing.status();
  return *std::move(sizing);
}

std::string Refusal(std::vector<KvGroup> groups, int64_t block_tokens) {
  return std::string(KvSizing::Create(std::move(groups), block_tokens).status().message());
}

// Up to four groups of any kind, at least one of which keeps something.
std::vector<KvGroup> RandomGroups(Random& random, int64_t block_tokens, int64_t most_window) {
  std::vector<KvGroup> groups(static_cast<size_t>(Between(random, 1, 4)));
  for (KvGroup& group : groups) {
    group.layers = static_cast<int32_t>(Between(random, 1, 100));
    group.token_bytes = Bytes(Between(random, 0, 5000));
    group.state_bytes = Bytes(Between(random, 0, 1) * Between(random, 1, 1 << 20));
    group.reach.kind = static_cast<KvReach::Kind>(Between(random, 0, 2));
    group.reach.tokens = Between(random, 1, most_window);
    if (group.reach.kind == KvReach::Kind::kChunk) group.reach.tokens *= block_tokens;
  }
  groups.front().token_bytes += Bytes(1);
  return groups;
}

// Blocks that a sequence holds while its n-th token is computed: those with a token that it sees.
int64_t LiveBlocks(const KvReach& reach, int64_t n, int64_t block_tokens) {
  int64_t first_seen = 0;
  if (reach.kind == KvReach::Kind::kWindow) first_seen = std::max<int64_t>(0, n - reach.tokens);
  if (reach.kind == KvReach::Kind::kChunk) first_seen = (n - 1) / reach.tokens * reach.tokens;
  return (n - 1) / block_tokens - first_seen / block_tokens + 1;
}

TEST(KvSizing, CountsWholeBlocks) {
  const KvSizing sizing = Sizing({{.layers = 2, .token_bytes = Bytes(10)}}, 16);
  EXPECT_EQ(sizing.BytesFor(0), Bytes(0));
  EXPECT_EQ(sizing.BytesFor(1), Bytes(320));
  EXPECT_EQ(sizing.BytesFor(16), Bytes(320));
  EXPECT_EQ(sizing.BytesFor(17), Bytes(640));
  EXPECT_EQ(sizing.MaxTokens(Bytes(319)), 0);
  EXPECT_EQ(sizing.MaxTokens(Bytes(639)), 16);
  EXPECT_EQ(sizing.MaxBatch(17, Bytes(1919)), 2);
  EXPECT_EQ(sizing.MaxBatch(17, Bytes(1920)), 3);
}

TEST(KvSizing, AWindowTouchesOneBlockMoreThanItFills) {
  const KvReach window = {KvReach::Kind::kWindow, 4096};
  const KvSizing sizing = Sizing({{.layers = 1, .token_bytes = Bytes(1), .reach = window}}, 16);
  EXPECT_EQ(sizing.BytesFor(4096), Bytes(4096));
  EXPECT_EQ(sizing.BytesFor(4097), Bytes(4096 + 16));
  EXPECT_EQ(sizing.BytesFor(1'000'000), Bytes(4096 + 16));
  EXPECT_EQ(sizing.MaxTokens(Bytes(4096 + 16)), KvSizing::kMaxTokens) << "it grows no more";
}

TEST(KvSizing, AStateTakesTheSameForAnyLength) {
  const KvSizing sizing = Sizing({{.layers = 3, .state_bytes = Bytes(7)}}, 16);
  EXPECT_EQ(sizing.BytesFor(1), Bytes(21));
  EXPECT_EQ(sizing.BytesFor(KvSizing::kMaxTokens), Bytes(21));
  EXPECT_EQ(sizing.MaxTokens(Bytes(20)), 0);
}

TEST(KvSizing, RefusesWhatCouldOverflowOrIsNoSize) {
  const auto group = [](int32_t layers, Bytes token, Bytes state) {
    return KvGroup{layers, token, state, {}};
  };
  EXPECT_THAT(Refusal({}, 16), HasSubstr("no layer keeps anything"));
  EXPECT_THAT(Refusal({group(0, Bytes(1), Bytes(1))}, 16), HasSubstr("no layer keeps anything"));
  EXPECT_THAT(Refusal({group(-1, Bytes(1), Bytes(0))}, 16), HasSubstr("layers of a group"));
  EXPECT_THAT(Refusal({group(1, Bytes(-1), Bytes(0))}, 16), HasSubstr("bytes of a token"));
  EXPECT_THAT(Refusal({group(1, Bytes(1), Bytes(-1))}, 16), HasSubstr("layer's state"));
  EXPECT_THAT(Refusal({group(1024, GiB(1), Bytes(0))}, 16), HasSubstr("in all layers"));
  EXPECT_THAT(Refusal({group(1024, Bytes(0), GiB(2048))}, 16), HasSubstr("sequence's state"));
  EXPECT_THAT(Refusal({group(1, Bytes(INT64_MAX), Bytes(0))}, 16), HasSubstr("bytes of a token"));
  for (const int64_t block_tokens : {-1, 0, 4097}) {
    EXPECT_THAT(Refusal({group(1, Bytes(1), Bytes(0))}, block_tokens), HasSubstr("block_tokens"));
  }
  KvGroup windowed = group(1, Bytes(1), Bytes(0));
  windowed.reach = {KvReach::Kind::kWindow, 0};
  EXPECT_THAT(Refusal({windowed}, 16), HasSubstr("window"));
  windowed.reach = {KvReach::Kind::kChunk, 100};
  EXPECT_THAT(Refusal({windowed}, 16), HasSubstr("a divisor of 100"));
  EXPECT_GT(Sizing({group(1024, MiB(16), GiB(1024))}, 4096).BytesFor(KvSizing::kMaxTokens),
            GiB(int64_t{1} << 29))
      << "the largest that is accepted does not overflow";
}

// The oracle is a sequence that grows by one token at a time.
TEST(KvSizingProperty, IsTheMostThatAGrowingSequenceEverHolds) {
  Random random(7);
  for (int round = 0; round < 300; ++round) {
    const int64_t block_tokens = Between(random, 1, 20);
    const KvSizing sizing = Sizing(RandomGroups(random, block_tokens, 60), block_tokens);
    std::vector<int64_t> held(sizing.groups().size(), 0);
    for (int64_t n = 1; n <= 200; ++n) {
      Bytes sum;
      for (size_t i = 0; i < held.size(); ++i) {
        const KvGroup& group = sizing.groups()[i];
        held[i] = std::max(held[i], LiveBlocks(group.reach, n, block_tokens));
        sum += (group.token_bytes * block_tokens * held[i] + group.state_bytes) * group.layers;
      }
      ASSERT_EQ(sizing.BytesFor(n), sum) << "round " << round << ", " << n << " tokens";
    }
  }
}

TEST(KvSizingProperty, InversesAreExact) {
  Random random(8);
  for (int round = 0; round < 20'000; ++round) {
    const int64_t block_tokens = Between(random, 1, KvSizing::kMaxBlockTokens);
    const KvSizing sizing = Sizing(RandomGroups(random, block_tokens, 5000), block_tokens);
    const Bytes memory(Between(random, 0, int64_t{1} << Between(random, 1, 50)));
    const int64_t longest = sizing.MaxTokens(memory);
    ASSERT_LE(sizing.BytesFor(longest), memory);
    if (longest < KvSizing::kMaxTokens) {
      ASSERT_GT(sizing.BytesFor(longest + 1), memory);
    }
    const int64_t tokens = Between(random, 1, KvSizing::kMaxTokens);
    const int64_t back = sizing.MaxTokens(sizing.BytesFor(tokens));
    ASSERT_GE(back, tokens);
    ASSERT_EQ(sizing.BytesFor(back), sizing.BytesFor(tokens));
    ASSERT_LT(sizing.MaxTokens(sizing.BytesFor(tokens) - Bytes(1)), tokens);
    const int64_t batch = sizing.MaxBatch(tokens, memory);
    ASSERT_LE(sizing.BytesFor(tokens) * batch, memory);
    ASSERT_GT(sizing.BytesFor(tokens) * (batch + 1), memory);
  }
}

TEST(KvFormat, CountsNumbersAndTheirScales) {
  const auto row = [](absl::string_view name, int64_t numbers) {
    const auto format = FindKvFormat(name);
    EXPECT_TRUE(format.ok()) << format.status();
    return format->RowBytes(numbers).count();
  };
  EXPECT_EQ(row("bf16", 128), 256);
  EXPECT_EQ(row("f32", 128), 512);
  EXPECT_EQ(row("fp8_e4m3", 128), 128);
  EXPECT_EQ(row("int8", 128), 132);
  EXPECT_EQ(row("int4", 128), 68);
  EXPECT_EQ(row("int4", 5), 3 + 4) << "half a byte is a byte";
  EXPECT_EQ(row("nvfp4", 128), 64 + 8);
  EXPECT_EQ(row("nvfp4", 17), 9 + 2);
  EXPECT_EQ(row("int8", 0), 0);
  EXPECT_EQ(KvFormat({.bits = 2, .scale_bytes = 4, .scale_group = 32}).RowBytes(128),
            Bytes(32 + 16));
  EXPECT_THAT(std::string(FindKvFormat("fp16").status().message()),
              HasSubstr("expected one of bf16, f16"));
}

}  // namespace
}  // namespace palimpsest
