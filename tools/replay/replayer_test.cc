#include "tools/replay/replayer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <map>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "tools/replay/replay_report.h"

namespace palimpsest::replay {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBlockTokens = 10;

// Paths as words: each letter a block behind those before it.
Trace MakeTrace(const std::vector<std::string>& paths, int64_t more_tokens = 0) {
  TraceBuilder builder(kBlockTokens);
  for (size_t i = 0; i < paths.size(); ++i) {
    TraceRequest request;
    request.arrival = absl::Seconds(i);
    request.input_tokens = static_cast<int64_t>(paths[i].size()) * kBlockTokens + more_tokens;
    EXPECT_TRUE(
        builder.Add(request, 0, std::vector<uint64_t>(paths[i].begin(), paths[i].end())).ok());
  }
  return builder.Build();
}

ReplayResult ReplayOf(const Trace& trace, absl::string_view policy, size_t blocks,
                      cache::Discipline discipline = cache::Discipline::kPlain) {
  return Replay(trace, **FindReplayPolicy(policy),
                {.blocks = blocks, .history = 100, .discipline = discipline});
}

TEST(Replay, CountsBlocksTokensAndHalves) {
  const Trace trace = MakeTrace({"abc", "abd", "abd", "x"}, 5);
  const ReplayResult result = ReplayOf(trace, "lru", 100);
  EXPECT_EQ(result.halves[0],
            (ReplayCounts{.blocks = 6, .hit_blocks = 2, .tokens = 70, .hit_tokens = 20}));
  EXPECT_EQ(result.halves[1],
            (ReplayCounts{.blocks = 4, .hit_blocks = 3, .tokens = 50, .hit_tokens = 30}));
  EXPECT_DOUBLE_EQ(result.all.BlockRate(), 0.5);
  EXPECT_DOUBLE_EQ(result.all.TokenRate(), 50.0 / 120);
  EXPECT_EQ(result.stored_blocks, 5);
  EXPECT_EQ(result.evicted_blocks, 0);
}

TEST(Replay, ATokenOfAPartBlockIsNotCountedTwice) {
  const Trace trace = MakeTrace({"ab", "ab"}, -3);
  EXPECT_EQ(ReplayOf(trace, "lru", 9).all.hit_tokens, 17);
}

TEST(Replay, OrderTellsLeavesFromBlocksAlone) {
  const Trace trace = MakeTrace({"abc", "x", "abc"});
  EXPECT_EQ(ReplayOf(trace, "lru", 3).all.hit_blocks, 0) << "without a, b and c are of no use";
  EXPECT_EQ(ReplayOf(trace, "lru", 3, cache::Discipline::kLeavesFirst).all.hit_blocks, 2);
  EXPECT_EQ(ReplayOf(trace, "belady", 3).all.hit_blocks, 3) << "x is not stored";
  EXPECT_EQ(ReplayOf(trace, "infinite", 1).all.hit_blocks, 3);
}

TEST(FindReplayPolicy, NamesThoseThereAre) {
  EXPECT_THAT(FindReplayPolicy("fifo").status().message(), HasSubstr("lru, lfu, arc, s3fifo"));
}

TEST(GapClosed, IsTheShareOfTheWay) {
  EXPECT_DOUBLE_EQ(*GapClosed(0.3, 0.2, 0.6), 0.25);
  EXPECT_LT(*GapClosed(0.1, 0.2, 0.6), 0);
  EXPECT_FALSE(GapClosed(0.2, 0.2, 0.2).has_value());
}

// A random word that often begins as an earlier one does.
std::vector<std::string> RandomPaths(std::mt19937& random, size_t count, size_t letters,
                                     size_t longest) {
  std::vector<std::string> paths;
  while (paths.size() < count) {
    std::string path;
    if (!paths.empty() && random() % 3 > 0) {
      path = paths[random() % paths.size()];
      path.resize(1 + random() % path.size());
    }
    while (path.size() < longest && (path.empty() || random() % 2 == 0)) {
      path += static_cast<char>('a' + random() % letters);
    }
    paths.push_back(path);
  }
  return paths;
}

// The most hits that any sequence of decisions has: all sets of blocks that may be cached, with the
// hits so far.
int64_t MostHits(const Trace& trace, int blocks) {
  std::map<uint32_t, int64_t> states = {{0, 0}};  // by set
  for (const uint32_t block : trace.accesses()) {
    std::map<uint32_t, int64_t> next;
    const auto reach = [&next](uint32_t set, int64_t hits) {
      int64_t& best = next[set];
      best = std::max(best, hits);
    };
    for (const auto& [set, hits] : states) {
      const uint32_t bit = uint32_t{1} << block;
      reach(set, hits + ((set & bit) != 0 ? 1 : 0));
      if ((set & bit) != 0) continue;
      if (std::popcount(set) < blocks) reach(set | bit, hits);
      for (uint32_t other = 0; other < trace.distinct_blocks(); ++other) {
        if ((set >> other & 1) != 0) reach((set & ~(uint32_t{1} << other)) | bit, hits);
      }
    }
    states = std::move(next);
  }
  int64_t most = 0;
  for (const auto& [set, hits] : states) most = std::max(most, hits);
  return most;
}

TEST(BeladyPolicyProperty, NoDecisionsHaveMoreHits) {
  std::mt19937 random(11);
  int tried = 0;
  while (tried < 40) {
    const Trace trace = MakeTrace(RandomPaths(random, 8, 3, 3));
    if (trace.distinct_blocks() > 12) continue;
    ++tried;
    for (const size_t blocks : {1, 2, 4}) {
      const int64_t most = MostHits(trace, static_cast<int>(blocks));
      EXPECT_EQ(ReplayOf(trace, "belady", blocks).all.hit_blocks, most);
    }
  }
}

TEST(ReplayProperty, NoPolicyBeatsBeladyNorBeladyTheInfiniteCache) {
  std::mt19937 random(12);
  const Trace trace = MakeTrace(RandomPaths(random, 400, 5, 9));
  for (const size_t blocks : {1, 5, 30, 100}) {
    const ReplayResult belady = ReplayOf(trace, "belady", blocks);
    EXPECT_LE(belady.all.hit_blocks, ReplayOf(trace, "infinite", blocks).all.hit_blocks);
    for (const std::string& policy : ReplayPolicies()) {
      if (policy == "infinite") continue;
      for (const auto discipline : {cache::Discipline::kPlain, cache::Discipline::kLeavesFirst}) {
        const ReplayResult result = ReplayOf(trace, policy, blocks, discipline);
        EXPECT_LE(result.all.hit_blocks, belady.all.hit_blocks) << policy << " " << blocks;
        EXPECT_LE(result.stored_blocks - result.evicted_blocks, static_cast<int64_t>(blocks));
        EXPECT_EQ(result, ReplayOf(trace, policy, blocks, discipline)) << "deterministic";
      }
    }
    const auto large = ReplayOf(trace, "lru", trace.distinct_blocks());
    EXPECT_EQ(large.all.hit_blocks, ReplayOf(trace, "infinite", 1).all.hit_blocks);
  }
}

TEST(ReplayReport, HasTheResultBesideItsBounds) {
  const Trace trace = MakeTrace({"abc", "x", "abc"});
  const TraceSource source{.file = "some.jsonl", .format = "mooncake", .starts_file = ""};
  const auto report = MakeReplayReport(
      source, trace, "gdsf",
      {.blocks = 3, .history = 7, .discipline = cache::Discipline::kLeavesFirst}, Bytes(1000));
  ASSERT_TRUE(report.ok()) << report.status();
  const nlohmann::json json = ReplayJson(*report);
  EXPECT_EQ(json["policy"], "gdsf");
  EXPECT_EQ(json["order"], "leaves-first");
  EXPECT_EQ(json["trace"]["accesses"], 7);
  EXPECT_DOUBLE_EQ(json["hit_rate_blocks"], 2.0 / 7);
  EXPECT_DOUBLE_EQ(json["hit_rate_tokens"], 2.0 / 7);
  EXPECT_DOUBLE_EQ(json["infinite"], 3.0 / 7);
  EXPECT_DOUBLE_EQ(json["belady"], 3.0 / 7);
  EXPECT_DOUBLE_EQ(json["lru"], 0);
  EXPECT_DOUBLE_EQ(json["lru_leaves_first"], 2.0 / 7);
  EXPECT_NEAR(json["gap_closed"].get<double>(), 2.0 / 3, 1e-9);
  EXPECT_EQ(json["halves"][1]["gap_closed"], json["gap_closed"]);
  EXPECT_TRUE(json["halves"][0]["gap_closed"].is_null()) << "no hits at all in the first half";
  EXPECT_EQ(json["evicted_bytes"], 2 * 10 * 1000);
  const std::string table = ReplayTable(*report);
  EXPECT_THAT(table, HasSubstr("3 requests in 2s, 7 blocks of 10 tokens, 4 of them distinct"));
  EXPECT_THAT(table, HasSubstr("gdsf      leaves-first"));
  EXPECT_FALSE(MakeReplayReport(source, trace, "none", {.blocks = 3}, Bytes(1)).ok());
}

}  // namespace
}  // namespace palimpsest::replay
