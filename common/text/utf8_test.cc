#include "common/text/utf8.h"

#include <random>
#include <vector>

#include "gtest/gtest.h"

namespace palimpsest {
namespace {

TEST(Utf8, EveryScalarValueIsOneCharacterAndNothingElseIs) {
  for (char32_t code_point = 0; code_point <= 0x110010; ++code_point) {
    std::string text;
    AppendUtf8(code_point, &text);
    const bool scalar = code_point <= 0x10FFFF && (code_point < 0xD800 || code_point > 0xDFFF);
    ASSERT_EQ(IsValidUtf8(text), scalar) << std::hex << uint32_t{code_point};
    if (!scalar) continue;
    const Utf8Step step = NextUtf8(text);
    ASSERT_EQ(step.length, text.size());
    ASSERT_EQ(step.code_point, code_point);
    for (size_t cut = 1; cut < text.size(); ++cut) {
      const Utf8Step part = NextUtf8(absl::string_view(text).substr(0, cut));
      ASSERT_EQ(part.kind, Utf8Step::Kind::kIncomplete);
      ASSERT_EQ(part.length, cut);
    }
  }
}

TEST(Utf8, OverlongAndStrayBytesAreInvalid) {
  for (const absl::string_view text :
       {"\x80", "\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xED\xA0\x80", "\xF0\x8F\xBF\xBF",
        "\xF4\x90\x80\x80", "\xF5\x80\x80\x80", "\xFF", "\xE2\x28\xA1"}) {
    EXPECT_EQ(ValidUtf8Prefix(text), 0);
    EXPECT_EQ(NextUtf8(text).kind, Utf8Step::Kind::kInvalid);
  }
}

TEST(Utf8, ErrorNamesSubjectAndOffset) {
  const absl::Status status = CheckUtf8("0123456789\xFFz", "prompt");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(status.message(),
            "prompt must be UTF-8, but byte 10 (0xff) does not begin a well-formed character");
}

// Table 3-8 of the Unicode Standard: how many U+FFFD each ill-formed sequence becomes.
TEST(Utf8Repair, MaximalSubpartsBecomeOneReplacementEach) {
  const auto repair = [](absl::string_view bytes) {
    std::string text;
    Utf8Repair repair;
    repair.Push(bytes, &text);
    repair.Finish(&text);
    return text;
  };
  EXPECT_EQ(repair("\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41"),
            "\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\uFFFD\x41");
  EXPECT_EQ(repair("\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41"), "\uFFFD\uFFFD\uFFFD\uFFFD\x41");
  EXPECT_EQ(repair("\xF0\x9F\x99"), "\uFFFD");
}

TEST(Utf8Repair, OutputDoesNotDependOnTheCuts) {
  std::mt19937 random(7);
  constexpr absl::string_view kPool[] = {"a",    "é",        "漢",   "🙂",
                                         "\x80", "\xF0\x9F", "\xE2", "\xFF"};
  for (int round = 0; round < 2000; ++round) {
    std::string bytes;
    for (int i = random() % 12; i > 0; --i)
      bytes += std::string(kPool[random() % std::size(kPool)]);
    std::string whole, pieces;
    Utf8Repair at_once;
    at_once.Push(bytes, &whole);
    at_once.Finish(&whole);
    Utf8Repair in_pieces;
    for (size_t pos = 0; pos < bytes.size();) {
      const size_t length = 1 + random() % 3;
      in_pieces.Push(absl::string_view(bytes).substr(pos, length), &pieces);
      ASSERT_TRUE(IsValidUtf8(pieces));
      ASSERT_LE(in_pieces.held(), 3);
      pos += length;
    }
    in_pieces.Finish(&pieces);
    ASSERT_EQ(whole, pieces);
  }
}

}  // namespace
}  // namespace palimpsest
