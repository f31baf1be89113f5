#include "common/json_text.h"

#include <string>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST(ParseJson, GivesTheDocument) {
  auto document = ParseJson(R"({"a": [1, 2.5, null, "x"], "b": {"a": true}})");
  ASSERT_TRUE(document.ok()) << document.status();
  EXPECT_EQ((*document)["a"][3], "x");
  EXPECT_EQ((*document)["b"]["a"], true);
}

TEST(ParseJson, RefusesWhatIsNotJson) {
  for (const char* text :
       {"", "{", "[1,]", "{\"a\" 1}", "nul", "\"\xff\"", "1 2", "1e999", "{1:2}"}) {
    EXPECT_EQ(ParseJson(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(ParseJson, RefusesRepeatedKeysOfOneObjectOnly) {
  EXPECT_FALSE(ParseJson(R"({"a": 1, "b": 2, "a": 3})").ok());
  EXPECT_TRUE(ParseJson(R"([{"a": 1}, {"a": {"a": 2}}])").ok());
}

TEST(ParseJson, BoundsDepthAndSize) {
  const std::string deep = std::string(3, '[') + std::string(3, ']');
  EXPECT_TRUE(ParseJson(deep, {.max_depth = 3}).ok());
  EXPECT_FALSE(ParseJson(deep, {.max_depth = 2}).ok());
  EXPECT_FALSE(ParseJson(std::string(1 << 20, '[')).ok());
  EXPECT_FALSE(ParseJson("[1234]", {.max_bytes = 5}).ok());
}

}  // namespace
}  // namespace palimpsest
