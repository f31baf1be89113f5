#include "tools/load/schedule.h"

#include <gtest/gtest.h>

#include <cmath>

namespace palimpsest::load {
namespace {

// Bursts of ten a millisecond apart, every ten seconds.
std::vector<absl::Duration> Bursts() {
  std::vector<absl::Duration> arrivals;
  for (int burst = 0; burst < 40; ++burst) {
    for (int i = 0; i < 10; ++i) {
      arrivals.push_back(absl::Seconds(10 * burst) + absl::Milliseconds(i));
    }
  }
  return arrivals;
}

const std::vector<RequestLengths> kLengths = {{10, 1}, {20, 2}, {30, 3}, {40, 4}, {50, 5}};

std::vector<std::vector<ScheduledRequest>> Make(const ScheduleOptions& options) {
  return MakeSchedule(Bursts(), kLengths, options);
}

// Squared deviation of the gaps over their squared mean: 1 for a Poisson process.
double Burstiness(const std::vector<ScheduledRequest>& requests) {
  double sum = 0, squares = 0;
  for (size_t i = 1; i < requests.size(); ++i) {
    const double gap = absl::ToDoubleSeconds(requests[i].due - requests[i - 1].due);
    sum += gap;
    squares += gap * gap;
  }
  const double n = static_cast<double>(requests.size() - 1);
  return squares / n / (sum / n * sum / n) - 1;
}

TEST(MakeSchedule, IsDeterministic) {
  const ScheduleOptions options = {.seed = 3, .duration = absl::Seconds(60), .rates = {2, 0.5}};
  EXPECT_EQ(Make(options), Make(options));
  ScheduleOptions other = options;
  other.seed = 4;
  EXPECT_NE(Make(options), Make(other));
}

TEST(MakeSchedule, IsTheSameOnEveryMachine) {
  const auto requests =
      Make({.seed = 1, .point = 2, .duration = absl::Seconds(10), .rates = {1}})[0];
  uint64_t folded = 0;
  for (const ScheduledRequest& request : requests) {
    folded = folded * 31 + static_cast<uint64_t>(request.lengths.prompt_tokens) + request.seed;
  }
  EXPECT_EQ(folded, 3219444550329838909u);
}

TEST(MakeSchedule, HasTheRatesThatAreAskedFor) {
  // Beyond the trace's 400 arrivals too.
  for (const double rate : {0.1, 1.0, 3.3, 20.0}) {
    const auto schedule =
        Make({.seed = 9, .duration = absl::Seconds(100), .rates = {rate, rate / 2, 0}});
    ASSERT_EQ(schedule.size(), 3u);
    EXPECT_EQ(schedule[0].size(), static_cast<size_t>(std::llround(100 * rate)));
    EXPECT_EQ(schedule[1].size(), static_cast<size_t>(std::llround(50 * rate)));
    EXPECT_TRUE(schedule[2].empty());
    for (const auto& requests : schedule) {
      absl::Duration last;
      for (const ScheduledRequest& request : requests) {
        EXPECT_LE(last, request.due);
        EXPECT_LT(request.due, absl::Seconds(100));
        last = request.due;
      }
    }
  }
}

TEST(MakeSchedule, StaysAsBurstyAsTheTrace) {
  for (const double rate : {0.5, 1.0, 3.0}) {
    const auto schedule = Make({.seed = 5, .duration = absl::Seconds(400), .rates = {rate}});
    EXPECT_NEAR(Burstiness(schedule[0]), 9, 1.5) << rate;
  }
}

TEST(MakeSchedule, ARequestHasTheSameLengthsAtEveryRate) {
  const auto slow = Make({.seed = 5, .duration = absl::Seconds(10), .rates = {1, 1}});
  const auto fast = Make({.seed = 5, .point = 1, .duration = absl::Seconds(10), .rates = {4, 4}});
  for (size_t tenant = 0; tenant < 2; ++tenant) {
    for (size_t i = 0; i < slow[tenant].size(); ++i) {
      EXPECT_EQ(slow[tenant][i].lengths, fast[tenant][i].lengths);
      EXPECT_NE(slow[tenant][i].seed, fast[tenant][i].seed);
    }
  }
}

TEST(MakeSchedule, TenantsHavePiecesOfTheirOwn) {
  std::vector<absl::Duration> arrivals;
  for (int i = 0; i < 1000; ++i) arrivals.push_back(absl::Milliseconds(i * i));
  const auto schedule = MakeSchedule(
      arrivals, kLengths, {.seed = 5, .duration = absl::Seconds(50), .rates = {1, 1, 1}});
  for (size_t i = 1; i < 50; ++i) {
    EXPECT_NE(schedule[0][i].due, schedule[1][i].due);
    EXPECT_NE(schedule[1][i].due, schedule[2][i].due);
    EXPECT_NE(schedule[0][i].seed, schedule[1][i].seed);
  }
}

TEST(MakeSchedule, CanFixTheLengthOfPrompts) {
  const auto schedule =
      Make({.seed = 5, .duration = absl::Seconds(10), .rates = {2}, .prompt_tokens = 777});
  for (const ScheduledRequest& request : schedule[0]) {
    EXPECT_EQ(request.lengths.prompt_tokens, 777);
  }
}

TEST(MakeSchedule, ABurstAtOneInstantIsSpread) {
  const std::vector<absl::Duration> arrivals = {absl::ZeroDuration(), absl::ZeroDuration(),
                                                absl::ZeroDuration(), absl::Seconds(1)};
  const auto schedule = MakeSchedule(
      arrivals, kLengths, {.seed = 0, .duration = absl::Seconds(2), .rates = {1, 1, 1, 1}});
  for (const auto& requests : schedule) {
    ASSERT_EQ(requests.size(), 2u);
    EXPECT_LT(requests[1].due, absl::Seconds(2));
  }
}

TEST(RandomPrompt, StaysInTheVocabulary) {
  EXPECT_EQ(RandomPrompt(1, 100, 50), RandomPrompt(1, 100, 50));
  EXPECT_NE(RandomPrompt(1, 100, 50), RandomPrompt(2, 100, 50));
  bool first = false, last = false;
  for (const int32_t id : RandomPrompt(3, 10'000, 50)) {
    ASSERT_GE(id, 0);
    ASSERT_LT(id, 50);
    first = first || id == 0;
    last = last || id == 49;
  }
  EXPECT_TRUE(first && last);
}

const std::vector<Conversation> kConversations = {{{10, 1}, {2, 2}, {3, 3}}, {{20, 4}}};

std::vector<ScheduledRequest> Talk(double rate, uint64_t point = 0) {
  return MakeConversations(
      Bursts(), kConversations,
      {.seed = 5, .point = point, .duration = absl::Seconds(100), .rates = {rate}},
      {.system_tokens = 7,
       .context_tokens = 100,
       .tool_share = 0.75,
       .tool_wait = absl::Seconds(1),
       .human_wait = absl::Seconds(5)})[0];
}

TEST(MakeConversations, TurnsFollowTheirConversation) {
  const auto requests = Talk(2);
  size_t conversations = 0;
  for (size_t i = 0; i < requests.size(); ++i) {
    const ScheduledRequest& request = requests[i];
    if (request.continues.has_value()) {
      EXPECT_EQ(*request.continues, i - 1);
      EXPECT_EQ(request.system_tokens, 0);
      EXPECT_LE(request.lengths.prompt_tokens, 3);
      continue;
    }
    ++conversations;
    EXPECT_EQ(request.system_tokens, 7);
    EXPECT_EQ(request.system_seed, requests[0].system_seed);
    EXPECT_NE(request.system_seed, request.seed);
    const bool three = request.lengths.prompt_tokens == 110;
    EXPECT_TRUE(three || request.lengths.prompt_tokens == 120);
    EXPECT_EQ(three, i + 2 < requests.size() && requests[i + 1].continues.has_value());
    EXPECT_LT(request.due, absl::Seconds(100));
  }
  EXPECT_EQ(conversations, 200u);
}

TEST(MakeConversations, HaveTheSameTurnsAndWaitsAtEveryRate) {
  const auto slow = Talk(1, 1), fast = Talk(3, 2);
  ASSERT_GE(fast.size(), slow.size());
  for (size_t i = 0; i < slow.size(); ++i) {
    EXPECT_EQ(slow[i].lengths, fast[i].lengths);
    EXPECT_NE(slow[i].seed, fast[i].seed);
    if (slow[i].continues.has_value()) {
      EXPECT_EQ(slow[i].due, fast[i].due);
    }
  }
  EXPECT_EQ(Talk(1, 1), slow);
}

TEST(MakeConversations, WaitsHaveTheMeanThatIsAskedFor) {
  absl::Duration sum;
  int waits = 0;
  for (const ScheduledRequest& request : Talk(100)) {
    if (!request.continues.has_value()) continue;
    sum += request.due;
    ++waits;
  }
  EXPECT_GT(waits, 5000);
  EXPECT_NEAR(absl::ToDoubleSeconds(sum / waits), 2.0, 0.15);
}

}  // namespace
}  // namespace palimpsest::load
