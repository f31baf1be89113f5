#include "tools/palctl/heads_bench.h"

#include <filesystem>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/testing.h"

namespace palimpsest::palctl {
namespace {

using ::testing::HasSubstr;

constexpr HeadsBenchOptions kOptions = {
    .context = 320, .scored = 40, .recent_tokens = 70, .batch = 2, .threads = 1};

class HeadsBenchTest : public ::testing::Test {
 protected:
  HeadsBenchTest() : folder_(::testing::TempDir() + "heads_bench") {
    std::filesystem::create_directories(folder_);
    EXPECT_TRUE(WriteRandomModel(folder_, TinyModelConfig()).ok());
    std::mt19937 random(7);
    for (int i = 0; i < 3; ++i) {
      HeadsBench::Tokens text;
      for (int32_t t = 0; t < kOptions.context; ++t) {
        text.push_back(static_cast<TokenId>(random() % 320));
      }
      texts_.push_back(std::move(text));
    }
  }
  ~HeadsBenchTest() override { std::filesystem::remove_all(folder_); }

  const std::string folder_;
  std::vector<HeadsBench::Tokens> texts_;
};

TEST_F(HeadsBenchTest, PerplexityIsThatOfTheScoredTokensAndDroppingMovesIt) {
  auto bench = HeadsBench::Create(folder_, kOptions);
  ASSERT_TRUE(bench.ok()) << bench.status();
  const auto lossless = (*bench)->Measure(texts_, {});
  ASSERT_TRUE(lossless.ok()) << lossless.status();
  EXPECT_EQ(lossless->tokens, 3 * (kOptions.scored - 1));
  EXPECT_GT(lossless->value, 1);
  EXPECT_EQ((*bench)->Measure(texts_, {})->value, lossless->value);
  LossyHeads all = {.recent_tokens = kOptions.recent_tokens, .dropped = {1, 1, 1, 1}};
  EXPECT_NE((*bench)->Measure(texts_, all)->value, lossless->value);
  // No key of these sequences is far.
  all.recent_tokens = kOptions.context;
  EXPECT_EQ((*bench)->Measure(texts_, all)->value, lossless->value);
}

TEST_F(HeadsBenchTest, SamplesGiveAProfileOfEveryHead) {
  auto bench = HeadsBench::Create(folder_, kOptions);
  ASSERT_TRUE(bench.ok()) << bench.status();
  const auto samples = (*bench)->Sample(texts_);
  ASSERT_TRUE(samples.ok()) << samples.status();
  EXPECT_TRUE(samples->profile.CheckModel(2, 2).ok());
  EXPECT_EQ(samples->profile.recent_tokens, kOptions.recent_tokens);
  // Every other one of 2 * 39 decode steps; the steps of prompts count as well.
  EXPECT_GE(samples->profile.samples, 39);
  for (const float mass : samples->profile.mass) EXPECT_GT(mass, 0);
  EXPECT_GT(samples->sampled_step, absl::ZeroDuration());
  // 4 heads; a block of 16 tokens has keys and values of 2 bytes.
  const ModelConfig& config = (*bench)->config();
  EXPECT_EQ((*bench)->HeadBytes(), Bytes(int64_t{16} * 2 * 2 * config.head_dim));
}

TEST_F(HeadsBenchTest, RefusesWhatCannotBeMeasured) {
  HeadsBenchOptions options = kOptions;
  options.scored = options.context;
  EXPECT_THAT(std::string(HeadsBench::Create(folder_, options).status().message()),
              HasSubstr("scored"));
  options = kOptions;
  options.recent_tokens = options.context;
  auto bench = HeadsBench::Create(folder_, options);
  ASSERT_TRUE(bench.ok()) << bench.status();
  EXPECT_THAT(std::string((*bench)->Sample(texts_).status().message()), HasSubstr("no heads"));
  EXPECT_FALSE(HeadsBench::Create(folder_ + "/nowhere", kOptions).ok());
}

}  // namespace
}  // namespace palimpsest::palctl
