#include "common/text/regex.h"

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

std::string FirstMatch(absl::string_view pattern, absl::string_view text) {
  const auto regex = Regex::Compile(pattern);
  EXPECT_TRUE(regex.ok()) << regex.status();
  Regex::Scratch scratch(*regex);
  const auto match = regex->Find(text, 0, scratch);
  EXPECT_TRUE(match.ok()) << match.status();
  if (!match.ok() || !match->has_value()) return "(none)";
  return std::string(text.substr((*match)->begin, (*match)->end - (*match)->begin));
}

TEST(Regex, ClassesAreThoseOfUnicode) {
  EXPECT_EQ(FirstMatch(R"(\p{L}+)", "12 Straße!"), "Straße");
  EXPECT_EQ(FirstMatch(R"(\p{N}+)", "a½٣b"), "½٣");
  EXPECT_EQ(FirstMatch(R"((?i:'ll))", "we'LL"), "'LL");
}

TEST(Regex, SpaceIsTheUnicodeProperty) {
  EXPECT_EQ(FirstMatch(R"([^\s]+)", "\u00A0\u0085\u3000\u180Ex"), "\u180Ex");
  EXPECT_EQ(FirstMatch(R"(\S)", "\u180E"), "\u180E");
  EXPECT_EQ(FirstMatch(R"(\s)", "\u180E"), "(none)");
  EXPECT_EQ(FirstMatch(R"(\\s)", "x\\s"), "\\s");
}

TEST(Regex, EmptyMatchesDoNotCount) {
  EXPECT_EQ(FirstMatch("x*", "é🙂xx"), "xx");
  EXPECT_EQ(FirstMatch("x*", "é🙂"), "(none)");
}

TEST(Regex, QuotedTextMatchesItself) {
  EXPECT_EQ(FirstMatch(Regex::Quote("a.b\\E(c"), "axb a.b\\E(c"), "a.b\\E(c");
}

TEST(Regex, WrongPatternIsAnErrorWithPlace) {
  const auto regex = Regex::Compile("ab(");
  EXPECT_EQ(regex.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(regex.status().message().find("byte 3"), std::string::npos) << regex.status();
}

TEST(Regex, BacktrackingIsBounded) {
  const auto regex = Regex::Compile("(?:(?:a+)+)+$");
  ASSERT_TRUE(regex.ok());
  Regex::Scratch scratch(*regex);
  const auto match = regex->Find(std::string(64, 'a') + "!", 0, scratch);
  EXPECT_EQ(match.status().code(), absl::StatusCode::kResourceExhausted) << match.status();
}

}  // namespace
}  // namespace palimpsest
