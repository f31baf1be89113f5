#include "tools/replay/trace_formats.h"

#include <xxhash.h>

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/json_text.h"
#include "tools/load/trace.h"

namespace palimpsest::replay {
namespace {

using nlohmann::json;

constexpr int64_t kMooncakeBlockTokens = 512;
constexpr uint64_t kMostBlockTokens = 4096;
constexpr size_t kLongestLine = size_t{32} << 20;
constexpr double kLongestGap = 3600;  // seconds between a session's requests
constexpr double kLatest = 1e10;      // seconds; what durations can hold with room to spare

absl::Status AtLine(size_t line, const absl::Status& status) {
  return absl::Status(status.code(), absl::StrCat("line ", line, ": ", status.message()));
}

absl::Status Expected(absl::string_view what, const json& value) {
  std::string text = value.dump(-1, ' ', false, json::error_handler_t::replace);
  text.resize(std::min<size_t>(text.size(), 64));
  return absl::InvalidArgumentError(absl::StrCat("expected ", what, ", got ", text));
}

// Objects of one line each; `read` gets the line's number from 1.
absl::Status ForEachObject(absl::string_view lines,
                           absl::FunctionRef<absl::Status(size_t, const json&)> read) {
  size_t number = 0;
  for (const absl::string_view line : absl::StrSplit(lines, '\n')) {
    ++number;
    if (absl::StripAsciiWhitespace(line).empty()) continue;
    const absl::StatusOr<json> object =
        ParseJson(line, {.max_bytes = kLongestLine, .max_depth = 8});
    if (!object.ok()) return AtLine(number, object.status());
    if (!object->is_object()) return AtLine(number, Expected("an object", *object));
    const absl::Status status = read(number, *object);
    if (!status.ok()) return AtLine(number, status);
  }
  return absl::OkStatus();
}

absl::StatusOr<double> Seconds(const json& object, const char* key, double unit) {
  const auto value = object.find(key);
  if (value == object.end() || !value->is_number() || value->get<double>() < 0 ||
      !(value->get<double>() * unit <= kLatest)) {
    return Expected(absl::StrCat("a time '", key, "'"), value == object.end() ? json() : *value);
  }
  return value->get<double>() * unit;
}

absl::StatusOr<int64_t> Tokens(const json& object, const char* key) {
  const auto value = object.find(key);
  if (value == object.end() || !value->is_number_unsigned() ||
      value->get<uint64_t>() > std::numeric_limits<int32_t>::max()) {
    return Expected(absl::StrCat("a number of tokens '", key, "'"),
                    value == object.end() ? json() : *value);
  }
  return value->get<int64_t>();
}

absl::StatusOr<std::vector<uint64_t>> HashIds(const json& object) {
  const auto ids = object.find("hash_ids");
  if (ids == object.end() || !ids->is_array()) {
    return Expected("an array 'hash_ids'", ids == object.end() ? json() : *ids);
  }
  std::vector<uint64_t> names;
  names.reserve(ids->size());
  for (const json& id : *ids) {
    if (!id.is_number_unsigned()) return Expected("numbers in 'hash_ids'", id);
    names.push_back(id.get<uint64_t>());
  }
  return names;
}

// What both formats with hashes have, under the names that each gives it.
absl::Status ReadPrompt(const json& object, const char* input, const char* output,
                        TraceRequest& request, std::vector<uint64_t>& names) {
  const absl::StatusOr<int64_t> input_tokens = Tokens(object, input);
  if (!input_tokens.ok()) return input_tokens.status();
  const absl::StatusOr<int64_t> output_tokens = Tokens(object, output);
  if (!output_tokens.ok()) return output_tokens.status();
  absl::StatusOr<std::vector<uint64_t>> ids = HashIds(object);
  if (!ids.ok()) return ids.status();
  request.input_tokens = *input_tokens;
  request.output_tokens = *output_tokens;
  names = *std::move(ids);
  return absl::OkStatus();
}

absl::StatusOr<Trace> BuildNonEmpty(TraceBuilder builder) {
  Trace trace = builder.Build();
  if (trace.requests().empty()) return absl::InvalidArgumentError("expected requests, got none");
  return trace;
}

// One session of an agent.
class Session {
 public:
  explicit Session(uint32_t number) : number_(number) {}

  absl::Status Read(const json& object) {
    const auto tokens = object.find("block_size");
    if (tokens == object.end() || !tokens->is_number_unsigned() || tokens->get<uint64_t>() == 0 ||
        tokens->get<uint64_t>() > kMostBlockTokens) {
      return Expected(absl::StrCat("a 'block_size' from 1 to ", kMostBlockTokens),
                      tokens == object.end() ? json() : *tokens);
    }
    block_tokens_ = tokens->get<int64_t>();
    const absl::Status status = ReadRequests(object, 0, 1);
    if (!status.ok()) return status;
    std::stable_sort(events_.begin(), events_.end(), [](const Event& a, const Event& b) {
      return a.request.arrival < b.request.arrival;
    });
    return absl::OkStatus();
  }

  int64_t block_tokens() const { return block_tokens_; }

  // With its first request at `start`.
  absl::Status AddTo(TraceBuilder& builder, absl::Duration start) const {
    absl::Duration shift = start, last;
    for (size_t i = 0; i < events_.size(); ++i) {
      TraceRequest request = events_[i].request;
      const absl::Duration longest = i == 0 ? absl::ZeroDuration() : absl::Seconds(kLongestGap);
      if (request.arrival - last > longest) shift -= request.arrival - last - longest;
      last = request.arrival;
      request.arrival += shift;
      const absl::Status status = builder.Add(request, number_, events_[i].names);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

 private:
  struct Event {
    TraceRequest request;
    std::vector<uint64_t> names;
  };

  absl::Status ReadRequests(const json& object, double start, int depth) {
    const auto requests = object.find("requests");
    if (requests == object.end() || !requests->is_array()) {
      return Expected("an array 'requests'", requests == object.end() ? json() : *requests);
    }
    const uint64_t conversation = (uint64_t{number_} << 32) + ++agents_;
    for (const json& entry : *requests) {
      if (!entry.is_object()) return Expected("an object in 'requests'", entry);
      const absl::StatusOr<double> time = Seconds(entry, "t", 1);
      if (!time.ok()) return time.status();
      const absl::Status status = entry.contains("requests") && depth == 1
                                      ? ReadRequests(entry, start + *time, depth + 1)
                                      : ReadRequest(entry, start + *time, conversation);
      if (!status.ok()) return status;
    }
    return absl::OkStatus();
  }

  absl::Status ReadRequest(const json& entry, double time, uint64_t conversation) {
    Event event;
    event.request.arrival = absl::Seconds(time);
    event.request.conversation = cache::ConversationId(conversation);
    const absl::Status status = ReadPrompt(entry, "in", "out", event.request, event.names);
    if (!status.ok()) return status;
    const auto stop = entry.find("stop");
    if (stop != entry.end() && *stop == "tool_use") event.request.ending = cache::Ending::kToolCall;
    if (stop != entry.end() && *stop == "end_turn") {
      event.request.ending = cache::Ending::kEndOfTurn;
    }
    events_.push_back(std::move(event));
    return absl::OkStatus();
  }

  const uint32_t number_;
  uint64_t agents_ = 0;
  int64_t block_tokens_ = 0;
  std::vector<Event> events_;
};

// (session, start) of a seed.
absl::StatusOr<std::vector<std::pair<uint32_t, absl::Duration>>> ReadStarts(absl::string_view csv,
                                                                            uint64_t seed) {
  std::vector<std::pair<uint32_t, absl::Duration>> starts;
  std::set<uint32_t> sessions;
  std::set<uint64_t> seeds;
  size_t number = 0;
  for (absl::string_view row : absl::StrSplit(csv, '\n')) {
    ++number;
    row = absl::StripSuffix(row, "\r");
    if (number == 1) {
      if (row == "seed,session,start_s") continue;
      return absl::InvalidArgumentError("starts, line 1: expected seed,session,start_s");
    }
    if (row.empty()) continue;
    const std::vector<absl::string_view> cells = absl::StrSplit(row, ',');
    uint64_t of_seed = 0;
    uint32_t session = 0;
    double start = 0;
    if (cells.size() != 3 || !absl::SimpleAtoi(cells[0], &of_seed) ||
        !absl::SimpleAtoi(cells[1], &session) || !absl::SimpleAtod(cells[2], &start) ||
        !(start >= 0) || start > kLatest) {
      return absl::InvalidArgumentError(
          absl::StrCat("starts, line ", number, ": expected a seed, a session and a time, got '",
                       row.substr(0, 64), "'"));
    }
    if (seeds.size() < 16) seeds.insert(of_seed);
    if (of_seed != seed) continue;
    if (!sessions.insert(session).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("starts, line ", number, ": session ", session, " starts a second time"));
    }
    starts.emplace_back(session, absl::Seconds(start));
  }
  if (!starts.empty()) return starts;
  return absl::InvalidArgumentError(absl::StrCat("starts: no session for seed ", seed,
                                                 "; there are seeds ", absl::StrJoin(seeds, ", ")));
}

}  // namespace

absl::StatusOr<Trace> ParseMooncake(absl::string_view lines) {
  TraceBuilder builder(kMooncakeBlockTokens);
  std::vector<uint64_t> names;
  const absl::Status status = ForEachObject(lines, [&](size_t, const json& object) -> absl::Status {
    TraceRequest request;
    const absl::StatusOr<double> time = Seconds(object, "timestamp", 1e-3);
    if (!time.ok()) return time.status();
    request.arrival = absl::Seconds(*time);
    const absl::Status read = ReadPrompt(object, "input_length", "output_length", request, names);
    return read.ok() ? builder.Add(request, 0, names) : read;
  });
  if (!status.ok()) return status;
  return BuildNonEmpty(std::move(builder));
}

absl::StatusOr<Trace> ParseClaudeCode(absl::string_view lines, absl::string_view starts,
                                      uint64_t seed) {
  const auto begins = ReadStarts(starts, seed);
  if (!begins.ok()) return begins.status();
  std::optional<TraceBuilder> builder;
  int64_t block_tokens = 0;
  uint32_t sessions = 0;
  size_t started = 0;
  const absl::Status status = ForEachObject(lines, [&](size_t, const json& object) {
    Session session(sessions);
    const absl::Status read = session.Read(object);
    if (!read.ok()) return read;
    if (!builder.has_value()) {
      block_tokens = session.block_tokens();
      builder.emplace(block_tokens);
    } else if (session.block_tokens() != block_tokens) {
      return absl::InvalidArgumentError(absl::StrCat("expected block_size ", block_tokens,
                                                     " as before, got ", session.block_tokens()));
    }
    for (const auto& [number, start] : *begins) {
      if (number != sessions) continue;
      ++started;
      const absl::Status added = session.AddTo(*builder, start);
      if (!added.ok()) return added;
    }
    ++sessions;
    return absl::OkStatus();
  });
  if (!status.ok()) return status;
  if (started < begins->size()) {
    return absl::InvalidArgumentError(
        absl::StrCat("starts: expected sessions below ", sessions, ", there are no more"));
  }
  return BuildNonEmpty(*std::move(builder));
}

absl::StatusOr<Trace> ParseAzure(absl::string_view csv) {
  const auto requests = load::ParseTimedRequests(csv);
  if (!requests.ok()) return requests.status();
  TraceBuilder builder(kTextBlockTokens);
  uint64_t next = 0;
  std::vector<uint64_t> names;
  for (const load::TimedRequest& timed : *requests) {
    const int64_t blocks = timed.prompt_tokens / kTextBlockTokens;
    if (blocks > static_cast<int64_t>(kMostAccesses)) {
      return absl::OutOfRangeError(absl::StrCat("a prompt of ", timed.prompt_tokens, " tokens"));
    }
    names.clear();
    for (int64_t i = 0; i < blocks; ++i) names.push_back(next++);
    TraceRequest request;
    request.arrival = timed.arrival;
    request.input_tokens = timed.prompt_tokens;
    request.output_tokens = timed.output_tokens;
    const absl::Status added = builder.Add(request, 0, names);
    if (!added.ok()) return added;
  }
  return BuildNonEmpty(std::move(builder));
}

absl::StatusOr<Trace> ParseShareGpt(absl::string_view json) {
  const auto prompts = load::ParsePrompts(json);
  if (!prompts.ok()) return prompts.status();
  TraceBuilder builder(kTextBlockTokens);
  std::vector<uint64_t> names;
  for (size_t i = 0; i < prompts->size(); ++i) {
    constexpr size_t kBlockBytes = kTextBlockTokens * kCharactersPerToken;
    const std::string& text = (*prompts)[i].text;
    names.clear();
    for (size_t at = 0; at + kBlockBytes <= text.size(); at += kBlockBytes) {
      names.push_back(XXH3_64bits(text.data() + at, kBlockBytes));
    }
    TraceRequest request;
    request.arrival = absl::Seconds(i);
    request.input_tokens = static_cast<int64_t>(text.size()) / kCharactersPerToken;
    request.output_tokens = static_cast<int64_t>(
        std::min<uint64_t>((*prompts)[i].output_tokens, std::numeric_limits<int32_t>::max()));
    const absl::Status added = builder.Add(request, 0, names);
    if (!added.ok()) return added;
  }
  return BuildNonEmpty(std::move(builder));
}

std::vector<std::string> TraceFormats() { return {"mooncake", "claude-code", "azure", "sharegpt"}; }

absl::StatusOr<Trace> ReadTrace(const TraceSource& source) {
  const absl::StatusOr<std::string> text = load::ReadTraceFile(source.file);
  if (!text.ok()) return text.status();
  absl::StatusOr<Trace> trace = absl::InvalidArgumentError(
      absl::StrCat("format '", source.format, "': expected ", absl::StrJoin(TraceFormats(), ", ")));
  if (source.format == "mooncake") trace = ParseMooncake(*text);
  if (source.format == "azure") trace = ParseAzure(*text);
  if (source.format == "sharegpt") trace = ParseShareGpt(*text);
  if (source.format == "claude-code") {
    const std::string beside =
        std::filesystem::path(source.file).replace_filename("claude_code_starts.csv").string();
    const absl::StatusOr<std::string> starts =
        load::ReadTraceFile(source.starts_file.empty() ? beside : source.starts_file);
    if (!starts.ok()) return starts.status();
    trace = ParseClaudeCode(*text, *starts, source.seed);
  }
  if (trace.ok()) return trace;
  return absl::Status(trace.status().code(),
                      absl::StrCat(source.file, ": ", trace.status().message()));
}

}  // namespace palimpsest::replay
