#include "common/text/tokenizer.h"

#include <thread>

#include "common/text/byte_alphabet.h"
#include "common/text/detokenizer.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"

namespace palimpsest {
namespace {

using nlohmann::json;
using testing::ElementsAre;
using testing::HasSubstr;
using Ids = std::vector<TokenId>;

// Every byte is token of its own value; 256 "th", 257 "the", 258 <|end|> (special), 259 <tool>.
json SmallFile() {
  json vocab = json::object();
  for (int byte = 0; byte < 256; ++byte) vocab[AlphabetOfBytes(std::string(1, byte))] = byte;
  vocab["th"] = 256;
  vocab["the"] = 257;
  return {
      {"added_tokens",
       {{{"id", 258}, {"content", "<|end|>"}, {"special", true}},
        {{"id", 259}, {"content", "<tool>"}, {"special", false}}}},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", true}}},
      {"post_processor",
       {{"type", "TemplateProcessing"},
        {"single", {{{"Sequence", {{"id", "A"}}}}, {{"SpecialToken", {{"id", "<|end|>"}}}}}},
        {"special_tokens", {{"<|end|>", {{"ids", {258}}}}}}}},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocab}, {"merges", {"t h", {"th", "e"}}}}},
  };
}

std::unique_ptr<Tokenizer> Make(const json& file) {
  auto tokenizer = Tokenizer::Parse(file.dump());
  EXPECT_TRUE(tokenizer.ok()) << tokenizer.status();
  return *std::move(tokenizer);
}

Ids Encode(const std::unique_ptr<Tokenizer>& tokenizer, absl::string_view text,
           const EncodeOptions& options = {}) {
  const auto ids = tokenizer->Encode(text, options);
  EXPECT_TRUE(ids.ok()) << ids.status();
  return ids.ok() ? *ids : Ids();
}

TEST(Tokenizer, MergesSpecialTokensAndTemplate) {
  const auto tokenizer = Make(SmallFile());
  EXPECT_THAT(Encode(tokenizer, "the<|end|><tool>"), ElementsAre(257, 258, 259));
  EXPECT_THAT(Encode(tokenizer, "th", {.add_special = true}), ElementsAre(256, 258));
  EXPECT_EQ(tokenizer->vocab_size(), 260);
  EXPECT_EQ(tokenizer->Find("<tool>"), 259);
  EXPECT_EQ(tokenizer->Find("<none>"), std::nullopt);
}

TEST(Tokenizer, SpecialTokensStayTextWhereNotParsed) {
  const auto tokenizer = Make(SmallFile());
  EXPECT_THAT(Encode(tokenizer, "<|end|><tool>", {.parse_special = false}),
              ElementsAre('<', '|', 'e', 'n', 'd', '|', '>', 259));
}

TEST(Tokenizer, SpecialTokensStayTextInLiteralRanges) {
  const auto tokenizer = Make(SmallFile());
  const std::string text = "<|end|>x<|end|>y<|end|>";
  const auto encode = [&](std::vector<TextRange> literal) {
    std::string shown;
    for (const TokenId id : Encode(tokenizer, text, {.literal = std::move(literal)}))
      shown += id == 258 ? "#" : std::string(tokenizer->TokenBytes(id));
    return shown;
  };
  EXPECT_EQ(encode({}), "#x#y#");
  EXPECT_EQ(encode({{7, 16}}), "#x<|end|>y#");
  EXPECT_EQ(encode({{7, 8}, {15, 16}}), "#x#y#");
  EXPECT_EQ(encode({{0, 1}, {14, 15}}), "<|end|>x<|end|>y#");
  EXPECT_EQ(encode({{22, 23}}), "#x#y<|end|>");
}

TEST(Tokenizer, BytesOfEachTokenAndOfNone) {
  const auto tokenizer = Make(SmallFile());
  EXPECT_EQ(tokenizer->TokenBytes(0xFF), "\xFF");
  EXPECT_EQ(tokenizer->TokenBytes(257), "the");
  EXPECT_EQ(tokenizer->TokenBytes(258), "<|end|>");
  EXPECT_EQ(tokenizer->OutputBytes(258), "");
  EXPECT_EQ(tokenizer->OutputBytes(259), "<tool>");
  EXPECT_EQ(tokenizer->TokenBytes(260), "");
  EXPECT_EQ(tokenizer->TokenBytes(-1), "");
  EXPECT_EQ(tokenizer->Decode({257, 258, 0xC3, 1 << 30}), "the\uFFFD");
}

TEST(Tokenizer, TextThatIsNotUtf8IsRefused) {
  const auto ids = Make(SmallFile())->Encode("ab\xC3(");
  EXPECT_EQ(ids.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(ids.status().message()), HasSubstr("byte 2"));
}

// Decoding is the inverse of encoding where every byte has a token.
TEST(Tokenizer, EveryTextComesBack) {
  const auto tokenizer = Make(SmallFile());
  std::string text = "the thé <tool> \n\t 漢字 🙂";
  text.push_back('\0');
  EXPECT_EQ(tokenizer->Decode(Encode(tokenizer, text)), text);
}

TEST(Tokenizer, ThreadsMayShareIt) {
  const auto tokenizer = Make(SmallFile());
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int round = 0; round < 200; ++round) {
        EXPECT_THAT(Encode(tokenizer, "the<|end|>"), ElementsAre(257, 258));
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
}

// Each of these would take minutes or run out of stack if some step were quadratic or recursive.
TEST(Tokenizer, LongMonotonousTextsTakeNearLinearTime) {
  const auto tokenizer = Make(SmallFile());
  for (const absl::string_view unit : {"a", " ", "\n", "1", "th", "é", "<|", " a", "'"}) {
    std::string text;
    while (text.size() < 1 << 20) text += std::string(unit);
    ASSERT_EQ(tokenizer->Decode(Encode(tokenizer, text)), text);
  }
}

struct BadFile {
  const char* name;
  const char* patch;  // JSON merge patch
  const char* error;
};

class HostileFile : public testing::TestWithParam<BadFile> {};

TEST_P(HostileFile, IsRefusedWithAClearError) {
  json file = SmallFile();
  file.merge_patch(json::parse(GetParam().patch));
  const auto tokenizer = Tokenizer::Parse(file.dump());
  ASSERT_FALSE(tokenizer.ok());
  EXPECT_THAT(std::string(tokenizer.status().message()), HasSubstr(GetParam().error));
}

INSTANTIATE_TEST_SUITE_P(
    All, HostileFile,
    testing::Values(
        BadFile{"NoModel", R"({"model": null})", "lacks \"model\""},
        BadFile{"NoVocab", R"({"model": {"vocab": null}})", "lacks \"vocab\""},
        BadFile{"VocabList", R"({"model": {"vocab": [1]}})", "\"vocab\" of the model must be"},
        BadFile{"NoMerges", R"({"model": {"merges": null}})", "lacks \"merges\""},
        BadFile{"MergesNumber", R"({"model": {"merges": 3}})", "\"merges\" of the model must be"},
        BadFile{"OddMerge", R"({"model": {"merges": ["t h e"]}})", "merge 0 must be"},
        BadFile{"UnknownMerge", R"({"model": {"merges": ["t zz"]}})", "not both in the vocab"},
        BadFile{"MergeToNothing", R"({"model": {"merges": ["x y"]}})", "no token for the result"},
        BadFile{"DuplicateId", R"({"model": {"vocab": {"xy": 5}}})", "id 5 is used twice"},
        BadFile{"NegativeId", R"({"model": {"vocab": {"xy": -1}}})", "integer in [0, 1048576)"},
        BadFile{"HugeId", R"({"model": {"vocab": {"xy": 99999999999}}})", "it is 99999999999"},
        BadFile{"TextId", R"({"model": {"vocab": {"xy": "5"}}})", "integer in [0, 1048576)"},
        BadFile{"EmptyName", R"({"model": {"vocab": {"": 300}}})", "empty name"},
        BadFile{"OtherModel", R"({"model": {"type": "Unigram"}})", "\"Unigram\" is not supported"},
        BadFile{"ByteFallback", R"({"model": {"byte_fallback": true}})", "byte_fallback"},
        BadFile{"Dropout", R"({"model": {"dropout": 0.1}})", "dropout"},
        BadFile{"Suffix", R"({"model": {"end_of_word_suffix": "</w>"}})", "end_of_word_suffix"},
        BadFile{"UnkNotThere", R"({"model": {"unk_token": "<unk>"}})", "\"<unk>\" is not in"},
        BadFile{"NoPreTokenizer", R"({"pre_tokenizer": null})", "lacks \"pre_tokenizer\""},
        BadFile{"OtherPreTokenizer", R"({"pre_tokenizer": {"type": "Metaspace"}})",
                "\"Metaspace\" is not supported"},
        BadFile{"NoByteLevel", R"({"pre_tokenizer": {"type": "Digits"}})", "no ByteLevel step"},
        BadFile{"BadPattern",
                R"({"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "("},
                    "behavior": "Isolated"}})",
                "is wrong at byte 1"},
        BadFile{"BadBehavior",
                R"({"pre_tokenizer": {"type": "Split", "pattern": {"String": "a"},
                    "behavior": "MergedWithNext"}})",
                "\"MergedWithNext\" of pre_tokenizer Split is not supported"},
        BadFile{"OtherNormalizer", R"({"normalizer": {"type": "NFKC"}})",
                "\"NFKC\" is not supported"},
        BadFile{"OtherDecoder", R"({"decoder": {"type": "WordPiece"}})", "not supported"},
        BadFile{"NoDecoder", R"({"decoder": null})", "lacks \"decoder\""},
        BadFile{"OtherPostProcessor", R"({"post_processor": {"type": "BertProcessing"}})",
                "\"BertProcessing\" is not supported"},
        BadFile{"TemplateIdOutOfRange",
                R"({"post_processor": {"special_tokens": {"<|end|>": {"ids": [260]}}}})",
                "integer in [0, 260)"},
        BadFile{"TemplateWithoutText", R"({"post_processor": {"single": []}})",
                "must name one Sequence"},
        BadFile{"AddedTokensObject", R"({"added_tokens": {}})", "\"added_tokens\" must be a list"},
        BadFile{"AddedTokenTwice",
                R"({"added_tokens": [{"id": 300, "content": "x "}, {"id": 300, "content": "y "}]})",
                "appears twice"},
        BadFile{"AddedTokenTakesId", R"({"added_tokens": [{"id": 7, "content": "<x>"}]})",
                "id 7 is used twice"},
        BadFile{"AddedTokenContradicts", R"({"added_tokens": [{"id": 300, "content": "the"}]})",
                "but the vocabulary says 257"},
        BadFile{"AddedTokenEmpty", R"({"added_tokens": [{"id": 300, "content": ""}]})",
                "has 0 bytes"},
        BadFile{"AddedTokenFlag",
                R"({"added_tokens": [{"id": 300, "content": "x", "special": 1}]})",
                "must be true or false"}),
    [](const auto& info) { return info.param.name; });

TEST(Tokenizer, BrokenJsonIsRefused) {
  for (const absl::string_view text : {"", "{", "[]", "null", "{\"model\": \"\xFF\"}"}) {
    EXPECT_EQ(Tokenizer::Parse(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_FALSE(Tokenizer::Parse(std::string(100'000, '[')).ok());
}

TEST(Tokenizer, MissingFolderIsNotFoundWithPath) {
  const auto tokenizer = Tokenizer::Load("/nonexistent");
  EXPECT_EQ(tokenizer.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(tokenizer.status().message()), HasSubstr("/nonexistent/tokenizer.json"));
}

TEST(Detokenizer, UnfinishedCharactersWait) {
  const auto tokenizer = Make(SmallFile());
  Detokenizer stream(tokenizer.get());
  EXPECT_EQ(stream.Push('a'), "a");
  EXPECT_EQ(stream.Push(0xF0), "");
  EXPECT_EQ(stream.Push(0x9F), "");
  EXPECT_EQ(stream.Push(258), "");
  EXPECT_EQ(stream.Push(0x99), "");
  EXPECT_EQ(stream.Push(0x82), "🙂");
  EXPECT_EQ(stream.Push(0xE2), "");
  EXPECT_EQ(stream.Push('b'), "\uFFFDb");
  EXPECT_EQ(stream.Push(0xE2), "");
  EXPECT_EQ(stream.Finish(), "\uFFFD");
}

TEST(Detokenizer, StopStringsAreHeldBackAndCutOff) {
  const auto tokenizer = Make(SmallFile());
  Detokenizer stream(tokenizer.get(), {"the end"});
  std::string text;
  for (const TokenId id : Encode(tokenizer, "so the then, the ending")) text += stream.Push(id);
  EXPECT_EQ(text, "so the then, ");
  ASSERT_TRUE(stream.stop().has_value());
  EXPECT_EQ(stream.stop()->start, 13);
  EXPECT_EQ(stream.output_bytes(), 23);
  EXPECT_EQ(stream.Finish(), "");
}

TEST(Detokenizer, HeldBackStartOfAStopStringComesAtTheEnd) {
  const auto tokenizer = Make(SmallFile());
  Detokenizer stream(tokenizer.get(), {"the end"});
  EXPECT_EQ(stream.Push(257), "");
  EXPECT_EQ(stream.Finish(), "the");
}

}  // namespace
}  // namespace palimpsest
