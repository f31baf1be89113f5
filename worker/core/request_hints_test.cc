#include "worker/core/request_hints.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr BlockType kSystem = BlockType::kSystemPrompt;
constexpr BlockType kTool = BlockType::kToolContext;
constexpr BlockType kUser = BlockType::kUserContext;

TEST(BlockTypes, ABlockIsWhatMostOfItIs) {
  EXPECT_THAT(BlockTypes({{kSystem, 6}, {kUser, 5}, {kTool, 1}}, 4, 5),
              ElementsAre(kSystem, kSystem, kUser))
      << "of two halves the first; behind the parts nothing is known";
  EXPECT_THAT(BlockTypes({{kSystem, 1}, {kUser, 1}, {kSystem, 1}, {kUser, 5}}, 4, 9),
              ElementsAre(kSystem, kUser));
  EXPECT_THAT(BlockTypes({{kSystem, 1000}}, 4, 2), ElementsAre(kSystem, kSystem));
  EXPECT_THAT(BlockTypes({}, 4, 2), IsEmpty());
}

}  // namespace
}  // namespace palimpsest
