#include "common/text/stop_matcher.h"

#include <algorithm>
#include <random>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using Match = StopMatcher::Match;

// The definition, straight away: the smallest end, then the longest stop.
std::optional<Match> NaiveMatch(const std::vector<std::string>& stops, absl::string_view text) {
  for (size_t end = 1; end <= text.size(); ++end) {
    std::optional<Match> best;
    for (size_t i = 0; i < stops.size(); ++i) {
      const size_t length = stops[i].size();
      if (length == 0 || length > end || text.substr(end - length, length) != stops[i]) continue;
      if (!best || end - length < best->start) best = Match{i, end - length, end};
    }
    if (best) return best;
  }
  return std::nullopt;
}

// The longest end of `text` that some stop begins with.
size_t NaiveHeld(const std::vector<std::string>& stops, absl::string_view text) {
  size_t held = 0;
  for (const std::string& stop : stops) {
    for (size_t length = 0; length <= std::min(stop.size(), text.size()); ++length) {
      if (text.substr(text.size() - length) == absl::string_view(stop).substr(0, length)) {
        held = std::max(held, length);
      }
    }
  }
  return held;
}

TEST(StopMatcher, RandomChunksGiveWhatTheDefinitionGives) {
  std::mt19937 random(11);
  const auto word = [&](size_t most) {
    std::string text(random() % (most + 1), ' ');
    for (char& c : text) c = "ab\n"[random() % 3];
    return text;
  };
  int matches = 0;
  for (int round = 0; round < 5000; ++round) {
    std::vector<std::string> stops(random() % 4);
    for (std::string& stop : stops) stop = word(6);
    const std::string text = word(40);
    const std::optional<Match> want = NaiveMatch(stops, text);
    matches += want.has_value();
    StopMatcher matcher(stops);
    uint64_t safe_before = 0;
    for (size_t pos = 0; pos < text.size();) {
      const size_t length = std::min<size_t>(random() % 5, text.size() - pos);
      matcher.Push(absl::string_view(text).substr(pos, length));
      pos += length;
      ASSERT_GE(matcher.safe(), safe_before);
      safe_before = matcher.safe();
      if (want && want->end <= pos) {
        ASSERT_TRUE(matcher.match().has_value());
        ASSERT_EQ(matcher.safe(), want->start);
      } else {
        ASSERT_FALSE(matcher.match().has_value());
        ASSERT_EQ(matcher.held(), NaiveHeld(stops, absl::string_view(text).substr(0, pos)));
        ASSERT_EQ(matcher.safe() + matcher.held(), pos);
      }
    }
    ASSERT_EQ(matcher.match().has_value(), want.has_value());
    if (!want) continue;
    EXPECT_EQ(matcher.match()->start, want->start);
    EXPECT_EQ(matcher.match()->end, want->end);
    EXPECT_EQ(stops[matcher.match()->stop_index], stops[want->stop_index]);
  }
  EXPECT_GT(matches, 1000);
}

TEST(StopMatcher, FoundAcrossChunksAndBytesBehindAreIgnored) {
  StopMatcher matcher({"</answer>"});
  EXPECT_FALSE(matcher.Push("42 </ans").has_value());
  EXPECT_EQ(matcher.safe(), 3);
  const auto match = matcher.Push("wer> and more </answer>");
  ASSERT_TRUE(match.has_value());
  EXPECT_EQ(match->start, 3);
  EXPECT_EQ(match->end, 12);
  matcher.Push("</answer>");
  EXPECT_EQ(matcher.match()->start, 3);
}

TEST(StopMatcher, WithoutStopsEverythingIsSafe) {
  StopMatcher matcher({});
  matcher.Push("abc");
  EXPECT_EQ(matcher.safe(), 3);
  EXPECT_EQ(matcher.held(), 0);
}

}  // namespace
}  // namespace palimpsest
