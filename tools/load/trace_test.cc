#include "tools/load/trace.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include "absl/strings/str_cat.h"
#include "common/file.h"

namespace palimpsest::load {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string Gzip(const std::string& text) {
  z_stream stream = {};
  EXPECT_EQ(deflateInit2(&stream, 6, Z_DEFLATED, 15 + 16, 8, Z_DEFAULT_STRATEGY), Z_OK);
  std::string packed(deflateBound(&stream, text.size()), '\0');
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(text.data()));
  stream.avail_in = static_cast<uInt>(text.size());
  stream.next_out = reinterpret_cast<Bytef*>(packed.data());
  stream.avail_out = static_cast<uInt>(packed.size());
  EXPECT_EQ(deflate(&stream, Z_FINISH), Z_STREAM_END);
  packed.resize(stream.total_out);
  deflateEnd(&stream);
  return packed;
}

std::string Write(const std::string& content) {
  std::string path = ::testing::TempDir() + "/trace.XXXXXX";
  close(mkstemp(path.data()));
  EXPECT_TRUE(WriteFileAtomically(path, content).ok());
  return path;
}

TEST(ReadTraceFile, ReadsPlainAndPackedFiles) {
  const std::string text(3'000'000, 'x');
  EXPECT_EQ(*ReadTraceFile(Write(text)), text);
  EXPECT_EQ(*ReadTraceFile(Write(Gzip(text))), text);
  EXPECT_EQ(*ReadTraceFile(Write(Gzip(""))), "");
}

TEST(ReadTraceFile, IsBoundedWhateverTheArchiveUnpacksTo) {
  const std::string packed = Gzip(std::string(5'000'000, 'x'));
  EXPECT_LT(packed.size(), 10'000u);
  EXPECT_EQ(ReadTraceFile(Write(packed), MiB(2)).status().code(), absl::StatusCode::kOutOfRange);
}

TEST(ReadTraceFile, NoticesDamage) {
  const std::string packed = Gzip("TIMESTAMP\nsome text that is long enough to be worth packing");
  for (size_t length = 2; length < packed.size(); ++length) {
    EXPECT_FALSE(ReadTraceFile(Write(packed.substr(0, length))).ok()) << length;
  }
  std::string changed = packed;
  changed[packed.size() - 6] ^= 1;  // in the checksum
  EXPECT_EQ(ReadTraceFile(Write(changed)).status().code(), absl::StatusCode::kDataLoss);
}

TEST(ReadTraceFile, ErrorsNameTheFile) {
  EXPECT_THAT(ReadTraceFile("/nowhere/trace.csv").status().message(),
              HasSubstr("/nowhere/trace.csv"));
}

TEST(ParseArrivals, CountsFromTheFirst) {
  const auto arrivals = ParseArrivals(
      "X,TIMESTAMP\r\n1,2023-11-16 23:59:59.9000000\r\n2,2023-11-17 00:00:01\r\n"
      "3,2023-11-16 23:59:59.9500000\n");
  ASSERT_TRUE(arrivals.ok()) << arrivals.status();
  EXPECT_THAT(*arrivals,
              ElementsAre(absl::ZeroDuration(), absl::Milliseconds(50), absl::Milliseconds(1100)));
}

TEST(ParseArrivals, RefusesWhatIsNoTrace) {
  const auto refusal = [](absl::string_view csv) {
    const auto arrivals = ParseArrivals(csv);
    EXPECT_EQ(arrivals.status().code(), absl::StatusCode::kInvalidArgument) << csv;
    return std::string(arrivals.status().message());
  };
  EXPECT_THAT(refusal(""), HasSubstr("line 1: expected a column TIMESTAMP"));
  EXPECT_THAT(refusal("TIMESTAMP\n2023-11-16 18:17:03\nnoon\n"), HasSubstr("line 3"));
  EXPECT_THAT(refusal("A,TIMESTAMP\n2023-11-16 18:17:03\n"), HasSubstr("line 2"));
  EXPECT_THAT(refusal("TIMESTAMP\ninfinite-future\ninfinite-past\n"), HasSubstr("line 2"));
  EXPECT_THAT(refusal("TIMESTAMP\n2023-11-16 18:17:03\n"), HasSubstr("two arrivals"));
  EXPECT_THAT(refusal("TIMESTAMP\n2023-11-16 18:17:03\n2023-11-16 18:17:03\n"),
              HasSubstr("different times"));
  EXPECT_LT(refusal(absl::StrCat("TIMESTAMP\n", std::string(100'000, 'x'))).size(), 200u);
}

TEST(ParseTimedRequests, ReadsLengthsInOrderOfArrival) {
  const auto requests = ParseTimedRequests(
      "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:01,30,4\n"
      "2023-11-16 18:00:00.5,10,2147483647\r\n");
  ASSERT_TRUE(requests.ok()) << requests.status();
  EXPECT_THAT(*requests, ElementsAre(TimedRequest{absl::ZeroDuration(), 10, 2147483647},
                                     TimedRequest{absl::Milliseconds(500), 30, 4}));
}

TEST(ParseTimedRequests, RefusesWhatIsNoTrace) {
  const auto refusal = [](absl::string_view rows) {
    const auto requests =
        ParseTimedRequests(absl::StrCat("TIMESTAMP,ContextTokens,GeneratedTokens\n", rows));
    EXPECT_EQ(requests.status().code(), absl::StatusCode::kInvalidArgument) << rows;
    return std::string(requests.status().message());
  };
  EXPECT_THAT(refusal(""), HasSubstr("at least one request"));
  for (const char* row : {"2023-11-16 18:00:01,30", "2023-11-16 18:00:01,30,",
                          "2023-11-16 18:00:01,30,-1", "2023-11-16 18:00:01,2147483648,1"}) {
    EXPECT_THAT(refusal(row), HasSubstr("line 2: expected numbers")) << row;
  }
  EXPECT_THAT(ParseTimedRequests("TIMESTAMP,ContextTokens\n").status().message(),
              HasSubstr("line 1: expected columns"));
}

TEST(ParseLengths, CountsAndCutsToTheRules) {
  const auto lengths = ParseLengths(
      R"([{"input": "12345678", "output_length": 5, "more": 1},
          {"input": "", "output_length": 1000}, {"input": "123456789012345678901234",
           "output_length": 18446744073709551615}])",
      {.characters_per_token = 4, .least_prompt = 1, .most_prompt = 5, .most_output = 10});
  ASSERT_TRUE(lengths.ok()) << lengths.status();
  EXPECT_THAT(*lengths,
              ElementsAre(RequestLengths{2, 5}, RequestLengths{1, 10}, RequestLengths{5, 10}));
}

TEST(ParseLengths, RefusesWhatIsNoListOfRequests) {
  for (const char* text :
       {"", "[]", "{}", "[1]", "[[]]", R"([{"input": "a"}])",
        R"([{"input": 1, "output_length": 1}])", R"([{"input": "a", "output_length": 0}])",
        R"([{"input": "a", "output_length": -1}])", R"([{"input": "a", "output_length": 1.5}])",
        "[[[[[[[[[[[[]]]]]]]]]]]]"}) {
    EXPECT_EQ(ParseLengths(text, {}).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
}

TEST(ParseConversations, FindsTurnsByWhatTheyBeginWith) {
  // Two conversations whose turns alternate, and a text that begins one that another goes on with.
  const auto conversations = ParseConversations(
      R"([{"input": "aaaa", "output_length": 2}, {"input": "bbbbbb", "output_length": 9},
          {"input": "aaaaAAxx", "output_length": 1}, {"input": "bbbbbbB", "output_length": 1},
          {"input": "aaaaZZZZZ", "output_length": 3}, {"input": "aaaaAAxxXyyy", "output_length": 4}])",
      {.characters_per_token = 1, .least_prompt = 1, .most_prompt = 100, .most_output = 5});
  ASSERT_TRUE(conversations.ok()) << conversations.status();
  EXPECT_THAT(*conversations, ElementsAre(Conversation{{4, 2}, {2, 1}, {3, 4}},
                                          Conversation{{6, 5}, {1, 1}}, Conversation{{9, 3}}));
}

TEST(ParseConversations, EndsThemBeforeTheyAreTooLong) {
  const auto conversations = ParseConversations(
      R"([{"input": "aaaa", "output_length": 2}, {"input": "aaaaAAxx", "output_length": 1},
          {"input": "bbbbbbbbbbbb", "output_length": 1}])",
      {.characters_per_token = 1, .least_prompt = 1, .most_prompt = 7, .most_output = 5});
  ASSERT_TRUE(conversations.ok()) << conversations.status();
  EXPECT_THAT(*conversations, ElementsAre(Conversation{{4, 2}}, Conversation{{7, 1}}));
}

TEST(Traces, TheSmallOnesOfTheTestsAreValid) {
  const auto csv = ReadTraceFile("tools/load/testdata/arrivals.csv");
  ASSERT_TRUE(csv.ok()) << csv.status();
  EXPECT_EQ(ParseArrivals(*csv)->size(), 160u);
  const auto json = ReadTraceFile("tools/load/testdata/lengths.json");
  ASSERT_TRUE(json.ok()) << json.status();
  EXPECT_EQ(ParseLengths(*json, {})->size(), 32u);
  const auto turns = ReadTraceFile("tools/load/testdata/conversations.json");
  ASSERT_TRUE(turns.ok()) << turns.status();
  const auto conversations = ParseConversations(*turns, {.characters_per_token = 1});
  ASSERT_TRUE(conversations.ok()) << conversations.status();
  EXPECT_EQ(conversations->size(), 6u);
  for (const Conversation& conversation : *conversations) EXPECT_GE(conversation.size(), 3u);
}

}  // namespace
}  // namespace palimpsest::load
