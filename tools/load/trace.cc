#include "tools/load/trace.h"

#include <zlib.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/match.h"
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

}  // namespace

absl::StatusOr<std::string> ReadTraceFile(const std::string& path, Bytes limit) {
  absl::StatusOr<std::string> text = ReadFile(path, limit);
  if (text.ok() && absl::StartsWith(*text, kGzip)) text = Unpack(*text, limit);
  if (text.ok()) return text;
  return absl::Status(text.status().code(), absl::StrCat(path, ": ", text.status().message()));
}

absl::StatusOr<std::vector<absl::Duration>> ParseArrivals(absl::string_view csv) {
  std::vector<absl::Time> times;
  size_t line = 0, column = 0;
  for (absl::string_view row : absl::StrSplit(csv, '\n')) {
    ++line;
    row = absl::StripSuffix(row, "\r");
    if (line == 1) {
      const std::vector<absl::string_view> titles = absl::StrSplit(row, ',');
      const auto found = std::find(titles.begin(), titles.end(), "TIMESTAMP");
      if (found == titles.end()) return LineError(1, "a column TIMESTAMP", row);
      column = static_cast<size_t>(found - titles.begin());
      continue;
    }
    if (row.empty()) continue;
    if (times.size() == kMostRecords) {
      return absl::OutOfRangeError(absl::StrCat("more than ", kMostRecords, " arrivals"));
    }
    const std::vector<absl::string_view> cells = absl::StrSplit(row, ',');
    absl::Time time;
    std::string error;
    if (cells.size() <= column ||
        !absl::ParseTime("%Y-%m-%d %H:%M:%E*S", cells[column], &time, &error) ||
        time == absl::InfiniteFuture() || time == absl::InfinitePast()) {
      return LineError(line, "a time such as 2023-11-16 18:17:03.97 in the column TIMESTAMP", row);
    }
    times.push_back(time);
  }
  if (times.size() < 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected at least two arrivals, got ", times.size()));
  }
  std::sort(times.begin(), times.end());
  if (times.front() == times.back()) {
    return absl::InvalidArgumentError("expected arrivals at different times, all are the same");
  }
  std::vector<absl::Duration> arrivals;
  arrivals.reserve(times.size());
  for (const absl::Time time : times) arrivals.push_back(time - times.front());
  return arrivals;
}

absl::StatusOr<std::vector<RequestLengths>> ParseLengths(absl::string_view json,
                                                         const LengthRules& rules) {
  const auto records =
      ParseJson(json, {.max_bytes = static_cast<size_t>(kLongestTrace.count()), .max_depth = 8});
  if (!records.ok()) return records.status();
  if (!records->is_array() || records->empty() || records->size() > kMostRecords) {
    return absl::InvalidArgumentError(
        absl::StrCat("expected an array of 1 to ", kMostRecords, " requests"));
  }
  std::vector<RequestLengths> lengths;
  lengths.reserve(records->size());
  for (const nlohmann::json& record : *records) {
    const auto input = record.find("input"), output = record.find("output_length");
    if (!record.is_object() || input == record.end() || !input->is_string() ||
        output == record.end() || !output->is_number_unsigned() || output->get<uint64_t>() == 0) {
      return absl::InvalidArgumentError(absl::StrCat(
          "request ", lengths.size(),
          R"(: expected {"input": TEXT, "output_length": TOKENS} with at least one token)"));
    }
    const size_t tokens = input->get_ref<const std::string&>().size() /
                          static_cast<size_t>(rules.characters_per_token);
    lengths.push_back({.prompt_tokens = static_cast<int32_t>(
                           std::clamp<size_t>(tokens, static_cast<size_t>(rules.least_prompt),
                                              static_cast<size_t>(rules.most_prompt))),
                       .output_tokens = static_cast<int32_t>(std::min<uint64_t>(
                           output->get<uint64_t>(), static_cast<uint64_t>(rules.most_output)))});
  }
  return lengths;
}

}  // namespace palimpsest::load
