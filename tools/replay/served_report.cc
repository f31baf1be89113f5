#include "tools/replay/served_report.h"

#include <algorithm>
#include <nlohmann/json.hpp>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/palctl/text_table.h"

namespace palimpsest::replay {
namespace {

using nlohmann::json;

double Share(int64_t part, int64_t whole) {
  return whole == 0 ? 0 : static_cast<double>(part) / static_cast<double>(whole);
}

// The number of a tier that the broker calls so.
absl::string_view TierNumber(absl::string_view name) {
  constexpr std::pair<absl::string_view, absl::string_view> kNumbers[] = {
      {"dram", "T1"}, {"cxl", "T2"}, {"nvme", "T3"}, {"remote", "T4"}, {"directory", "T5"}};
  for (const auto& [tier, number] : kNumbers) {
    if (tier == name) return number;
  }
  return "";
}

// What the replay expects of its tier `index`.
double ExpectedShare(const ReplayReport& report, size_t index) {
  const TieredResult& result = report.tiers->result;
  return std::min(1.0, Share(result.tiers[index].hits * report.block_tokens, result.all.tokens));
}

// Of a lower tier that the YAML of costs names by its number, or as the broker does.
std::optional<double> ExpectedOf(const ReplayReport& report, absl::string_view name) {
  if (!report.tiers.has_value()) return std::nullopt;
  const std::vector<ReplayTier>& tiers = report.tiers->costs.tiers;
  for (size_t i = 1; i < tiers.size(); ++i) {
    if (absl::EqualsIgnoreCase(tiers[i].name, name) ||
        absl::EqualsIgnoreCase(tiers[i].name, TierNumber(name))) {
      return ExpectedShare(report, i);
    }
  }
  return std::nullopt;
}

std::string Percent(std::optional<double> share) {
  return share.has_value() ? absl::StrFormat("%.2f", 100 * *share) : "-";
}

}  // namespace

void CountServed(absl::Span<const load::RequestRecord> records, absl::Duration window,
                 ServedReport& served) {
  served.summary = load::Summarize(
      records, {.ttft = absl::InfiniteDuration(), .tbt = absl::InfiniteDuration()}, window);
  for (const load::RequestRecord& record : records) {
    if (served.error.empty()) served.error = record.error;
  }
}

std::vector<ServedShare> ServedShares(const ReplayReport& expected, const ServedReport& served) {
  std::vector<ServedShare> shares(1);
  int64_t in_t0 = served.summary.cached_tokens;
  for (const ServedTier& tier : served.tiers) {
    const int64_t tokens = tier.hit_blocks * served.kv_block_tokens;
    in_t0 -= tokens;
    shares.push_back({.tier = absl::StrCat(TierNumber(tier.name), " ", tier.name),
                      .served = Share(tokens, served.summary.prompt_tokens),
                      .expected = ExpectedOf(expected, tier.name)});
  }
  shares[0] = {.tier = "T0",
               .served = Share(std::max<int64_t>(in_t0, 0), served.summary.prompt_tokens),
               .expected = expected.tiers.has_value() ? ExpectedShare(expected, 0)
                                                      : expected.result.all.TokenRate()};
  return shares;
}

json ServedJson(const ReplayReport& expected, const ServedReport& served) {
  const load::LoadSummary& summary = served.summary;
  json tiers = json::array();
  for (const ServedShare& share : ServedShares(expected, served)) {
    tiers.push_back({{"tier", share.tier},
                     {"hit_rate_tokens", share.served},
                     {"expected", share.expected.has_value() ? json(*share.expected) : json()}});
  }
  return {{"requests", summary.requests},
          {"finished", summary.finished},
          {"failed", summary.failed},
          {"unfinished", summary.unfinished},
          {"too_long", served.too_long},
          {"error", served.error},
          {"salt", served.salt},
          {"speed", served.speed},
          {"seconds", summary.makespan},
          {"prompt_tokens", served.summary.prompt_tokens},
          {"cached_tokens", served.summary.cached_tokens},
          {"hit_rate_tokens", Share(served.summary.cached_tokens, served.summary.prompt_tokens)},
          {"by_tier", std::move(tiers)},
          {"ttft_seconds",
           {{"p50", summary.ttft_p50}, {"p99", summary.ttft_p99}, {"mean", summary.ttft_mean}}},
          {"output_tokens", summary.output_tokens},
          {"sent_late_seconds_p99", summary.late_p99}};
}

std::string ServedTable(const ReplayReport& expected, const ServedReport& served) {
  const load::LoadSummary& summary = served.summary;
  palctl::TextTable table({"prompt tokens from", ">% served", ">% expected"});
  for (const ServedShare& share : ServedShares(expected, served)) {
    table.AddRow({share.tier, Percent(share.served), Percent(share.expected)});
  }
  const ReplayCounts& all =
      expected.tiers.has_value() ? expected.tiers->result.all : expected.result.all;
  table.AddRow({"all tiers",
                Percent(Share(served.summary.cached_tokens, served.summary.prompt_tokens)),
                Percent(all.TokenRate())});
  std::string text = absl::StrFormat(
      "\nserved: %d requests in %.1f s, %d answered, %d failed, %d given up, %d left out because "
      "they are too long for the model\n\n%s\nTTFT P50 %.3f s, P99 %.3f s",
      summary.requests, summary.makespan, summary.finished, summary.failed, summary.unfinished,
      served.too_long, table.ToString(), summary.ttft_p50, summary.ttft_p99);
  if (expected.tiers.has_value()) {
    const FirstTokenTimes& times = expected.tiers->result.first_token;
    absl::StrAppendFormat(&text, "; expected of an idle machine %.3f and %.3f s",
                          absl::ToDoubleSeconds(times.p50), absl::ToDoubleSeconds(times.p99));
  }
  absl::StrAppend(&text, "\n");
  if (!served.error.empty()) absl::StrAppend(&text, "the first failure: ", served.error, "\n");
  return text;
}

}  // namespace palimpsest::replay
