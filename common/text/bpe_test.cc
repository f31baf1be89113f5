#include "common/text/bpe.h"

#include <algorithm>
#include <random>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using Pair = std::pair<TokenId, TokenId>;
using Tokens = std::vector<std::pair<std::string, TokenId>>;

std::vector<TokenId> Encode(const Bpe& bpe, absl::string_view word) {
  Bpe::Scratch scratch;
  std::vector<TokenId> ids;
  bpe.Encode(word, scratch, ids);
  return ids;
}

// Merges the first pair of the best rank over and over, by looking at all of them.
std::vector<TokenId> NaiveEncode(const Tokens& tokens, const std::vector<Pair>& merges,
                                 const std::string& word) {
  const auto find = [&](const std::string& text) {
    for (const auto& [bytes, id] : tokens) {
      if (bytes == text) return id;
    }
    return TokenId{-1};
  };
  std::vector<std::string> parts;
  for (const char byte : word) parts.emplace_back(1, byte);
  for (size_t rank = 0; rank < merges.size();) {
    size_t i = 0;
    while (i + 1 < parts.size() && Pair(find(parts[i]), find(parts[i + 1])) != merges[rank]) ++i;
    if (i + 1 >= parts.size()) {
      ++rank;
      continue;
    }
    parts[i] += parts[i + 1];
    parts.erase(parts.begin() + i + 1);
    rank = 0;
  }
  std::vector<TokenId> ids;
  for (const std::string& part : parts) ids.push_back(find(part));
  return ids;
}

TEST(Bpe, RandomMergesGiveWhatTheDefinitionGives) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    Tokens tokens = {{"a", 0}, {"b", 1}, {"c", 2}};
    std::vector<Pair> merges;
    for (int i = random() % 20; i > 0; --i) {
      const auto& [left, left_id] = tokens[random() % tokens.size()];
      const auto& [right, right_id] = tokens[random() % tokens.size()];
      const std::string merged = left + right;
      bool known = false;
      for (const auto& [bytes, id] : tokens) known |= bytes == merged;
      const Pair merge(left_id, right_id);
      if (std::find(merges.begin(), merges.end(), merge) != merges.end()) continue;
      merges.push_back(merge);
      if (!known) tokens.emplace_back(merged, tokens.size());
    }
    const auto bpe = Bpe::Create(tokens, merges, {});
    ASSERT_TRUE(bpe.ok()) << bpe.status();
    for (int word_index = 0; word_index < 30; ++word_index) {
      std::string word(random() % 24, ' ');
      for (char& c : word) c = "abc"[random() % 3];
      ASSERT_EQ(Encode(*bpe, word), NaiveEncode(tokens, merges, word)) << word;
    }
  }
}

TEST(Bpe, WholeWordsWinOnlyWhereMergesAreIgnored) {
  const Tokens tokens = {{"a", 0}, {"b", 1}, {"c", 2}, {"ab", 3}, {"bc", 4}, {"abc", 5}};
  const std::vector<Pair> merges = {{1, 2}, {0, 1}};
  EXPECT_EQ(Encode(*Bpe::Create(tokens, merges, {}), "abc"), std::vector<TokenId>({0, 4}));
  EXPECT_EQ(Encode(*Bpe::Create(tokens, merges, {.ignore_merges = true}), "abc"),
            std::vector<TokenId>({5}));
}

TEST(Bpe, BytesWithoutTokenVanishOrAreUnknown) {
  const Tokens tokens = {{"a", 0}, {"aa", 1}};
  const std::vector<Pair> merges = {{0, 0}};
  const auto ids = [&](const Bpe::Options& options) {
    return Encode(*Bpe::Create(tokens, merges, options), "xa\xFFya");
  };
  EXPECT_EQ(ids({}), std::vector<TokenId>({1}));
  EXPECT_EQ(ids({.unknown = 9}), std::vector<TokenId>({9, 0, 9, 9, 0}));
  EXPECT_EQ(ids({.unknown = 9, .fuse_unknown = true}), std::vector<TokenId>({9, 0, 9, 0}));
}

TEST(Bpe, MergeWithoutResultIsAnError) {
  const auto bpe = Bpe::Create({{"a", 0}, {"b", 1}}, {{0, 1}}, {});
  EXPECT_EQ(bpe.status().code(), absl::StatusCode::kInvalidArgument);
}

// Quadratic merging would take hours for the longer word.
TEST(Bpe, LongWordsTakeNearLinearTime) {
  Tokens tokens = {{"a", 0}};
  std::vector<Pair> merges;
  for (TokenId id = 1; id <= 10; ++id) {
    tokens.emplace_back(std::string(1 << id, 'a'), id);
    merges.emplace_back(id - 1, id - 1);
  }
  const auto bpe = Bpe::Create(tokens, merges, {});
  ASSERT_TRUE(bpe.ok());
  const auto ids = Encode(*bpe, std::string((4 << 20) + 3, 'a'));
  ASSERT_EQ(ids.size(), 4096 + 2);
  EXPECT_EQ(ids[4095], 10);
  EXPECT_EQ(ids[4096], 1);
  EXPECT_EQ(ids[4097], 0);
}

}  // namespace
}  // namespace palimpsest
