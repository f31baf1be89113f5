#include "worker/core/head_mass.h"

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <tuple>
#include <utility>

#include "broker/core/sizing/kv_sizing.h"
#include "broker/core/sizing/model_shape.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Random = std::mt19937_64;

int64_t Between(Random& random, int64_t least, int64_t most) {
  return std::uniform_int_distribution<int64_t>(least, most)(random);
}

HeadMass Mass(const HeadMassOptions& options) {
  auto mass = HeadMass::Create(options);
  EXPECT_TRUE(mass.ok()) << mass.status();
  return *std::move(mass);
}

HeadMass Sampled(const std::vector<float>& shares) {
  HeadMass mass = Mass({.layers = 1, .kv_heads = static_cast<int32_t>(shares.size())});
  EXPECT_TRUE(mass.Sample(shares).ok());
  return mass;
}

HeadGroups Groups(const HeadMass& mass, int32_t count, Bytes head_bytes = Bytes(100)) {
  auto groups = HeadGroups::Create(mass, count, head_bytes);
  EXPECT_TRUE(groups.ok()) << groups.status();
  return *std::move(groups);
}

TEST(HeadMass, IsAnAverageThatForgets) {
  HeadMass mass = Mass({.layers = 1, .kv_heads = 2, .sample_weight = 0.25});
  EXPECT_EQ(mass.mass(0), 0);
  ASSERT_TRUE(mass.Sample({0.5f, 0.0f}).ok());
  EXPECT_EQ(mass.mass(0), 0.5) << "not pulled towards zero by what was not seen";
  ASSERT_TRUE(mass.Sample({0.5f, 1.0f}).ok());
  EXPECT_EQ(mass.mass(0), 0.5);
  EXPECT_EQ(mass.mass(1), 0.25);
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(mass.Sample({0.125f, 0.0f}).ok());
  EXPECT_NEAR(mass.mass(0), 0.125, 1e-9);
  EXPECT_EQ(mass.samples(), 202);
}

TEST(HeadMass, RefusesSamplesAsAWhole) {
  HeadMass mass = Sampled({0.5f, 0.25f});
  EXPECT_THAT(std::string(mass.Sample({0.5f}).message()), HasSubstr("expected 2, got 1"));
  for (const float wrong : {-0.1f, 1.1f, std::nanf(""), INFINITY}) {
    EXPECT_THAT(std::string(mass.Sample({0.0f, wrong}).message()), HasSubstr("0 to 1"));
  }
  EXPECT_EQ(mass.mass(0), 0.5);
  EXPECT_EQ(mass.samples(), 1);
}

TEST(HeadMass, RefusesOptionsThatMakeNoSense) {
  const HeadMassOptions good = {.layers = 2, .kv_heads = 2};
  const auto refusal = [&good](auto change) {
    HeadMassOptions options = good;
    change(options);
    return std::string(HeadMass::Create(options).status().message());
  };
  EXPECT_TRUE(HeadMass::Create(good).ok());
  EXPECT_THAT(refusal([](auto& o) { o.layers = 0; }), HasSubstr("layers"));
  EXPECT_THAT(refusal([](auto& o) { o.layers = 1 << 30; }), HasSubstr("layers"));
  EXPECT_THAT(refusal([](auto& o) { o.kv_heads = 1 << 30; }), HasSubstr("kv_heads"));
  EXPECT_THAT(refusal([](auto& o) { o.sample_weight = 0; }), HasSubstr("sample_weight"));
  EXPECT_THAT(refusal([](auto& o) { o.sample_weight = NAN; }), HasSubstr("sample_weight"));
  EXPECT_THAT(refusal([](auto& o) { o.recency_half_life = absl::ZeroDuration(); }),
              HasSubstr("recency_half_life"));
  EXPECT_THAT(refusal([](auto& o) { o.distance_scale = NAN; }), HasSubstr("distance_scale"));
}

TEST(HeadMass, WorthHalvesWithIdleTimeAndWithDistance) {
  const HeadMass mass = Mass(
      {.layers = 1, .kv_heads = 1, .recency_half_life = absl::Seconds(10), .distance_scale = 1000});
  const double fresh = mass.LogWorth(0.5, absl::ZeroDuration(), 0);
  EXPECT_DOUBLE_EQ(fresh, -1);
  EXPECT_DOUBLE_EQ(mass.LogWorth(0.5, absl::Seconds(20), 0), fresh - 2);
  EXPECT_DOUBLE_EQ(mass.LogWorth(0.5, absl::ZeroDuration(), 1000), fresh - 1);
  EXPECT_GT(mass.LogWorth(0, absl::ZeroDuration(), 0), mass.LogWorth(0, absl::Seconds(1), 0))
      << "what has no mass is still ordered";
}

TEST(HeadGroups, AreNeighboursInTheRanking) {
  const HeadMass mass = Sampled({0.5f, 0.1f, 0.9f, 0.1f, 0.3f});
  EXPECT_THAT(mass.Ranking(), ElementsAre(1, 3, 4, 0, 2));
  const HeadGroups groups = Groups(mass, 2);
  EXPECT_THAT(groups.members(0), ElementsAre(1, 3));
  EXPECT_THAT(groups.members(1), ElementsAre(4, 0, 2));
  EXPECT_EQ(groups.ExtentBytes(1), Bytes(300));
  EXPECT_EQ(groups.BlockBytes(), Bytes(500));
  EXPECT_EQ(groups.MissingBytes(0b10), Bytes(200));
  EXPECT_EQ(groups.MissingBytes(0b11), Bytes(0));
  EXPECT_FALSE(HeadGroups::Create(mass, 0, Bytes(1)).ok());
  EXPECT_FALSE(HeadGroups::Create(mass, 6, Bytes(1)).ok());
  EXPECT_FALSE(HeadGroups::Create(mass, 1, Bytes(0)).ok());
}

TEST(ChooseHeadMoves, LocalHeadsOfOldBlocksGoFirst) {
  const HeadMass mass = Sampled({0.9f, 0.01f});
  const HeadGroups groups = Groups(mass, 2);
  const IdleBlock blocks[] = {{absl::Seconds(1), 100, 0b11}, {absl::Minutes(2), 50000, 0b11}};
  const auto moves = ChooseHeadMoves(mass, groups, blocks, Bytes(250));
  EXPECT_THAT(moves, ElementsAre(HeadMove{1, 0, Bytes(100)}, HeadMove{0, 0, Bytes(100)},
                                 HeadMove{1, 1, Bytes(100)}))
      << "a whole block of the oldest would free 200 bytes only";
}

// Of a model as the sizing sees it, all heads' parts make up the block.
TEST(HeadGroups, ExtentsAddUpToTheBlockOfTheSizing) {
  const auto model = ParseModelShape(R"({"model_type": "llama", "num_hidden_layers": 16,
      "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8})");
  ASSERT_TRUE(model.ok()) << model.status();
  for (const char* format : {"bf16", "int8", "nvfp4"}) {
    for (const int32_t ranks : {1, 2, 16}) {
      const ShardOptions shard = {.format = *FindKvFormat(format), .ranks = ranks};
      const auto head_bytes = KvHeadBytes(*model, shard.format, 16);
      ASSERT_TRUE(head_bytes.ok()) << head_bytes.status();
      const HeadMass mass = Mass({.layers = 16, .kv_heads = std::max(1, 8 / ranks)});
      EXPECT_EQ(Groups(mass, 5, *head_bytes).BlockBytes(),
                KvGroups(*model, shard)->front().BlockBytes(16))
          << format << ", " << ranks << " ranks";
    }
  }
}

TEST(HeadGroups, LatentVectorsHaveNoHeads) {
  const auto model = ParseModelShape(R"({"num_hidden_layers": 2, "num_attention_heads": 4,
      "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16})");
  ASSERT_TRUE(model.ok()) << model.status();
  EXPECT_THAT(std::string(KvHeadBytes(*model, {}, 16).status().message()),
              HasSubstr("latent attention"));
}

// The oracle sorts all extents by the worth itself.
std::vector<HeadMove> SortedMoves(const HeadMassOptions& options, const HeadMass& mass,
                                  const HeadGroups& groups, absl::Span<const IdleBlock> blocks) {
  std::vector<std::tuple<double, size_t, int32_t>> worths;
  for (size_t block = 0; block < blocks.size(); ++block) {
    for (int32_t group = 0; group < groups.count(); ++group) {
      if ((blocks[block].resident >> group) % 2 == 0) continue;
      double sum = 0;
      for (const int32_t head : groups.members(group)) {
        sum += mass.mass(head) *
               std::exp2(-(blocks[block].idle / absl::Seconds(1)) /
                         absl::ToDoubleSeconds(options.recency_half_life)) /
               (1 + static_cast<double>(blocks[block].distance) / options.distance_scale);
      }
      worths.emplace_back(sum / static_cast<double>(groups.members(group).size()), block, group);
    }
  }
  std::sort(worths.begin(), worths.end());
  std::vector<HeadMove> moves;
  for (const auto& [worth, block, group] : worths) {
    moves.push_back({block, group, groups.ExtentBytes(group)});
  }
  return moves;
}

TEST(ChooseHeadMovesProperty, FewestOfTheLeastWorthAreMoved) {
  Random random(11);
  for (int round = 0; round < 500; ++round) {
    const HeadMassOptions options = {.layers = static_cast<int32_t>(Between(random, 1, 6)),
                                     .kv_heads = static_cast<int32_t>(Between(random, 1, 8)),
                                     .sample_weight = 0.3,
                                     .recency_half_life = absl::Seconds(Between(random, 1, 100)),
                                     .distance_scale = 1000};
    HeadMass mass = Mass(options);
    std::uniform_real_distribution<float> share(0.001f, 1.0f);
    for (int sample = 0; sample < 5; ++sample) {
      std::vector<float> shares(static_cast<size_t>(mass.heads()));
      for (float& value : shares) value = share(random);
      ASSERT_TRUE(mass.Sample(shares).ok());
    }
    const auto count =
        static_cast<int32_t>(Between(random, 1, std::min(HeadGroups::kMost, mass.heads())));
    const HeadGroups groups = Groups(mass, count, Bytes(Between(random, 1, 5000)));
    std::multiset<int32_t> all;
    for (int32_t group = 0; group < count; ++group) {
      all.insert(groups.members(group).begin(), groups.members(group).end());
    }
    ASSERT_EQ(all.size(), static_cast<size_t>(mass.heads()));
    ASSERT_EQ(std::set<int32_t>(all.begin(), all.end()).size(), all.size());
    std::vector<IdleBlock> blocks(static_cast<size_t>(Between(random, 0, 20)));
    Bytes resident;
    for (IdleBlock& block : blocks) {
      block = {absl::Seconds(Between(random, 0, 300)), Between(random, 0, 100'000), random()};
      resident += groups.BlockBytes() - groups.MissingBytes(block.resident);
    }
    const Bytes wanted(Between(random, 0, resident.count() + 1));
    const std::vector<HeadMove> moves = ChooseHeadMoves(mass, groups, blocks, wanted);
    Bytes freed;
    for (const HeadMove& move : moves) freed += move.bytes;
    ASSERT_EQ(freed >= wanted, wanted <= resident);
    if (!moves.empty()) {
      ASSERT_LT(freed - moves.back().bytes, wanted) << "one move too many";
    }
    std::vector<HeadMove> least = SortedMoves(options, mass, groups, blocks);
    least.resize(std::min(least.size(), moves.size()));
    ASSERT_EQ(moves, least) << "round " << round;
    for (const HeadMove& move : moves) {
      const uint64_t bit = uint64_t{1} << move.group;
      ASSERT_TRUE(blocks[move.block].resident & bit);
      blocks[move.block].resident &= ~bit;
    }
    Bytes left;
    for (const IdleBlock& block : blocks) {
      left += groups.BlockBytes() - groups.MissingBytes(block.resident);
    }
    ASSERT_EQ(left + freed, resident);
  }
}

// What idles together keeps its order, so that a heap of such worths does not go stale.
TEST(HeadMassProperty, TimeDoesNotReorderWhatStaysIdle) {
  Random random(12);
  const HeadMass mass = Mass({.layers = 1, .kv_heads = 1});
  std::uniform_real_distribution<double> share(0, 1);
  for (int round = 0; round < 10'000; ++round) {
    const double masses[] = {share(random), share(random)};
    const absl::Duration idle[] = {absl::Milliseconds(Between(random, 0, 1'000'000)),
                                   absl::Milliseconds(Between(random, 0, 1'000'000))};
    const int64_t distances[] = {Between(random, 0, 1 << 20), Between(random, 0, 1 << 20)};
    const absl::Duration later = absl::Seconds(Between(random, 1, 1'000'000));
    const auto difference = [&](absl::Duration wait) {
      return mass.LogWorth(masses[0], idle[0] + wait, distances[0]) -
             mass.LogWorth(masses[1], idle[1] + wait, distances[1]);
    };
    ASSERT_NEAR(difference(absl::ZeroDuration()), difference(later), 1e-6);
  }
}

}  // namespace
}  // namespace palimpsest
