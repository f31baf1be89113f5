#include "tools/palctl/tier_hits.h"

#include <algorithm>
#include <cmath>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/palctl/text_table.h"

namespace palimpsest::palctl {
namespace {

using Json = nlohmann::ordered_json;

double Share(uint64_t part, uint64_t whole) {
  return whole == 0
             ? 0
             : std::round(1e6 * static_cast<double>(part) / static_cast<double>(whole)) / 1e6;
}

// Sums over a tier's tenants.
struct TierCounts {
  uint64_t hit = 0, stored = 0, removed = 0, promoted = 0, demoted = 0, wasted = 0, prefetched = 0,
           refused = 0;

  explicit TierCounts(const v1::TierMemory& tier) {
    for (const v1::TenantTier& tenant : tier.tenants()) {
      hit += tenant.hit_blocks();
      stored += tenant.stored_blocks();
      removed += tenant.removed_blocks();
      promoted += tenant.promoted_blocks();
      demoted += tenant.demoted_blocks();
      wasted += tenant.wasted_blocks();
      prefetched += tenant.prefetched_blocks();
      for (const v1::TierRefusals& refusals : tenant.refusals()) refused += refusals.blocks();
    }
  }
};

TierCounts CountsOf(const v1::GetStatusResponse& status, const std::string& tier) {
  for (const v1::TierMemory& memory : status.tiers()) {
    if (memory.tier() == tier) return TierCounts(memory);
  }
  return TierCounts(v1::TierMemory());
}

std::vector<std::string> TiersOf(const Json& points) {
  std::vector<std::string> tiers;
  for (const Json& point : points) {
    if (!point.contains("hits")) continue;
    for (const Json& tier : point["hits"]["tiers"]) {
      const auto name = tier["tier"].get<std::string>();
      if (std::find(tiers.begin(), tiers.end(), name) == tiers.end()) tiers.push_back(name);
    }
  }
  return tiers;
}

std::string Percent(double share) { return absl::StrFormat("%.1f%%", 100 * share); }

std::string HitsOf(const Json& hits, const std::string& name) {
  for (const Json& tier : hits["tiers"]) {
    if (tier["tier"] == name) return Percent(tier["hits"].get<double>());
  }
  return "";
}

}  // namespace

Json TierHitsJson(const NodeCounters& before, const NodeCounters& after) {
  uint64_t prompt = 0, cached = 0;
  for (size_t i = 0; i < after.workers.size(); ++i) {
    prompt += after.workers[i].prompt_tokens_total() - before.workers[i].prompt_tokens_total();
    cached += after.workers[i].cached_tokens_total() - before.workers[i].cached_tokens_total();
  }
  uint64_t known = cached;
  Json tiers = Json::array();
  for (const v1::TierMemory& tier : after.broker.tiers()) {
    const TierCounts now(tier), then = CountsOf(before.broker, tier.tier());
    const uint64_t hit_tokens = (now.hit - then.hit) * kBlockTokens;
    known += hit_tokens;
    tiers.push_back({{"tier", tier.tier()},
                     {"hits", Share(hit_tokens, prompt)},
                     {"used_bytes", tier.used_bytes()},
                     {"hit", now.hit - then.hit},
                     {"stored", now.stored - then.stored},
                     {"removed", now.removed - then.removed},
                     {"promoted", now.promoted - then.promoted},
                     {"demoted", now.demoted - then.demoted},
                     {"wasted", now.wasted - then.wasted},
                     {"prefetched", now.prefetched - then.prefetched},
                     {"refused", now.refused - then.refused}});
  }
  return {{"prompt_tokens", prompt},
          {"t0", Share(cached, prompt)},
          {"tiers", std::move(tiers)},
          {"computed", Share(prompt - std::min(prompt, known), prompt)}};
}

std::string TierHitsTable(const Json& points) {
  const bool any = std::any_of(points.begin(), points.end(),
                               [](const Json& point) { return point.contains("hits"); });
  if (!any) return "";
  const std::vector<std::string> tiers = TiersOf(points);
  std::vector<std::string> titles = {"RUN", "SYSTEM", ">RATE", ">HITS T0"};
  for (const std::string& tier : tiers) {
    titles.push_back(absl::StrCat(">", absl::AsciiStrToUpper(tier)));
  }
  for (const char* title : {">COMPUTED", ">PREEMPTIONS"}) titles.emplace_back(title);
  TextTable table(titles);
  for (const Json& point : points) {
    if (!point.contains("hits")) continue;
    const Json& hits = point["hits"];
    std::vector<std::string> row = {point.value("run", ""), point.value("system", ""),
                                    absl::StrFormat("%g", point.value("rate", 0.0)),
                                    Percent(hits["t0"].get<double>())};
    for (const std::string& tier : tiers) row.push_back(HitsOf(hits, tier));
    row.push_back(Percent(hits["computed"].get<double>()));
    row.push_back(absl::StrCat(point.value("preemptions", uint64_t{0})));
    table.AddRow(row);
  }
  return table.ToString();
}

}  // namespace palimpsest::palctl
