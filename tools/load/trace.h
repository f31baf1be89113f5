// Traces of other people's requests: when requests arrived, and how long prompts and answers were.
// Files come from outside: whatever they hold costs bounded time and memory, and ends in an error
// that says where.
#ifndef PALIMPSEST_TOOLS_LOAD_TRACE_H_
#define PALIMPSEST_TOOLS_LOAD_TRACE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "common/bytes.h"

namespace palimpsest::load {

inline constexpr Bytes kLongestTrace = MiB(256);  // unpacked
inline constexpr size_t kMostRecords = 4'000'000;

// A file's content, unpacked if it is gzip's. OutOfRange above `limit`; DataLoss for damaged or
// cut gzip.
absl::StatusOr<std::string> ReadTraceFile(const std::string& path, Bytes limit = kLongestTrace);

// Arrivals of a CSV whose first line names a column TIMESTAMP, of times such as
// "2023-11-16 18:17:03.9799600", like the traces of Azure's LLM inference. As time since the first
// arrival, ascending; at least two, and not all at once.
absl::StatusOr<std::vector<absl::Duration>> ParseArrivals(absl::string_view csv);

struct TimedRequest {
  absl::Duration arrival;  // since the first one's
  int64_t prompt_tokens = 0;
  int64_t output_tokens = 0;

  friend bool operator==(const TimedRequest&, const TimedRequest&) = default;
};

// As ParseArrivals, but one is enough, and with the lengths in the columns ContextTokens and
// GeneratedTokens, from 0 to 2^31 - 1.
absl::StatusOr<std::vector<TimedRequest>> ParseTimedRequests(absl::string_view csv);

struct PromptText {
  std::string text;
  uint64_t output_tokens = 0;
};

// A JSON array of {"input": TEXT, "output_length": TOKENS}, as ShareGPT's conversations are
// prepared for LMBenchmark. At least one.
absl::StatusOr<std::vector<PromptText>> ParsePrompts(absl::string_view json);

struct RequestLengths {
  int32_t prompt_tokens = 0;
  int32_t output_tokens = 0;

  friend bool operator==(const RequestLengths&, const RequestLengths&) = default;
};

// How texts become lengths. Lengths are cut to the limits.
struct LengthRules {
  int32_t characters_per_token = 4;
  int32_t least_prompt = 16;
  int32_t most_prompt = 1024;
  int32_t most_output = 512;
};

// The lengths of ParsePrompts' requests. A text counts in bytes.
absl::StatusOr<std::vector<RequestLengths>> ParseLengths(absl::string_view json,
                                                         const LengthRules& rules);

// The turns of a conversation. `prompt_tokens` are those that the user adds: what the model sees is
// all turns before, their answers, and these.
using Conversation = std::vector<RequestLengths>;

// The conversations in ParsePrompts' requests, in the order of their first turns: a request whose
// text begins with that of another is its next turn (of several such the first in the order of
// their texts; the others begin conversations of their own). What its text has behind the other's
// text and answer is new, at least `rules.least_prompt`. A conversation ends before the turn that
// would make a prompt longer than `rules.most_prompt`.
absl::StatusOr<std::vector<Conversation>> ParseConversations(absl::string_view json,
                                                             const LengthRules& rules);

}  // namespace palimpsest::load

#endif  // PALIMPSEST_TOOLS_LOAD_TRACE_H_
