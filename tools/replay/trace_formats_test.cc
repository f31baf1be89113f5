#include "tools/replay/trace_formats.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace palimpsest::replay {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::vector<uint32_t> PathOf(const Trace& trace, size_t request) {
  return {trace.path(request).begin(), trace.path(request).end()};
}

constexpr char kStarts[] = "seed,session,start_s\n1,0,10\n1,1,15.5\n2,1,3\n";

TEST(ParseMooncake, ReadsPathsInOrderOfArrival) {
  const auto lines = ParseMooncake(
      R"({"timestamp": 1500, "input_length": 1100, "output_length": 7, "hash_ids": [5, 9, 8]}

         {"timestamp": 500, "input_length": 1024, "output_length": 0, "hash_ids": [5, 6], "x": 1}
)");
  ASSERT_TRUE(lines.ok()) << lines.status();
  EXPECT_EQ(lines->block_tokens(), 512);
  TraceRequest first, second;
  first.arrival = absl::Milliseconds(500);
  first.input_tokens = 1024;
  second.arrival = absl::Milliseconds(1500);
  second.input_tokens = 1100;
  second.output_tokens = 7;
  EXPECT_THAT(lines->requests(), ElementsAre(first, second));
  EXPECT_EQ(lines->distinct_blocks(), 4u);
  EXPECT_EQ(lines->path(0)[0], lines->path(1)[0]);
  EXPECT_NE(lines->path(0)[1], lines->path(1)[1]);
  EXPECT_EQ(lines->accesses().size(), 5u);
}

// Whatever the ids are, equal blocks stand behind equal ones.
TEST(ParseMooncake, IdsThatAreNoPrefixesMakeTreesAllTheSame) {
  const auto trace = ParseMooncake(
      "{\"timestamp\": 0, \"input_length\": 2000, \"output_length\": 1, \"hash_ids\": [1, 1, 2]}\n"
      "{\"timestamp\": 0, \"input_length\": 2000, \"output_length\": 1, \"hash_ids\": [2, 1]}");
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_THAT(PathOf(*trace, 0), ElementsAre(0, 1, 2));
  EXPECT_THAT(PathOf(*trace, 1), ElementsAre(3, 4));
}

TEST(ParseMooncake, ErrorsNameTheLine) {
  const auto refusal = [](absl::string_view line) {
    const auto trace = ParseMooncake(absl::StrCat(
        "{\"timestamp\": 0, \"input_length\": 9, \"output_length\": 1, \"hash_ids\": [1]}\n",
        line));
    EXPECT_EQ(trace.status().code(), absl::StatusCode::kInvalidArgument) << line;
    EXPECT_LT(trace.status().message().size(), 400u);
    return std::string(trace.status().message());
  };
  EXPECT_THAT(refusal("x"), HasSubstr("line 2: not valid JSON"));
  EXPECT_THAT(refusal("[]"), HasSubstr("line 2: expected an object, got []"));
  EXPECT_THAT(refusal("{}"), HasSubstr("line 2: expected a time 'timestamp', got null"));
  EXPECT_THAT(refusal(R"({"timestamp": -1})"), HasSubstr("timestamp"));
  EXPECT_THAT(refusal(R"({"timestamp": 1e300})"), HasSubstr("timestamp"));
  EXPECT_THAT(refusal(R"({"timestamp": 1, "input_length": -3})"), HasSubstr("'input_length'"));
  EXPECT_THAT(refusal(R"({"timestamp": 1, "input_length": 3000000000})"),
              HasSubstr("'input_length', got 3000000000"));
  EXPECT_THAT(refusal(R"({"timestamp": 1, "input_length": 1, "output_length": 1.5})"),
              HasSubstr("'output_length'"));
  const std::string head = R"({"timestamp": 1, "input_length": 600, "output_length": 1)";
  EXPECT_THAT(refusal(head + "}"), HasSubstr("expected an array 'hash_ids'"));
  EXPECT_THAT(refusal(head + R"(, "hash_ids": [1, "2"]})"), HasSubstr("numbers in 'hash_ids'"));
  EXPECT_THAT(refusal(head + R"(, "hash_ids": [-1]})"), HasSubstr("numbers in 'hash_ids'"));
  EXPECT_THAT(refusal(head + R"(, "hash_ids": [1, 2, 3]})"), HasSubstr("at most 2 blocks"));
  EXPECT_THAT(refusal(absl::StrCat(head, R"(, "hash_ids": ")", std::string(9999, 'x'), "\"}")),
              HasSubstr("line 2"));
  EXPECT_THAT(refusal(std::string(1000, '[')), HasSubstr("line 2"));
  EXPECT_EQ(ParseMooncake("\n").status().message(), "expected requests, got none");
}

TEST(ParseClaudeCode, MergesSessions) {
  const std::string first =
      R"({"block_size": 64, "requests": [)"
      R"({"t": 2, "in": 130, "out": 3, "stop": "tool_use", "hash_ids": [1, 2]},)"
      R"({"t": 5000, "in": 130, "out": 4, "stop": "end_turn", "hash_ids": [1, 2]},)"
      R"({"t": 4, "type": "subagent", "requests": [{"t": 1, "in": 64, "out": 5, "stop": "", "hash_ids": [7]}]}]})";
  const std::string second =
      R"({"block_size": 64, "requests": [{"t": 9, "in": 70, "out": 6, "hash_ids": [1]}]})";
  const auto trace = ParseClaudeCode(first + "\n" + second + "\n", kStarts, 1);
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->block_tokens(), 64);
  std::vector<double> times;
  std::vector<int64_t> outputs;
  for (const TraceRequest& request : trace->requests()) {
    times.push_back(absl::ToDoubleSeconds(request.arrival));
    outputs.push_back(request.output_tokens);
  }
  EXPECT_THAT(outputs, ElementsAre(3, 5, 6, 4));
  EXPECT_THAT(times, ElementsAre(10, 13, 15.5, 13 + 3600)) << "the last after an hour, not 4995 s";
  EXPECT_EQ(trace->requests()[0].ending, cache::Ending::kToolCall);
  EXPECT_EQ(trace->requests()[1].ending, cache::Ending::kUnknown);
  EXPECT_EQ(trace->requests()[3].ending, cache::Ending::kEndOfTurn);
  EXPECT_EQ(PathOf(*trace, 0), PathOf(*trace, 3));
  EXPECT_NE(PathOf(*trace, 0)[0], PathOf(*trace, 2)[0]) << "ids are the session's own";
  EXPECT_EQ(trace->requests()[0].conversation, trace->requests()[3].conversation);
  EXPECT_NE(trace->requests()[0].conversation, trace->requests()[1].conversation);
  EXPECT_NE(trace->requests()[0].conversation, trace->requests()[2].conversation);

  const auto other = ParseClaudeCode(first + "\n" + second + "\n", kStarts, 2);
  ASSERT_TRUE(other.ok()) << other.status();
  ASSERT_EQ(other->requests().size(), 1u);
  EXPECT_EQ(other->requests()[0].arrival, absl::Seconds(3));
}

TEST(ParseClaudeCode, ErrorsSayWhere) {
  const std::string session =
      R"({"block_size": 64, "requests": [{"t": 9, "in": 70, "out": 6, "hash_ids": [1]}]})";
  const auto refusal = [](absl::string_view lines, absl::string_view starts = kStarts,
                          uint64_t seed = 1) {
    const auto trace = ParseClaudeCode(lines, starts, seed);
    EXPECT_EQ(trace.status().code(), absl::StatusCode::kInvalidArgument) << lines << starts;
    return std::string(trace.status().message());
  };
  EXPECT_THAT(refusal(session), HasSubstr("expected sessions below 1"));
  EXPECT_THAT(refusal(session + "\n{}"), HasSubstr("line 2: expected a 'block_size'"));
  EXPECT_THAT(refusal(session + "\n" + R"({"block_size": 32, "requests": []})"),
              HasSubstr("line 2: expected block_size 64"));
  EXPECT_THAT(refusal(R"({"block_size": 0})"), HasSubstr("line 1"));
  EXPECT_THAT(refusal(R"({"block_size": 64, "requests": [{"t": 1, "requests": [{"t": 1, )"
                      R"("requests": []}]}]})"),
              HasSubstr("a number of tokens 'in'"))
      << "subagents have no subagents";
  EXPECT_THAT(refusal(session, "a,b\n"), HasSubstr("starts, line 1"));
  EXPECT_THAT(refusal(session, "seed,session,start_s\n1,0\n"), HasSubstr("starts, line 2"));
  EXPECT_THAT(refusal(session, "seed,session,start_s\n1,0,nan\n"), HasSubstr("starts, line 2"));
  EXPECT_THAT(refusal(session, "seed,session,start_s\n1,0,1\n1,0,2\n"), HasSubstr("second time"));
  EXPECT_THAT(refusal(session, kStarts, 7),
              HasSubstr("no session for seed 7; there are seeds 1, 2"));
}

TEST(ParseAzure, PromptsShareNothing) {
  const auto trace = ParseAzure(
      "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-11-16 18:00:01,40,4\n"
      "2023-11-16 18:00:00,15,2\n");
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_EQ(trace->requests()[1].input_tokens, 40);
  EXPECT_EQ(trace->requests()[1].output_tokens, 4);
  EXPECT_THAT(PathOf(*trace, 0), IsEmpty());
  EXPECT_THAT(PathOf(*trace, 1), ElementsAre(0, 1));
}

TEST(ParseShareGpt, PromptsShareWhatTheyBeginWith) {
  const std::string turn(150, 'a');
  const auto trace = ParseShareGpt(
      absl::StrCat(R"([{"input": ")", turn, R"(", "output_length": 3},)", R"({"input": ")", turn,
                   std::string(50, 'b'), R"(", "output_length": 18446744073709551615}])"));
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_THAT(PathOf(*trace, 0), ElementsAre(0, 1));
  EXPECT_THAT(PathOf(*trace, 1), ElementsAre(0, 1, 2));
  EXPECT_EQ(trace->requests()[0].input_tokens, 37);
  EXPECT_EQ(trace->requests()[1].arrival, absl::Seconds(1));
}

TEST(ReadTrace, NamesFilesAndFormats) {
  EXPECT_THAT(
      ReadTrace({.file = "/nowhere", .format = "azure", .starts_file = ""}).status().message(),
      HasSubstr("/nowhere"));
  EXPECT_THAT(
      ReadTrace({.file = "tools/load/testdata/arrivals.csv", .format = "x", .starts_file = ""})
          .status()
          .message(),
      HasSubstr("expected mooncake, claude-code, azure, sharegpt"));
  const auto azure =
      ReadTrace({.file = "tools/load/testdata/arrivals.csv", .format = "azure", .starts_file = ""});
  ASSERT_TRUE(azure.ok()) << azure.status();
  EXPECT_EQ(azure->requests().size(), 160u);
  const auto wrong = ReadTrace(
      {.file = "tools/load/testdata/arrivals.csv", .format = "mooncake", .starts_file = ""});
  EXPECT_THAT(wrong.status().message(), HasSubstr("arrivals.csv: line 1"));
}

// Damaged input ends in an error or a trace, never elsewhere.
TEST(TraceFormatsProperty, SurviveDamage) {
  const std::string mooncake =
      R"({"timestamp": 15, "input_length": 1100, "output_length": 7, "hash_ids": [5, 9, 8]})";
  const std::string session =
      R"({"block_size": 64, "requests": [{"t": 9, "in": 70, "out": 6, "hash_ids": [1]},)"
      R"({"t": 4, "requests": [{"t": 1, "in": 64, "out": 5, "stop": "", "hash_ids": [7]}]}]})";
  const std::string starts = "seed,session,start_s\n1,0,10\n";
  std::mt19937 random(5);
  const auto damage = [&random](std::string text) {
    for (int change = 0; change < 3; ++change) {
      const size_t at = random() % text.size();
      constexpr absl::string_view kBytes = "{}[]\",:019-.e\n\\x\xff";
      text[at] = kBytes[random() % kBytes.size()];
    }
    return text;
  };
  for (int round = 0; round < 3000; ++round) {
    for (const auto& trace :
         {ParseMooncake(damage(mooncake)), ParseClaudeCode(damage(session), starts, 1),
          ParseClaudeCode(session, damage(starts), 1)}) {
      EXPECT_TRUE(!trace.ok() || !trace->requests().empty());
    }
  }
}

}  // namespace
}  // namespace palimpsest::replay
