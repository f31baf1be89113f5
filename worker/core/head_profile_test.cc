#include "worker/core/head_profile.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace palimpsest {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr char kText[] =
    R"({"layers": 2, "kv_heads": 2, "recent_tokens": 128, "samples": 9,
        "mass": [0.5, 0.1, 0.0, 0.75],
        "effect": [0.5, 0.1, 0.0, 0.25]})";

HeadProfile Profile() { return HeadProfile::Parse(kText).value(); }

std::string Refusal(const std::string& from, const std::string& to) {
  std::string text = kText;
  text.replace(text.find(from), from.size(), to);
  return std::string(HeadProfile::Parse(text).status().message());
}

TEST(HeadProfile, ReadsWhatItWrites) {
  const HeadProfile profile = Profile();
  EXPECT_EQ(profile.recent_tokens, 128);
  EXPECT_THAT(profile.mass, ElementsAre(0.5f, 0.1f, 0.0f, 0.75f));
  EXPECT_THAT(profile.effect, ElementsAre(0.5f, 0.1f, 0.0f, 0.25f));
  const HeadProfile again = HeadProfile::Parse(profile.ToJson()).value();
  EXPECT_EQ(again.samples, 9);
  EXPECT_EQ(again.mass, profile.mass);
  EXPECT_EQ(again.effect, profile.effect);
}

TEST(HeadProfile, IsMadeOfWhatWasSampled) {
  HeadMass mass = HeadMass::Create({.layers = 2, .kv_heads = 2}).value();
  HeadMass effect = mass;
  ASSERT_TRUE(mass.Sample({0.5f, 0.25f, 0.0f, 1.0f}).ok());
  ASSERT_TRUE(effect.Sample({0.125f, 0.0f, 0.0f, 0.5f}).ok());
  const HeadProfile profile = HeadProfile::Of(mass, effect, 2, 128);
  EXPECT_EQ(profile.kv_heads, 2);
  EXPECT_EQ(profile.samples, 1);
  EXPECT_THAT(profile.mass, ElementsAre(0.5f, 0.25f, 0.0f, 1.0f));
  EXPECT_THAT(profile.effect, ElementsAre(0.125f, 0.0f, 0.0f, 0.5f));
}

TEST(HeadProfile, RefusesWhatIsNotOne) {
  EXPECT_THAT(Refusal("\"layers\": 2", "\"layers\": 3"), HasSubstr("expected 6 numbers"));
  EXPECT_THAT(Refusal("\"layers\": 2", "\"layers\": 0"), HasSubstr("layers"));
  EXPECT_THAT(Refusal("\"kv_heads\": 2", "\"kv_heads\": 1000000"), HasSubstr("kv_heads"));
  EXPECT_THAT(Refusal("0.25", "1.25"), HasSubstr("got 1.25"));
  EXPECT_THAT(Refusal("0.25", "\"a\""), HasSubstr("from 0 to 1"));
  EXPECT_FALSE(HeadProfile::Parse("[]").ok());
}

TEST(HeadProfile, IsForOneShapeOfModel) {
  EXPECT_TRUE(Profile().CheckModel(2, 2).ok());
  EXPECT_THAT(std::string(Profile().CheckModel(2, 4).message()), HasSubstr("2 layers of 4"));
}

TEST(LossyHeads, AreThoseOfLeastEffect) {
  EXPECT_THAT(ChooseLossyHeads(Profile(), 0.5)->dropped, ElementsAre(0, 1, 1, 0));
  EXPECT_THAT(ChooseLossyHeads(Profile(), 0.7)->dropped, ElementsAre(0, 0, 1, 0));
  EXPECT_EQ(ChooseLossyHeads(Profile(), 0)->count(), 4);
  EXPECT_FALSE(ChooseLossyHeads(Profile(), 1)->any());
  EXPECT_FALSE(ChooseLossyHeads(Profile(), -0.1).ok());
  EXPECT_FALSE(ChooseLossyHeads(Profile(), 1.1).ok());
}

TEST(LossyHeads, FreeWholeBlocksOfFarKeys) {
  const LossyHeads heads = ChooseLossyHeads(Profile(), 0.5).value();
  EXPECT_EQ(heads.FreedBytes(100, 16, Bytes(10)), Bytes(0));
  // The last token is at 1,023; its window begins at 896: 832 far keys.
  EXPECT_EQ(heads.FreedBytes(1024, 16, Bytes(10)), Bytes(2 * (832 / 16) * 10));
  // Blocks 1 .. 7 of 100 tokens lie within keys 64 .. 895.
  EXPECT_EQ(heads.FreedBytes(1024, 100, Bytes(10)), Bytes(2 * 7 * 10));
  EXPECT_EQ(LossyHeads{}.FreedBytes(1024, 16, Bytes(10)), Bytes(0));
}

}  // namespace
}  // namespace palimpsest
