#include "worker/model/safetensors.h"

#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/model/float16.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

std::string Refusal(absl::string_view header, int64_t data_bytes) {
  auto tensors = ParseSafetensorsHeader(header, Bytes(data_bytes));
  if (tensors.ok()) return "accepted";
  EXPECT_EQ(tensors.status().code(), absl::StatusCode::kInvalidArgument);
  return std::string(tensors.status().message());
}

std::string Entry(absl::string_view dtype, absl::string_view shape, absl::string_view offsets) {
  return absl::StrCat("{\"dtype\":\"", dtype, "\",\"shape\":", shape, ",\"data_offsets\":", offsets,
                      "}");
}

std::string Length(uint64_t length) {
  std::string bytes(sizeof(length), '\0');
  std::memcpy(bytes.data(), &length, sizeof(length));
  return bytes;
}

std::string FileBytes(const std::string& header, const std::string& data) {
  return Length(header.size()) + header + data;
}

template <typename T>
std::string BytesOf(const std::vector<T>& values) {
  return std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T));
}

class CheckpointTest : public ::testing::Test {
 protected:
  void SetUp() override {
    folder_ = ::testing::TempDir() + "/safetensors_XXXXXX";
    ASSERT_NE(mkdtemp(folder_.data()), nullptr);
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  void Write(const std::string& name, const std::string& bytes) {
    std::ofstream(folder_ + "/" + name, std::ios::binary) << bytes;
  }
  std::string OpenError() {
    auto checkpoint = Checkpoint::Open(folder_);
    return checkpoint.ok() ? "accepted" : checkpoint.status().ToString();
  }

  std::string folder_;
};

TEST(ParseSafetensorsHeader, GivesTypesShapesAndPlaces) {
  auto tensors = ParseSafetensorsHeader(
      absl::StrCat(R"({"__metadata__":{"format":"pt"},"b":)", Entry("F32", "[2,3]", "[4,28]"),
                   ",\"a\":", Entry("BF16", "[2]", "[0,4]"),
                   ",\"scalar\":", Entry("I64", "[]", "[28,36]"),
                   ",\"empty\":", Entry("F16", "[0,7]", "[28,28]"), "}   "),
      Bytes(36));
  ASSERT_TRUE(tensors.ok()) << tensors.status();
  ASSERT_EQ(tensors->size(), 4);
  EXPECT_EQ(tensors->at("b").dtype, "F32");
  EXPECT_THAT(tensors->at("b").shape, ::testing::ElementsAre(2, 3));
  EXPECT_EQ(tensors->at("b").elements, 6);
  EXPECT_EQ(tensors->at("b").offset, Bytes(4));
  EXPECT_EQ(tensors->at("b").size, Bytes(24));
  EXPECT_EQ(tensors->at("scalar").elements, 1);
  EXPECT_EQ(tensors->at("empty").elements, 0);
}

TEST(ParseSafetensorsHeader, RefusesWhatIsNoHeader) {
  for (const char* text : {"", "[]", "null", "{\"a\":1}", "{", "{\"a\":{}}",
                           "{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}"}) {
    EXPECT_NE(Refusal(text, 4), "accepted") << text;
  }
  EXPECT_THAT(Refusal(R"({"__metadata__":{"a":1}})", 0), HasSubstr("__metadata__"));
  EXPECT_THAT(
      Refusal("{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4],\"x\":1}}", 4),
      HasSubstr("exactly the keys"));
  EXPECT_THAT(Refusal("{\"a\":[[[[1]]]]}", 0), HasSubstr("nested deeper"));
  EXPECT_THAT(Refusal(std::string((16 << 20) + 1, ' '), 0), HasSubstr("expected at most"));
}

TEST(ParseSafetensorsHeader, RefusesTensorsWhoseFieldsDisagree) {
  struct {
    std::string entry;
    const char* problem;
  } cases[] = {
      {Entry("F33", "[1]", "[0,8]"), "unknown dtype"},
      {Entry("F32", "[1]", "[0,8]"), "need 4"},
      {Entry("F32", "[3]", "[0,8]"), "need 12"},
      {Entry("F32", "[2]", "[8,0]"), "reach beyond"},
      {Entry("F32", "[2]", "[0,9]"), "reach beyond"},
      {Entry("F32", "[2]", "[-8,0]"), "expected [begin, end]"},
      {Entry("F32", "[2]", "[0,8,9]"), "expected [begin, end]"},
      {Entry("F32", "[2]", "[0,1e1]"), "expected [begin, end]"},
      {Entry("F32", "[2]", "[0,18446744073709551615]"), "expected [begin, end]"},
      {Entry("F32", "[-2]", "[0,8]"), "whole numbers"},
      {Entry("F32", "[2.0]", "[0,8]"), "whole numbers"},
      {Entry("F32", "2", "[0,8]"), "expected a list"},
      {Entry("F32", "[1,1,1,1,1,1,1,1,2]", "[0,8]"), "at most 8 sizes"},
      {Entry("F32", "[4294967296,4294967296]", "[0,8]"), "overflows"},
      {Entry("F32", "[4611686018427387906]", "[0,8]"), "need"},
      {"{\"dtype\":7,\"shape\":[2],\"data_offsets\":[0,8]}", "unknown dtype"},
  };
  for (const auto& c : cases) {
    EXPECT_THAT(Refusal("{\"t\":" + c.entry + "}", 8), HasSubstr(c.problem)) << c.entry;
  }
}

TEST(ParseSafetensorsHeader, RefusesOverlapsHolesAndRepeats) {
  const auto two = [](absl::string_view a, absl::string_view b) {
    return absl::StrCat("{\"a\":", Entry("U8", "[4]", a), ",\"b\":", Entry("U8", "[4]", b), "}");
  };
  EXPECT_EQ(Refusal(two("[4,8]", "[0,4]"), 8), "accepted");
  EXPECT_THAT(Refusal(two("[0,4]", "[3,7]"), 7), HasSubstr("overlaps"));
  EXPECT_THAT(Refusal(two("[0,4]", "[0,4]"), 4), HasSubstr("overlaps"));
  EXPECT_THAT(Refusal(two("[0,4]", "[5,9]"), 9), HasSubstr("hole"));
  EXPECT_THAT(Refusal(two("[1,5]", "[5,9]"), 9), HasSubstr("hole"));
  EXPECT_THAT(Refusal(two("[0,4]", "[4,8]"), 9), HasSubstr("8 of 9"));
  const std::string entry = Entry("U8", "[4]", "[0,4]");
  EXPECT_THAT(Refusal(absl::StrCat("{\"a\":", entry, ",\"a\":", entry, "}"), 4),
              HasSubstr("appears twice"));
}

TEST(ParseSafetensorsIndex, RefusesNamesThatLeaveTheFolder) {
  EXPECT_TRUE(ParseSafetensorsIndex(R"({"weight_map":{"a":"m-1.safetensors"}})").ok());
  for (const char* file :
       {"../m.safetensors", "/etc/m.safetensors", "a/m.safetensors", ".safetensors", "",
        ".hidden.safetensors", "m.bin", "m.safetensors\\u0000", "m\\n.safetensors", ".."}) {
    const auto index = ParseSafetensorsIndex(absl::StrCat(R"({"weight_map":{"a":")", file, "\"}}"));
    EXPECT_THAT(std::string(index.status().message()), HasSubstr("weight_map")) << file;
  }
  EXPECT_FALSE(ParseSafetensorsIndex(R"({"weight_map":{"a":3}})").ok());
  EXPECT_FALSE(ParseSafetensorsIndex(R"({"weight_map":[]})").ok());
  EXPECT_FALSE(ParseSafetensorsIndex("{}").ok());
}

TEST_F(CheckpointTest, ConvertsEveryFloatType) {
  const std::vector<float> wide = {1.0f, -2.5f, 1.00390625f};
  const std::vector<uint16_t> half = {0x3c00, 0xc100, 0x7c00};  // 1, -2.5, infinity
  const std::vector<uint16_t> brain = {0x3f80, 0xc020, 0x0001};
  Write("model.safetensors", FileBytes(absl::StrCat("{\"f\":", Entry("F32", "[3]", "[0,12]"),
                                                    ",\"h\":", Entry("F16", "[3]", "[12,18]"),
                                                    ",\"b\":", Entry("BF16", "[3]", "[18,24]"),
                                                    ",\"i\":", Entry("I16", "[1]", "[24,26]"), "}"),
                                       BytesOf(wide) + BytesOf(half) + BytesOf(brain) + "xx"));
  auto checkpoint = Checkpoint::Open(folder_);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto bf16 = [&](const char* name) {
    std::vector<uint16_t> out(3);
    EXPECT_TRUE(checkpoint->ReadBf16(checkpoint->tensors().at(name), 0, absl::MakeSpan(out)).ok());
    return out;
  };
  EXPECT_THAT(bf16("f"), ::testing::ElementsAre(0x3f80, 0xc020, 0x3f80));
  EXPECT_THAT(bf16("h"), ::testing::ElementsAre(0x3f80, 0xc020, 0x7f80));
  EXPECT_THAT(bf16("b"), ::testing::ElementsAreArray(brain));
  std::vector<float> tail(2);
  EXPECT_TRUE(checkpoint->ReadFloats(checkpoint->tensors().at("f"), 1, absl::MakeSpan(tail)).ok());
  EXPECT_THAT(tail, ::testing::ElementsAre(-2.5f, 1.00390625f));
  EXPECT_TRUE(checkpoint->ReadFloats(checkpoint->tensors().at("h"), 0, absl::MakeSpan(tail)).ok());
  EXPECT_THAT(tail, ::testing::ElementsAre(1.0f, -2.5f));
  EXPECT_THAT(
      checkpoint->ReadFloats(checkpoint->tensors().at("i"), 0, absl::MakeSpan(tail).first(1))
          .ToString(),
      HasSubstr("got I16"));
}

TEST_F(CheckpointTest, RefusesTruncatedAndLyingFiles) {
  const std::string header = absl::StrCat("{\"a\":", Entry("U8", "[4]", "[0,4]"), "}");
  const std::string whole = FileBytes(header, "data");
  Write("model.safetensors", whole);
  EXPECT_EQ(OpenError(), "accepted");
  for (size_t size = 0; size < whole.size(); ++size) {
    Write("model.safetensors", whole.substr(0, size));
    EXPECT_THAT(OpenError(), HasSubstr("model.safetensors: ")) << size;
  }
  Write("model.safetensors", whole + "x");
  EXPECT_THAT(OpenError(), HasSubstr("4 of 5"));
  for (const uint64_t length : {uint64_t{1} << 63, ~uint64_t{0}, uint64_t{100}}) {
    Write("model.safetensors", Length(length) + header + "data");
    EXPECT_THAT(OpenError(), HasSubstr("expected at most")) << length;
  }
}

TEST_F(CheckpointTest, ReportsAFileThatShrinksWhileOpen) {
  Write("model.safetensors",
        FileBytes(absl::StrCat("{\"a\":", Entry("BF16", "[2]", "[0,4]"), "}"), "data"));
  auto checkpoint = Checkpoint::Open(folder_);
  ASSERT_TRUE(checkpoint.ok());
  std::filesystem::resize_file(folder_ + "/model.safetensors", 20);
  std::vector<uint16_t> out(2);
  EXPECT_EQ(checkpoint->ReadBf16(checkpoint->tensors().at("a"), 0, absl::MakeSpan(out)).code(),
            absl::StatusCode::kDataLoss);
}

TEST_F(CheckpointTest, ReadsShardsOfTheIndex) {
  const auto shard = [](const char* name, const std::string& data) {
    return FileBytes(absl::StrCat("{\"", name, "\":", Entry("BF16", "[1]", "[0,2]"), "}"), data);
  };
  Write("m-1.safetensors", shard("a", BytesOf<uint16_t>({0x3f80})));
  Write("m-2.safetensors", shard("b", BytesOf<uint16_t>({0x4000})));
  const auto index = [&](const std::string& map) {
    Write("model.safetensors.index.json",
          "{\"metadata\":{\"total_size\":4},\"weight_map\":{" + map + "}}");
  };
  index(R"("a":"m-1.safetensors","b":"m-2.safetensors")");
  auto checkpoint = Checkpoint::Open(folder_);
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  std::vector<float> out(1);
  ASSERT_TRUE(checkpoint->ReadFloats(checkpoint->tensors().at("b"), 0, absl::MakeSpan(out)).ok());
  EXPECT_EQ(out[0], 2.0f);

  index(R"("a":"m-1.safetensors","b":"m-2.safetensors","c":"m-2.safetensors")");
  EXPECT_THAT(OpenError(), HasSubstr("tensor \"c\": the index lists it"));
  index(R"("a":"m-1.safetensors","c":"m-2.safetensors")");
  EXPECT_THAT(OpenError(), HasSubstr("tensor \"b\": the index does not list it"));
  index(R"("a":"m-2.safetensors","b":"m-1.safetensors")");
  EXPECT_THAT(OpenError(), HasSubstr("does not list it"));
  index(R"("a":"m-3.safetensors")");
  EXPECT_THAT(OpenError(), HasSubstr("m-3.safetensors"));
}

TEST_F(CheckpointTest, RefusesFoldersWithoutWeights) {
  EXPECT_EQ(Checkpoint::Open(folder_).status().code(), absl::StatusCode::kNotFound);
  std::filesystem::create_directory(folder_ + "/model.safetensors");
  EXPECT_THAT(OpenError(), HasSubstr("regular file"));
}

TEST(Bf16FromFloat, RoundsToNearestEven) {
  const auto bf16 = [](uint32_t bits) { return Bf16FromFloat(std::bit_cast<float>(bits)); };
  EXPECT_EQ(bf16(0x3f800000), 0x3f80);
  EXPECT_EQ(bf16(0x3f807fff), 0x3f80);
  EXPECT_EQ(bf16(0x3f808000), 0x3f80);
  EXPECT_EQ(bf16(0x3f808001), 0x3f81);
  EXPECT_EQ(bf16(0x3f818000), 0x3f82);
  EXPECT_EQ(bf16(0x80000000), 0x8000);
  EXPECT_EQ(bf16(0x7f7fffff), 0x7f80);
  EXPECT_EQ(bf16(0xff800000), 0xff80);
  for (const uint32_t nan : {0x7f800001u, 0xff800001u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_TRUE(std::isnan(FloatFromBf16(bf16(nan)))) << nan;
  }
}

TEST(Bf16FromFloat, InvertsFloatFromBf16) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const float value = FloatFromBf16(static_cast<uint16_t>(bits));
    if (std::isnan(value)) continue;
    EXPECT_EQ(Bf16FromFloat(value), bits);
  }
}

TEST(FloatFromF16, FollowsTheDefinition) {
  for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
    const int exponent = static_cast<int>(bits >> 10 & 0x1f);
    const int fraction = static_cast<int>(bits & 0x3ff);
    const float got = FloatFromF16(static_cast<uint16_t>(bits));
    EXPECT_EQ(std::signbit(got), bits >= 0x8000) << bits;
    if (exponent == 31) {
      EXPECT_TRUE(fraction == 0 ? std::isinf(got) : std::isnan(got)) << bits;
    } else {
      const float expected = exponent == 0
                                 ? std::ldexp(static_cast<float>(fraction), -24)
                                 : std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
      EXPECT_EQ(std::abs(got), expected) << bits;
    }
  }
}

}  // namespace
}  // namespace palimpsest
