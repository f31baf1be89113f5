#include "tools/replay/served_trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace palimpsest::replay {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kBlockTokens = 10;

struct Sent {
  double seconds = 0;
  std::vector<uint64_t> path;
  int64_t input = 0;
  int64_t output = 1;
};

Trace MakeTrace(const std::vector<Sent>& requests) {
  TraceBuilder builder(kBlockTokens);
  for (const Sent& sent : requests) {
    TraceRequest request;
    request.arrival = absl::Seconds(sent.seconds);
    request.input_tokens = sent.input;
    request.output_tokens = sent.output;
    EXPECT_TRUE(builder.Add(request, 0, sent.path).ok());
  }
  return builder.Build();
}

Trace Served(const Trace& trace, const ServedTraceOptions& options) {
  auto served = MakeServedTrace(trace, options);
  EXPECT_TRUE(served.ok()) << served.status();
  return std::move(served->trace);
}

TEST(MakeServedTrace, TakesTheFirstThatFitFasterAndSmaller) {
  const Trace trace = MakeTrace({{100, {1, 2}, 20, 7},
                                 {110, {1, 2, 3, 4, 5}, 50, 7},
                                 {130, {1, 2, 3}, 25, 0},
                                 {140, {9}, 10, 7}});
  const auto served = MakeServedTrace(
      trace, {.requests = 2, .speed = 4, .block_tokens = 5, .most_output = 3, .most_tokens = 20});
  ASSERT_TRUE(served.ok()) << served.status();
  EXPECT_EQ(served->too_long, 1);
  EXPECT_EQ(served->trace.block_tokens(), 5);
  TraceRequest first, second;
  first.input_tokens = 10;
  first.output_tokens = 3;
  second.arrival = absl::Seconds(30) / 4;
  second.input_tokens = 13;  // the last block has half of its tokens, rounded up
  second.output_tokens = 1;
  EXPECT_THAT(served->trace.requests(), ElementsAre(first, second));
  EXPECT_THAT(served->trace.path(1), ElementsAre(0, 1, 2));
}

TEST(MakeServedTrace, RefusesWhatNeverFitsOrIsTooMuch) {
  const Trace trace = MakeTrace({{0, {1, 2}, 20}, {1, {}, 0}});
  const auto none = MakeServedTrace(trace, {.most_tokens = 20});
  EXPECT_EQ(none.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(none.status().message(), HasSubstr("--block-tokens"));
  const Trace large = MakeTrace({{0, {}, kMostServedTokens}, {1, {}, kMostServedTokens}});
  const ServedTraceOptions all = {.most_tokens = 2 * kMostServedTokens};
  EXPECT_EQ(MakeServedTrace(large, all).status().code(), absl::StatusCode::kOutOfRange);
}

TEST(ServedPrompt, HasTheTokensOfItsBlocksAndItsOwn) {
  const Trace trace =
      Served(MakeTrace({{0, {1, 2}, 20}, {1, {1, 2, 3}, 25}, {2, {1, 2, 3}, 30}, {3, {1}, 30}}),
             {.most_tokens = 1000});
  const auto prompt = [&](size_t request, uint64_t salt = 1) {
    return ServedPrompt(trace, request, salt, 1000);
  };
  const std::vector<int32_t> longest = prompt(2);
  ASSERT_EQ(longest.size(), 30);
  EXPECT_EQ(prompt(0), std::vector<int32_t>(longest.begin(), longest.begin() + 20));
  EXPECT_EQ(prompt(1), std::vector<int32_t>(longest.begin(), longest.begin() + 25));
  EXPECT_EQ(prompt(2), longest) << "the same again";
  // Its path ends with the first block.
  const std::vector<int32_t> own = prompt(3);
  EXPECT_TRUE(std::equal(own.begin(), own.begin() + 10, longest.begin()));
  EXPECT_NE(own[10], longest[10]);
  EXPECT_NE(prompt(0, 2)[0], longest[0]) << "another salt";
  for (const int32_t id : longest) {
    EXPECT_GE(id, 0);
    EXPECT_LT(id, 1000);
  }
}

// Whatever two requests of a trace share, their prompts share, and not one token more but by
// chance.
TEST(ServedPromptProperty, PromptsShareWhatPathsShare) {
  std::mt19937 random(7);
  const auto below = [&](uint32_t bound) {
    return std::uniform_int_distribution<uint32_t>(0, bound - 1)(random);
  };
  std::vector<Sent> requests;
  for (int i = 0; i < 60; ++i) {
    Sent sent{.seconds = static_cast<double>(i)};
    for (uint32_t blocks = 1 + below(6); blocks > 0; --blocks) sent.path.push_back(below(2));
    sent.input = static_cast<int64_t>(sent.path.size()) * kBlockTokens;
    requests.push_back(sent);
  }
  const Trace trace = Served(MakeTrace(requests), {.block_tokens = 16, .most_tokens = 1000});
  constexpr int32_t kVocabulary = 1 << 30;
  for (size_t a = 0; a < requests.size(); ++a) {
    const std::vector<int32_t> one = ServedPrompt(trace, a, 3, kVocabulary);
    for (size_t b = 0; b < a; ++b) {
      const std::vector<int32_t> other = ServedPrompt(trace, b, 3, kVocabulary);
      const auto same = [](const auto& x, const auto& y) {
        return std::mismatch(x.begin(), x.end(), y.begin(), y.end()).first - x.begin();
      };
      EXPECT_EQ(same(one, other), 16 * same(requests[a].path, requests[b].path));
    }
  }
}

}  // namespace
}  // namespace palimpsest::replay
