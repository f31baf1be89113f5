// Public traces in the formats that their sources publish. Files come from outside: whatever they
// hold costs bounded time and memory and ends in an error that names the line.
#ifndef PALIMPSEST_TOOLS_REPLAY_TRACE_FORMATS_H_
#define PALIMPSEST_TOOLS_REPLAY_TRACE_FORMATS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "tools/replay/trace.h"

namespace palimpsest::replay {

// Mooncake's (kvcache-ai/Mooncake, FAST25-release): a line of JSON for each request, `timestamp`
// (ms), `input_length`, `output_length` (tokens) and `hash_ids`, a number for each block of 512
// tokens, equal where whole prefixes are.
absl::StatusOr<Trace> ParseMooncake(absl::string_view lines);

// Sessions of a coding agent (callanjfox/kv-cache-tester): a line of JSON for each session, with
// `block_size` and `requests` of `t` (seconds since the session began), `in`, `out` (tokens),
// `stop` and `hash_ids`, which mean something within the session alone. A request with `requests`
// of its own is a subagent's work, whose times count from its `t`.
//
// `starts` is a CSV (seed, session, start_s) that says when which session (its line, from 0)
// begins: there is its first request. A gap of more than an hour is cut to an hour. Of the seeds in
// the file the one given is taken.
absl::StatusOr<Trace> ParseClaudeCode(absl::string_view lines, absl::string_view starts,
                                      uint64_t seed);

// Azure's LLM inference traces (AzurePublicDataset, 2023): arrivals and lengths. They say nothing
// of contents, so no two prompts share a block, and no policy has hits; blocks of kTextBlockTokens.
absl::StatusOr<Trace> ParseAzure(absl::string_view csv);

// ShareGPT's conversations as LMBenchmark prepares them: a JSON array of {"input",
// "output_length"}, where the input of a later turn repeats the earlier ones. A block is
// kTextBlockTokens of kCharactersPerToken bytes, so rates do not depend on a tokenizer. It has no
// times: one request a second.
absl::StatusOr<Trace> ParseShareGpt(absl::string_view json);

inline constexpr int64_t kTextBlockTokens = 16;
inline constexpr int64_t kCharactersPerToken = 4;

struct TraceSource {
  std::string file;    // may be gzip's
  std::string format;  // of TraceFormats()
  // Of claude-code. Empty: claude_code_starts.csv in the folder of `file`.
  std::string starts_file;
  uint64_t seed = 1;
};

std::vector<std::string> TraceFormats();

absl::StatusOr<Trace> ReadTrace(const TraceSource& source);

}  // namespace palimpsest::replay

#endif  // PALIMPSEST_TOOLS_REPLAY_TRACE_FORMATS_H_
