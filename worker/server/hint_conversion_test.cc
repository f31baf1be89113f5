#include "worker/server/hint_conversion.h"

#include <limits>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

v1::PromptPart Part(v1::BlockType type, uint32_t length) {
  v1::PromptPart part;
  part.set_type(type);
  part.set_length(length);
  return part;
}

TEST(ToRequestHints, TakesWhatIsSaid) {
  v1::RequestHints hints;
  hints.set_expected_idle_seconds(2.5);
  v1::CacheAction::Retain& retain = *hints.mutable_then()->mutable_retain();
  retain.set_seconds(60);
  retain.set_half_life_seconds(20);
  retain.set_budget_bytes(1 << 20);
  retain.set_priority(100);
  hints.add_tool_call_markers("<tool_call>");
  const auto result = ToRequestHints(hints, "chat-1");
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->conversation, ConversationNumber("chat-1"));
  EXPECT_NE(result->conversation, ConversationNumber("chat-2"));
  EXPECT_EQ(result->expected_idle, absl::Seconds(2.5));
  EXPECT_FALSE(result->last_turn);
  EXPECT_EQ(result->then->kind, CacheAction::Kind::kRetain);
  EXPECT_EQ(result->then->time, absl::Seconds(60));
  EXPECT_EQ(result->then->half_life, absl::Seconds(20));
  EXPECT_EQ(result->then->budget_bytes, 1u << 20);
  EXPECT_EQ(result->then->priority, 100u);
  EXPECT_THAT(result->tool_call_texts, ElementsAre("<tool_call>"));
  const auto none = ToRequestHints({}, "");
  EXPECT_EQ(none->conversation, 0u);
  EXPECT_FALSE(none->then.has_value());
}

TEST(ToRequestHints, RefusesWhatIsOutOfBounds) {
  const auto says = [](const v1::RequestHints& hints, const std::string& id = "") {
    return std::string(ToRequestHints(hints, id).status().message());
  };
  EXPECT_THAT(says({}, "two words"), HasSubstr("conversation_id must be 1 to 128"));
  EXPECT_THAT(says({}, std::string(129, 'x')), HasSubstr("129 bytes"));
  v1::RequestHints hints;
  for (const double seconds : {-1.0, 4e7, std::numeric_limits<double>::quiet_NaN()}) {
    hints.set_expected_idle_seconds(seconds);
    EXPECT_THAT(says(hints), HasSubstr("hints.expected_idle_seconds is"));
  }
  hints.set_expected_idle_seconds(1);
  hints.set_last_turn(true);
  EXPECT_THAT(says(hints), HasSubstr("expected one at most"));
  hints.Clear();
  hints.mutable_then();
  EXPECT_THAT(says(hints), HasSubstr("no action"));
  hints.mutable_then()->mutable_prefetch();
  EXPECT_THAT(says(hints), HasSubstr("a prefetch"));
  hints.mutable_then()->mutable_retain()->set_priority(101);
  EXPECT_THAT(says(hints), HasSubstr("retain.priority is 101"));
  hints.mutable_then()->mutable_retain()->set_priority(1);
  hints.mutable_then()->mutable_retain()->set_half_life_seconds(-1);
  EXPECT_THAT(says(hints), HasSubstr("retain.half_life_seconds is -1"));
  hints.Clear();
  hints.add_tool_call_markers("");
  EXPECT_THAT(says(hints), HasSubstr("0 bytes"));
  hints.set_tool_call_markers(0, "\xC3");
  EXPECT_THAT(says(hints), HasSubstr("tool_call_markers"));
  hints.set_tool_call_markers(0, "ok");
  for (int i = 0; i < 8; ++i) hints.add_tool_call_markers("ok");
  EXPECT_THAT(says(hints), HasSubstr("9 entries"));
}

TEST(ToPromptParts, CoverThePromptAtMost) {
  google::protobuf::RepeatedPtrField<v1::PromptPart> parts_in;
  *parts_in.Add() = Part(v1::BLOCK_TYPE_SYSTEM_PROMPT, 3);
  *parts_in.Add() = Part(static_cast<v1::BlockType>(77), 4);
  const auto parts = ToPromptParts(parts_in, 7);
  ASSERT_TRUE(parts.ok()) << parts.status();
  ASSERT_EQ(parts->size(), 2u);
  EXPECT_EQ((*parts)[0].type, BlockType::kSystemPrompt);
  EXPECT_EQ((*parts)[1].type, BlockType::kUnknown);
  EXPECT_EQ((*parts)[1].tokens, 4);
  EXPECT_THAT(ToPromptParts(parts_in, 6).status().message(), HasSubstr("ends at 7"));
  parts_in[1].set_length(0xFFFFFFFF);
  EXPECT_FALSE(ToPromptParts(parts_in, 7).ok());
  parts_in[1].set_length(0);
  EXPECT_THAT(ToPromptParts(parts_in, 7).status().message(), HasSubstr("length 0"));
  for (int i = 0; i <= kMaxPromptParts; ++i) *parts_in.Add() = parts_in[0];
  EXPECT_THAT(ToPromptParts(parts_in, 1 << 20).status().message(), HasSubstr("at most 8192"));
}

}  // namespace
}  // namespace palimpsest
