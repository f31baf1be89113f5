#include "worker/core/load_choice.h"

#include <limits>
#include <string>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

// A token takes 1 ms and 1 us for each before it, a block of 10 tokens is loaded in 1 ms.
constexpr LoadCosts kCosts{
    .token_seconds = 1e-3, .position_seconds = 1e-6, .block_seconds = 1e-3, .answer_seconds = 1e-3};
constexpr double kNever = std::numeric_limits<double>::infinity();

TEST(ComputeSeconds, GrowsWithThePosition) {
  EXPECT_DOUBLE_EQ(ComputeSeconds(kCosts, 0, 1), 1e-3);
  EXPECT_DOUBLE_EQ(ComputeSeconds(kCosts, 100, 2), 2 * 1e-3 + (100 + 101) * 1e-6);
  EXPECT_DOUBLE_EQ(ComputeSeconds(kCosts, 5, 0), 0);
  // In parts as at once.
  EXPECT_NEAR(ComputeSeconds(kCosts, 7, 30) + ComputeSeconds(kCosts, 37, 63),
              ComputeSeconds(kCosts, 7, 93), 1e-12);
}

TEST(WorthAsking, OnlyIfComputingTakesLongerThanTheAnswer) {
  EXPECT_TRUE(WorthAsking(kCosts, 0, 10));
  EXPECT_FALSE(WorthAsking({.token_seconds = 1e-5, .answer_seconds = 1e-3}, 0, 90));
  EXPECT_TRUE(WorthAsking({.token_seconds = 1e-5, .answer_seconds = 1e-3}, 0, 110));
  EXPECT_TRUE(WorthAsking({}, 0, 1)) << "nothing measured";
}

TEST(ComputeSeconds, DoesNotGrowBehindTheWindow) {
  LoadCosts window = kCosts;
  window.window_tokens = 11;
  EXPECT_DOUBLE_EQ(ComputeSeconds(window, 0, 10), ComputeSeconds(kCosts, 0, 10));
  EXPECT_DOUBLE_EQ(ComputeSeconds(window, 10, 1), ComputeSeconds(kCosts, 10, 1));
  EXPECT_DOUBLE_EQ(ComputeSeconds(window, 500, 7), 7 * ComputeSeconds(kCosts, 10, 1));
  EXPECT_NEAR(ComputeSeconds(window, 3, 30),
              ComputeSeconds(window, 3, 9) + ComputeSeconds(window, 12, 21), 1e-12);
}

// 100 blocks saved for the copies of 5.
TEST(ChooseLoad, CopiesOnlyTheWindow) {
  LoadCosts slow_link = kCosts;
  slow_link.block_seconds = 0.1;
  EXPECT_EQ(ChooseLoad(slow_link, {.block_tokens = 10, .ready = 100}).load, 0);
  const LoadOffer window{.block_tokens = 10, .skipped = 95, .ready = 5, .window = 5};
  EXPECT_EQ(ChooseLoad(slow_link, window).load, 5);
  const std::vector<LowerBlocks> lower = {{100, 0.1}};
  EXPECT_EQ(ChooseLoad(slow_link, {.block_tokens = 10, .lower = lower}).patience,
            absl::ZeroDuration());
  EXPECT_GT(ChooseLoad(slow_link, {.block_tokens = 10, .window = 5, .lower = lower}).patience,
            absl::ZeroDuration());
}

struct Case {
  std::string what;
  LoadCosts costs;
  int32_t first = 0;
  int32_t ready = 0;
  std::vector<LowerBlocks> lower;
  int32_t queued = 0;
  int32_t load = 0;
  double patience = 0;
};

TEST(ChooseLoad, TakesWhatEndsFirst) {
  LoadCosts slow_link = kCosts;
  slow_link.block_seconds = 12e-3;
  LoadCosts no_load_yet = kCosts;
  no_load_yet.block_seconds = 0;
  const std::vector<Case> cases = {
      {"nothing there", kCosts},
      {"loading is faster", kCosts, 0, 5, {}, 0, 5},
      {"computing is faster", slow_link, 0, 5, {}, 0, 0},
      {"far behind, computing is slower", slow_link, 3000, 5, {}, 0, 5},
      {"others are loaded first", kCosts, 0, 5, {}, 60, 0},
      {"nothing measured", {}, 0, 5, {{10, 0.1}}, 0, 5},
      {"no load measured", no_load_yet, 0, 5, {}, 0, 5},
      // 100 tokens take 105 ms, 100 blocks less 10 ms.
      {"a lower tier that is fast enough", kCosts, 0, 0, {{10, 10e-3}}, 0, 0, 22e-3},
      {"a lower tier that is too slow", kCosts, 0, 0, {{10, 95e-3}}, 0, 0, 0},
      {"a lower tier that does not answer", kCosts, 0, 4, {{10, kNever}, {10, 1e-3}}, 0, 4, 0},
      {"ready blocks and a lower tier", kCosts, 0, 10, {{10, 20e-3}}, 0, 10, 42e-3},
      {"ready blocks are not awaited", kCosts, 0, 10, {{1, 20e-3}}, 0, 10, 0},
      {"a longer wait for more", kCosts, 0, 0, {{10, 10e-3}, {100, 30e-3}}, 0, 0, 62e-3},
      {"not for little more", kCosts, 0, 0, {{10, 10e-3}, {1, 30e-3}}, 0, 0, 22e-3},
  };
  for (const Case& c : cases) {
    const LoadChoice choice = ChooseLoad(c.costs, {.block_tokens = 10,
                                                   .first = c.first,
                                                   .ready = c.ready,
                                                   .lower = c.lower,
                                                   .queued = c.queued});
    EXPECT_EQ(choice.load, c.load) << c.what;
    EXPECT_NEAR(absl::ToDoubleSeconds(choice.patience), c.patience, 1e-6) << c.what;
  }
}

// However the wait ends, it has cost no more than what it could have saved.
TEST(ChooseLoad, PatienceEndsWhereWaitingWouldHaveBeenForNothing) {
  const std::vector<LowerBlocks> lower = {{10, 80e-3}};
  const LoadChoice choice = ChooseLoad(kCosts, {.block_tokens = 10, .lower = lower});
  const double compute = ComputeSeconds(kCosts, 0, 100);
  EXPECT_GT(choice.patience, absl::ZeroDuration());
  EXPECT_LE(absl::ToDoubleSeconds(choice.patience) + 10 * kCosts.block_seconds, compute);
}

}  // namespace
}  // namespace palimpsest
