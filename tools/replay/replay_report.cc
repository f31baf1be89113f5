#include "tools/replay/replay_report.h"

#include <algorithm>
#include <array>
#include <future>
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

absl::string_view HintsName(Hints hints) {
  for (const auto& [name, value] : HintNames()) {
    if (value == hints) return name;
  }
  return "";
}

json CalibrationJson(const reuse::Calibration& calibration) {
  json bins = json::array();
  double begin = 0;
  for (size_t i = 0; i < calibration.bins().size(); ++i) {
    const reuse::Calibration::Bin& bin = calibration.bins()[i];
    const auto votes = static_cast<double>(std::max<int64_t>(bin.votes, 1));
    bins.push_back({{"from", begin},
                    {"to", reuse::Calibration::kBinEnds[i]},
                    {"votes", bin.votes},
                    {"predicted", bin.predicted / votes},
                    {"happened", bin.happened / votes}});
    begin = reuse::Calibration::kBinEnds[i];
  }
  return {{"votes", calibration.votes()},
          {"brier", calibration.Brier()},
          {"brier_of_mean", calibration.BrierOfMean()},
          {"bins", std::move(bins)}};
}

json TimesJson(const FirstTokenTimes& times) {
  return {{"p50", absl::ToDoubleSeconds(times.p50)},
          {"p99", absl::ToDoubleSeconds(times.p99)},
          {"mean", absl::ToDoubleSeconds(times.mean)}};
}

json PrefetchJson(const prefetch::PrefetchCounts& counts) {
  return {{"fetched_blocks", counts.fetched},
          {"used_blocks", counts.used},
          {"wasted_blocks", counts.wasted},
          {"precision", counts.Precision()},
          {"refused_wishes", counts.refused},
          {"late_wishes", counts.late},
          {"unaffordable_blocks", counts.unaffordable}};
}

// Moved: stored in tiers below the first, or loaded from them.
int64_t MovedBlocks(const TieredResult& result) {
  int64_t moved = 0;
  for (size_t tier = 1; tier < result.tiers.size(); ++tier) {
    moved += result.tiers[tier].stored + result.loaded[tier];
  }
  return moved;
}

// Stored in tiers below the first, and evicted from there without use.
int64_t WastedBlocks(const TieredResult& result) {
  int64_t wasted = 0;
  for (size_t tier = 1; tier < result.tiers.size(); ++tier) wasted += result.tiers[tier].wasted;
  return wasted;
}

json TieredJson(const ReplayReport& report, const TieredResult& result) {
  json tiers = json::array();
  for (size_t i = 0; i < result.tiers.size(); ++i) {
    const TierCounts& counts = result.tiers[i];
    const ReplayTier& costs = report.tiers->costs.tiers[i];
    tiers.push_back(
        {{"name", costs.name},
         {"blocks", costs.blocks},
         {"hit_blocks", counts.hits},
         {"hit_rate_blocks", result.all.blocks == 0 ? 0
                                                    : static_cast<double>(counts.hits) /
                                                          static_cast<double>(result.all.blocks)},
         {"loaded_bytes", BytesOf(report, result.loaded[i]).count()},
         {"stored_bytes", BytesOf(report, counts.stored).count()},
         {"prefetched_bytes", BytesOf(report, counts.prefetched).count()},
         {"evicted_bytes", BytesOf(report, counts.evicted).count()},
         {"wasted_bytes", BytesOf(report, counts.wasted).count()},
         {"price", result.prices[i]}});
  }
  json prefetches = PrefetchJson(result.all_prefetches);
  constexpr std::array<const char*, prefetch::kTriggers> kNames = {"next_blocks", "transition",
                                                                   "announced"};
  for (size_t i = 0; i < kNames.size(); ++i) {
    prefetches["by_trigger"][kNames[i]] = PrefetchJson(result.prefetches[i]);
  }
  return {{"hit_rate_blocks", result.all.BlockRate()},
          {"hit_rate_tokens", result.all.TokenRate()},
          {"by_tier", std::move(tiers)},
          {"ttft_seconds", TimesJson(result.first_token)},
          {"seconds_saved", absl::ToDoubleSeconds(result.saved)},
          {"bytes_moved", BytesOf(report, MovedBlocks(result)).count()},
          {"bytes_wasted", BytesOf(report, WastedBlocks(result)).count()},
          {"prefetch", std::move(prefetches)}};
}

json TiersJson(const ReplayReport& report) {
  json result = TieredJson(report, report.tiers->result);
  result["lru"] = TieredJson(report, report.tiers->lru);
  result["first_tier_only_lru"] = TieredJson(report, report.tiers->first_only);
  result["recompute_ttft_seconds"] = TimesJson(report.tiers->result.recomputed);
  return result;
}

std::string Seconds(absl::Duration time) {
  return absl::StrFormat("%.3f", absl::ToDoubleSeconds(time));
}

std::string TiersTable(const ReplayReport& report) {
  const ReplayReport::Tiers& tiers = *report.tiers;
  std::vector<std::string> heads = {"tiers", ">hits % of blocks"};
  for (const ReplayTier& tier : tiers.costs.tiers) heads.push_back(absl::StrCat(">", tier.name));
  for (const char* head : {">TTFT P50 s", ">P99 s", ">mean s", ">saved s", ">moved", ">wasted",
                           ">prefetched", ">precision %"}) {
    heads.emplace_back(head);
  }
  palctl::TextTable table(heads);
  const auto add = [&](const std::string& name, const TieredResult& result) {
    std::vector<std::string> row = {name, Percent(result.all.BlockRate())};
    for (size_t i = 0; i < tiers.costs.tiers.size(); ++i) {
      row.push_back(i < result.tiers.size() && result.all.blocks > 0
                        ? Percent(static_cast<double>(result.tiers[i].hits) /
                                  static_cast<double>(result.all.blocks))
                        : "-");
    }
    row.insert(
        row.end(),
        {Seconds(result.first_token.p50), Seconds(result.first_token.p99),
         Seconds(result.first_token.mean),
         absl::StrFormat("%.0f", absl::ToDoubleSeconds(result.saved)),
         BytesOf(report, MovedBlocks(result)).ToString(),
         BytesOf(report, WastedBlocks(result)).ToString(),
         BytesOf(report, result.all_prefetches.fetched).ToString(),
         result.all_prefetches.fetched == 0 ? "-" : Percent(result.all_prefetches.Precision())});
    table.AddRow(row);
  };
  add(report.policy, tiers.result);
  add("lru", tiers.lru);
  add("lru, first tier alone", tiers.first_only);
  return absl::StrFormat("\n%s\nnothing cached: TTFT P50 %s s, P99 %s s, mean %s s\n",
                         table.ToString(), Seconds(tiers.result.recomputed.p50),
                         Seconds(tiers.result.recomputed.p99),
                         Seconds(tiers.result.recomputed.mean));
}

}  // namespace

absl::StatusOr<ReplayReport> MakeReplayReport(const TraceSource& source, const Trace& trace,
                                              const std::string& policy,
                                              const ReplayOptions& options, Bytes token_bytes,
                                              const std::optional<TierCosts>& tiers) {
  const absl::StatusOr<const ReplayPolicy*> entry = FindReplayPolicy(policy);
  if (!entry.ok()) return entry.status();
  ReplayReport report{.source = source,
                      .policy = policy,
                      .options = options,
                      .token_bytes = token_bytes,
                      .requests = trace.requests().size(),
                      .distinct_blocks = trace.distinct_blocks(),
                      .block_tokens = trace.block_tokens(),
                      .length = trace.requests().back().arrival};
  // Beside the tiers' replays, which take as long.
  std::future<void> plain = std::async(std::launch::async, [&] {
    report.result = Replay(trace, **entry, options);
    report.bounds = ReplayAllBounds(trace, options);
  });
  if (tiers.has_value()) {
    const ReplayPolicy& lru = **FindReplayPolicy("lru");
    absl::StatusOr<TieredResult> result = ReplayTiers(trace, **entry, options, *tiers, token_bytes);
    if (!result.ok()) return result.status();
    TierCosts first = *tiers;
    first.tiers.resize(1);
    report.tiers = {.costs = *tiers,
                    .result = *std::move(result),
                    .lru = *ReplayTiers(trace, lru, options, *tiers, token_bytes),
                    .first_only = *ReplayTiers(trace, lru, options, first, token_bytes)};
  }
  plain.get();
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
  json result = {{"trace", std::move(trace)},
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
                 {"wasted_blocks", report.result.wasted_blocks},
                 {"hints", HintsName(report.options.hints)},
                 {"stored_bytes", BytesOf(report, report.result.stored_blocks).count()},
                 {"evicted_bytes", BytesOf(report, report.result.evicted_blocks).count()},
                 {"infinite", bounds.infinite.all.BlockRate()},
                 {"belady", bounds.belady.all.BlockRate()},
                 {"lru", bounds.lru.all.BlockRate()},
                 {"lru_leaves_first", bounds.lru_leaves_first.all.BlockRate()}};
  if (report.result.calibration.has_value()) {
    result["calibration"] = CalibrationJson(*report.result.calibration);
  }
  if (report.tiers.has_value()) result["tiers"] = TiersJson(report);
  return result;
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
      "cache: %d blocks, %s at %s a token\n\n%s%s",
      report.source.file, report.requests, absl::FormatDuration(report.length),
      report.result.all.blocks, report.block_tokens, report.distinct_blocks, report.options.blocks,
      BytesOf(report, static_cast<int64_t>(report.options.blocks)).ToString(),
      report.token_bytes.ToString(), table.ToString(),
      report.tiers.has_value() ? TiersTable(report) : "");
}

}  // namespace palimpsest::replay
