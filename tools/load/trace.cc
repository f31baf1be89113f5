#include "tools/load/trace.h"

#include <zlib.h>

#include <algorithm>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/strip.h"
#include "common/file.h"
#include "common/json_text.h"

namespace palimpsest::load {
namespace {

constexpr absl::string_view kGzip = "\x1f\x8b";
// Both headers that zlib knows.
constexpr int kWindowBits = 15 + 32;
constexpr Bytes kPiece = MiB(1);
constexpr uint64_t kLongestAnswer = uint64_t{1} << 31;

absl::StatusOr<std::string> Unpack(absl::string_view packed, Bytes limit) {
  z_stream stream = {};
  if (inflateInit2(&stream, kWindowBits) != Z_OK) {
    return absl::ResourceExhaustedError("no memory to unpack gzip");
  }
  const auto end = absl::MakeCleanup([&stream] { inflateEnd(&stream); });
  stream.next_in = reinterpret_cast<Bytef*>(const_cast<char*>(packed.data()));
  stream.avail_in = static_cast<uInt>(packed.size());
  std::string text;
  for (int result = Z_OK; result != Z_STREAM_END;) {
    const size_t before = text.size();
    text.resize(before + static_cast<size_t>(kPiece.count()));
    stream.next_out = reinterpret_cast<Bytef*>(text.data() + before);
    stream.avail_out = static_cast<uInt>(kPiece.count());
    result = inflate(&stream, Z_NO_FLUSH);
    text.resize(text.size() - stream.avail_out);
    if (static_cast<int64_t>(text.size()) > limit.count()) {
      return absl::OutOfRangeError(
          absl::StrCat("unpacked it is longer than ", limit.ToString(), ": cut the trace"));
    }
    if (result != Z_OK && result != Z_STREAM_END) {
      return absl::DataLossError(
          absl::StrCat("damaged or cut gzip after ", text.size(), " unpacked bytes"));
    }
  }
  return text;
}

absl::Status LineError(size_t line, absl::string_view expected, absl::string_view got) {
  return absl::InvalidArgumentError(
      absl::StrCat("line ", line, ": expected ", expected, ", got '", got.substr(0, 64), "'"));
}

// Where a line of a CSV has what.
struct Columns {
  size_t time = 0;
  std::optional<size_t> prompt_tokens, output_tokens;
};

absl::StatusOr<Columns> ReadTitles(absl::string_view row, bool lengths) {
  const std::vector<absl::string_view> titles = absl::StrSplit(row, ',');
  const auto find = [&titles](absl::string_view title) -> std::optional<size_t> {
    const auto found = std::find(titles.begin(), titles.end(), title);
    if (found == titles.end()) return std::nullopt;
    return static_cast<size_t>(found - titles.begin());
  };
  const std::optional<size_t> time = find("TIMESTAMP");
  if (!time.has_value()) return LineError(1, "a column TIMESTAMP", row);
  Columns columns{.time = *time, .prompt_tokens = {}, .output_tokens = {}};
  if (!lengths) return columns;
  columns.prompt_tokens = find("ContextTokens");
  columns.output_tokens = find("GeneratedTokens");
  if (columns.prompt_tokens.has_value() && columns.output_tokens.has_value()) return columns;
  return LineError(1, "columns ContextTokens and GeneratedTokens", row);
}

bool ReadTime(absl::string_view cell, absl::Time& time) {
  std::string error;
  return absl::ParseTime("%Y-%m-%d %H:%M:%E*S", cell, &time, &error) &&
         time != absl::InfiniteFuture() && time != absl::InfinitePast();
}

bool ReadLength(absl::string_view cell, int64_t& length) {
  return absl::SimpleAtoi(cell, &length) && length >= 0 &&
         length <= std::numeric_limits<int32_t>::max();
}

// By time.
absl::StatusOr<std::vector<TimedRequest>> ReadRows(absl::string_view csv, bool lengths) {
  struct Row {
    absl::Time time;
    TimedRequest request;
  };
  std::vector<Row> rows;
  Columns columns;
  size_t line = 0;
  for (absl::string_view row : absl::StrSplit(csv, '\n')) {
    ++line;
    row = absl::StripSuffix(row, "\r");
    if (line == 1) {
      const absl::StatusOr<Columns> titles = ReadTitles(row, lengths);
      if (!titles.ok()) return titles.status();
      columns = *titles;
      continue;
    }
    if (row.empty()) continue;
    if (rows.size() == kMostRecords) {
      return absl::OutOfRangeError(absl::StrCat("more than ", kMostRecords, " arrivals"));
    }
    const std::vector<absl::string_view> cells = absl::StrSplit(row, ',');
    Row read;
    if (cells.size() <= columns.time || !ReadTime(cells[columns.time], read.time)) {
      return LineError(line, "a time such as 2023-11-16 18:17:03.97 in the column TIMESTAMP", row);
    }
    if (lengths && (cells.size() <= std::max(*columns.prompt_tokens, *columns.output_tokens) ||
                    !ReadLength(cells[*columns.prompt_tokens], read.request.prompt_tokens) ||
                    !ReadLength(cells[*columns.output_tokens], read.request.output_tokens))) {
      return LineError(line, "numbers in the columns ContextTokens and GeneratedTokens", row);
    }
    rows.push_back(read);
  }
  std::stable_sort(rows.begin(), rows.end(),
                   [](const Row& a, const Row& b) { return a.time < b.time; });
  std::vector<TimedRequest> requests;
  requests.reserve(rows.size());
  for (const Row& row : rows) {
    requests.push_back(row.request);
    requests.back().arrival = row.time - rows.front().time;
  }
  return requests;
}

// For each prompt the one that continues it; its own index if none does.
std::vector<size_t> NextTurns(const std::vector<PromptText>& prompts) {
  std::vector<size_t> order(prompts.size());
  std::iota(order.begin(), order.end(), 0);
  std::vector<size_t> next = order;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return prompts[a].text < prompts[b].text; });
  // In this order what a text begins with comes before it: each begins with the one below it here.
  std::vector<size_t> open;
  for (const size_t i : order) {
    while (!open.empty() && !absl::StartsWith(prompts[i].text, prompts[open.back()].text)) {
      open.pop_back();
    }
    if (!open.empty() && next[open.back()] == open.back()) next[open.back()] = i;
    open.push_back(i);
  }
  return next;
}

int64_t TextTokens(const PromptText& prompt, const LengthRules& rules) {
  return static_cast<int64_t>(prompt.text.size()) / rules.characters_per_token;
}

int32_t OutputTokens(const PromptText& prompt, const LengthRules& rules) {
  return static_cast<int32_t>(
      std::min<uint64_t>(prompt.output_tokens, static_cast<uint64_t>(rules.most_output)));
}

}  // namespace

absl::StatusOr<std::string> ReadTraceFile(const std::string& path, Bytes limit) {
  absl::StatusOr<std::string> text = ReadFile(path, limit);
  if (text.ok() && absl::StartsWith(*text, kGzip)) text = Unpack(*text, limit);
  if (text.ok()) return text;
  return absl::Status(text.status().code(), absl::StrCat(path, ": ", text.status().message()));
}

absl::StatusOr<std::vector<absl::Duration>> ParseArrivals(absl::string_view csv) {
  const absl::StatusOr<std::vector<TimedRequest>> requests = ReadRows(csv, /*lengths=*/false);
  if (!requests.ok()) return requests.status();
  if (requests->size() < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected at least two arrivals, got ", requests->size()));
  }
  if (requests->back().arrival == absl::ZeroDuration()) {
    return absl::InvalidArgumentError("expected arrivals at different times, all are the same");
  }
  std::vector<absl::Duration> arrivals;
  arrivals.reserve(requests->size());
  for (const TimedRequest& request : *requests) arrivals.push_back(request.arrival);
  return arrivals;
}

absl::StatusOr<std::vector<TimedRequest>> ParseTimedRequests(absl::string_view csv) {
  absl::StatusOr<std::vector<TimedRequest>> requests = ReadRows(csv, /*lengths=*/true);
  if (requests.ok() && requests->empty()) {
    return absl::InvalidArgumentError("expected at least one request, got none");
  }
  return requests;
}

absl::StatusOr<std::vector<PromptText>> ParsePrompts(absl::string_view json) {
  auto records =
      ParseJson(json, {.max_bytes = static_cast<size_t>(kLongestTrace.count()), .max_depth = 8});
  if (!records.ok()) return records.status();
  if (!records->is_array() || records->empty() || records->size() > kMostRecords) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected an array of 1 to ", kMostRecords, " requests"));
  }
  std::vector<PromptText> prompts;
  prompts.reserve(records->size());
  for (nlohmann::json& record : *records) {
    const auto input = record.find("input"), output = record.find("output_length");
    if (!record.is_object() || input == record.end() || !input->is_string() ||
        output == record.end() || !output->is_number_unsigned() || output->get<uint64_t>() == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "request ", prompts.size(),
          R"(: expected {"input": TEXT, "output_length": TOKENS} with at least one token)"));
    }
    prompts.push_back({std::move(input->get_ref<std::string&>()), output->get<uint64_t>()});
  }
  return prompts;
}

absl::StatusOr<std::vector<RequestLengths>> ParseLengths(absl::string_view json,
                                                         const LengthRules& rules) {
  const absl::StatusOr<std::vector<PromptText>> prompts = ParsePrompts(json);
  if (!prompts.ok()) return prompts.status();
  std::vector<RequestLengths> lengths;
  lengths.reserve(prompts->size());
  for (const PromptText& prompt : *prompts) {
    const int64_t tokens =
        std::clamp<int64_t>(TextTokens(prompt, rules), rules.least_prompt, rules.most_prompt);
    lengths.push_back({.prompt_tokens = static_cast<int32_t>(tokens),
                       .output_tokens = OutputTokens(prompt, rules)});
  }
  return lengths;
}

absl::StatusOr<std::vector<Conversation>> ParseConversations(absl::string_view json,
                                                             const LengthRules& rules) {
  const absl::StatusOr<std::vector<PromptText>> prompts = ParsePrompts(json);
  if (!prompts.ok()) return prompts.status();
  const std::vector<size_t> next = NextTurns(*prompts);
  std::vector<bool> first(prompts->size(), true);
  for (size_t i = 0; i < next.size(); ++i) {
    if (next[i] != i) first[next[i]] = false;
  }
  std::vector<Conversation> conversations;
  for (size_t begin = 0; begin < first.size(); ++begin) {
    if (!first[begin]) continue;
    Conversation& conversation = conversations.emplace_back();
    int64_t known = 0;   // of the trace's text, with the answer behind it
    int64_t so_far = 0;  // of the conversation
    for (size_t i = begin;; i = next[i]) {
      const PromptText& prompt = (*prompts)[i];
      const int64_t room = rules.most_prompt - so_far;
      int64_t added = std::max<int64_t>(TextTokens(prompt, rules) - known, rules.least_prompt);
      if (i == begin) added = std::min(added, room);
      if (added > room) break;
      conversation.push_back({.prompt_tokens = static_cast<int32_t>(added),
                              .output_tokens = OutputTokens(prompt, rules)});
      known = TextTokens(prompt, rules) +
              static_cast<int64_t>(std::min<uint64_t>(prompt.output_tokens, kLongestAnswer));
      so_far += added + conversation.back().output_tokens;
      if (next[i] == i) break;
    }
  }
  return conversations;
}

}  // namespace palimpsest::load
