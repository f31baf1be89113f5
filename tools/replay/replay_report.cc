#include "tools/replay/replay_report.h"

#include <array>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/palctl/text_table.h"

namespace palimpsest::replay {
namespace {

using nlohmann::json;

std::string Percent(double share) { return absl::StrFormat("%.2f", 100 * share); }

absl::string_view OrderName(cache::Discipline discipline) {
  return discipline == cache::Discipline::kPlain ? "plain" : "leaves-first";
}

json GapJson(const ReplayCounts& counts, const ReplayCounts& lru, const ReplayCounts& belady) {
  const std::optional<double> gap =
      GapClosed(counts.BlockRate(), lru.BlockRate(), belady.BlockRate());
  return gap.has_value() ? json(*gap) : json();
}

Bytes BytesOf(const ReplayReport& report, int64_t blocks) {
  return report.token_bytes * (blocks * report.block_tokens);
}

}  // namespace

absl::StatusOr<ReplayReport> MakeReplayReport(const TraceSource& source, const Trace& trace,
                                              const std::string& policy,
                                              const ReplayOptions& options, Bytes token_bytes) {
  const absl::StatusOr<const ReplayPolicy*> entry = FindReplayPolicy(policy);
  if (!entry.ok()) return entry.status();
  ReplayReport report{.source = source,
                      .policy = policy,
                      .options = options,
                      .token_bytes = token_bytes,
                      .requests = trace.requests().size(),
                      .distinct_blocks = trace.distinct_blocks(),
                      .block_tokens = trace.block_tokens(),
                      .length = trace.requests().back().arrival,
                      .result = Replay(trace, **entry, options),
                      .bounds = ReplayAllBounds(trace, options)};
  return report;
}

json ReplayJson(const ReplayReport& report) {
  const ReplayBounds& bounds = report.bounds;
  json trace = {{"file", report.source.file},
                {"format", report.source.format},
                {"requests", report.requests},
                {"accesses", report.result.all.blocks},
                {"distinct_blocks", report.distinct_blocks},
                {"block_tokens", report.block_tokens},
                {"seconds", absl::ToDoubleSeconds(report.length)}};
  if (report.source.format == "claude-code") trace["seed"] = report.source.seed;
  json halves = json::array();
  for (size_t half = 0; half < report.result.halves.size(); ++half) {
    const ReplayCounts& counts = report.result.halves[half];
    const ReplayCounts& lru = bounds.lru.halves[half];
    const ReplayCounts& belady = bounds.belady.halves[half];
    halves.push_back({{"hit_rate_blocks", counts.BlockRate()},
                      {"hit_rate_tokens", counts.TokenRate()},
                      {"infinite", bounds.infinite.halves[half].BlockRate()},
                      {"belady", belady.BlockRate()},
                      {"lru", lru.BlockRate()},
                      {"gap_closed", GapJson(counts, lru, belady)}});
  }
  return {{"trace", std::move(trace)},
          {"policy", report.policy},
          {"order", OrderName(report.result.discipline)},
          {"blocks", report.options.blocks},
          {"history", report.options.history},
          {"hit_rate_blocks", report.result.all.BlockRate()},
          {"hit_rate_tokens", report.result.all.TokenRate()},
          {"gap_closed", GapJson(report.result.all, bounds.lru.all, bounds.belady.all)},
          {"halves", std::move(halves)},
          {"stored_blocks", report.result.stored_blocks},
          {"evicted_blocks", report.result.evicted_blocks},
          {"stored_bytes", BytesOf(report, report.result.stored_blocks).count()},
          {"evicted_bytes", BytesOf(report, report.result.evicted_blocks).count()},
          {"infinite", bounds.infinite.all.BlockRate()},
          {"belady", bounds.belady.all.BlockRate()},
          {"lru", bounds.lru.all.BlockRate()},
          {"lru_leaves_first", bounds.lru_leaves_first.all.BlockRate()}};
}

std::string ReplayTable(const ReplayReport& report) {
  palctl::TextTable table({"policy", "order", ">hits % of blocks", ">of tokens", ">first half",
                           ">second half", ">gap closed %", ">stored", ">evicted"});
  const auto add = [&](absl::string_view name, const ReplayResult& result) {
    const std::optional<double> gap =
        GapClosed(result.all.BlockRate(), report.bounds.lru.all.BlockRate(),
                  report.bounds.belady.all.BlockRate());
    table.AddRow({std::string(name), std::string(OrderName(result.discipline)),
                  Percent(result.all.BlockRate()), Percent(result.all.TokenRate()),
                  Percent(result.halves[0].BlockRate()), Percent(result.halves[1].BlockRate()),
                  gap.has_value() ? absl::StrFormat("%.1f", 100 * *gap) : "-",
                  BytesOf(report, result.stored_blocks).ToString(),
                  BytesOf(report, result.evicted_blocks).ToString()});
  };
  add(report.policy, report.result);
  add("infinite", report.bounds.infinite);
  add("belady", report.bounds.belady);
  add("lru", report.bounds.lru);
  add("lru", report.bounds.lru_leaves_first);
  return absl::StrFormat(
      "%s: %d requests in %s, %d blocks of %d tokens, %d of them distinct\n"
      "cache: %d blocks, %s at %s a token\n\n%s",
      report.source.file, report.requests, absl::FormatDuration(report.length),
      report.result.all.blocks, report.block_tokens, report.distinct_blocks, report.options.blocks,
      BytesOf(report, static_cast<int64_t>(report.options.blocks)).ToString(),
      report.token_bytes.ToString(), table.ToString());
}

}  // namespace palimpsest::replay
