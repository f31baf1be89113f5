#include "router/core/auth.h"

#include <gtest/gtest.h>

#include "absl/strings/match.h"

namespace palimpsest::router {
namespace {

constexpr char kAlpha[] = "alpha-token-0123456789";
constexpr char kBeta[] = "beta-token-0123456789";

TEST(TokenTable, TokensDecideTheTenant) {
  const TokenTable table = TokenTable::Parse(
                               "# rotation: two tokens of alpha\n"
                               "alpha alpha-token-0123456789\n"
                               "\n"
                               "alpha\talpha-second-token-0123\r\n"
                               "beta beta-token-0123456789")
                               .value();
  EXPECT_EQ(table.Authenticate(std::string("Bearer ") + kAlpha).value(), "alpha");
  EXPECT_EQ(table.Authenticate("bearer alpha-second-token-0123").value(), "alpha");
  EXPECT_EQ(table.Authenticate(std::string("Bearer  ") + kBeta).value(), "beta");
  EXPECT_EQ(table.tenants(), (std::set<std::string>{"alpha", "beta"}));
}

TEST(TokenTable, AHashStandsForItsToken) {
  // printf %s alpha-token-0123456789 | sha256sum
  const TokenTable table =
      TokenTable::Parse(
          "alpha sha256:53ab761424453342954583b5604363ca9b4e766786ff7feae945303d907e5e5b")
          .value();
  EXPECT_EQ(table.Authenticate(std::string("Bearer ") + kAlpha).value(), "alpha");
}

TEST(TokenTable, AnythingElseIsUnauthenticated) {
  const TokenTable table = TokenTable::Parse(std::string("alpha ") + kAlpha).value();
  for (const std::string& header :
       {std::string(), std::string("Bearer"), std::string("Bearer "), std::string(kAlpha),
        std::string("Basic ") + kAlpha, std::string("Bearer ") + kAlpha + "x",
        std::string("Bearer ") + std::string(kAlpha).substr(1), std::string("Bearer ") + kBeta,
        std::string("Bearer ") + std::string(1 << 20, 'x')}) {
    const absl::Status status = table.Authenticate(header).status();
    EXPECT_TRUE(absl::IsUnauthenticated(status)) << status;
    EXPECT_FALSE(absl::StrContains(status.message(), "0123456789")) << status;
  }
}

TEST(TokenTable, BadFilesAreRefusedWithTheLineAndWithoutTheToken) {
  const struct {
    const char* text;
    const char* says;
  } kCases[] = {
      {"", "no token"},
      {"# only a comment\n", "no token"},
      {"alpha\n", "line 1 has 1 words"},
      {"alpha secret-0123456789 more\n", "line 1 has 3 words"},
      {"alpha alpha-token-0123456789\nbeta short\n", "line 2: the token has 5 characters"},
      {"alpha sha256:zz\n", "64 hex digits"},
      {"a secret-0123456789\nb secret-0123456789\n", "'a' and 'b' have the same token"},
  };
  for (const auto& test : kCases) {
    const absl::Status status = TokenTable::Parse(test.text).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << test.text;
    EXPECT_TRUE(absl::StrContains(status.message(), test.says)) << status;
    EXPECT_FALSE(absl::StrContains(status.message(), "0123456789")) << status;
  }
}

}  // namespace
}  // namespace palimpsest::router
