#include "tools/palctl/remap_view.h"

#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "common/bytes.h"
#include "tools/palctl/text_table.h"

namespace palimpsest::palctl {
namespace {

using nlohmann::json;

json Finite(double value) { return std::isfinite(value) ? json(value) : json(); }

json RotationJson(const v1::RotationInputs& r) {
  return {{"layers", r.layers()},
          {"layer_bytes", r.layer_bytes()},
          {"cap_freed", r.cap_freed()},
          {"step_seconds", r.step_seconds()},
          {"link_bytes_per_second", r.link_bytes_per_second()},
          {"link_share", r.link_share()},
          {"copy_seconds", r.copy_seconds()},
          {"longest_copy_seconds", r.longest_copy_seconds()},
          {"freed_before", r.freed_before()},
          {"slots_before", r.slots_before()},
          {"freed_after", r.freed_after()},
          {"slots_after", r.slots_after()},
          {"limit", r.limit()}};
}

json CandidateJson(const v1::RemapCandidate& c) {
  json row = {{"tenant", c.tenant()},
              {"rule", c.rule()},
              {"outcome", c.outcome()},
              {"slabs", c.slabs()},
              {"priority", c.priority()},
              {"idle_seconds", Finite(c.idle_seconds())},
              {"next_use_seconds", Finite(c.next_use_seconds())},
              {"reload_seconds", Finite(c.reload_seconds())},
              {"score", Finite(c.score())}};
  if (c.has_rotation()) row["rotation"] = RotationJson(c.rotation());
  return row;
}

std::string Words(const std::string& name) { return absl::StrReplaceAll(name, {{"_", " "}}); }

// Three digits that count, in a unit that suits.
std::string Seconds(double seconds) {
  if (!std::isfinite(seconds)) return "never";
  if (seconds == 0) return "now";
  if (seconds < 1e-3) return absl::StrFormat("%.0f us", 1e6 * seconds);
  if (seconds < 1) return absl::StrFormat("%.3g ms", 1e3 * seconds);
  if (seconds < 1000) return absl::StrFormat("%.3g s", seconds);
  return absl::StrFormat("%.1f h", seconds / 3600);
}

std::string Score(const v1::RemapCandidate& c) {
  if (c.reload_seconds() == 0) return "";
  return std::isfinite(c.score()) ? absl::StrFormat("%.3g", c.score()) : "highest";
}

std::string RotationText(const v1::RotationInputs& r) {
  const auto state = [](int32_t freed, int32_t slots) {
    return freed == 0 ? std::string("none freed")
                      : absl::StrCat(freed, " freed in ", slots, slots == 1 ? " slot" : " slots");
  };
  return absl::StrFormat(
      "    of %d layers %s, now %s (cap %d): a layer of %s takes %s over %.0f %% of the link, may "
      "take %s in a step of %s; bound by %s\n",
      r.layers(), state(r.freed_before(), r.slots_before()),
      state(r.freed_after(), r.slots_after()), r.cap_freed(),
      Bytes(static_cast<int64_t>(r.layer_bytes())).ToString(), Seconds(r.copy_seconds()),
      100 * r.link_share(), Seconds(r.longest_copy_seconds()), Seconds(r.step_seconds()),
      r.limit() == "none" ? "what was wanted" : r.limit());
}

std::string Indented(const std::string& table) {
  std::string text;
  size_t begin = 0;
  while (begin < table.size()) {
    const size_t end = table.find('\n', begin);
    absl::StrAppend(&text, "  ", table.substr(begin, end + 1 - begin));
    begin = end + 1;
  }
  return text;
}

std::string DecisionText(const v1::RemapDecision& d, absl::TimeZone zone) {
  const absl::Time at = absl::UnixEpoch() + absl::Seconds(d.decided_at());
  std::string text = absl::StrFormat("#%d  %s  %s needs %d slabs (%s): %d planned", d.sequence(),
                                     absl::FormatTime("%Y-%m-%d %H:%M:%E3S", at, zone), d.tenant(),
                                     d.wanted_slabs(), Words(d.reason()), d.planned_slabs());
  if (d.repeats() > 0) absl::StrAppend(&text, ", the same ", d.repeats() + 1, " times");
  absl::StrAppend(&text, "\n");
  if (d.candidates().empty()) {
    absl::StrAppend(&text, "  nobody has anything that may be taken\n");
    return text;
  }
  TextTable table({"RULE", "TENANT", ">PRIORITY", ">IDLE", ">NEXT USE", ">RELOAD", ">SCORE",
                   ">SLABS", "OUTCOME"});
  std::string rotations;
  for (const v1::RemapCandidate& c : d.candidates()) {
    table.AddRow({Words(c.rule()), c.tenant(), absl::StrCat(c.priority()),
                  Seconds(c.idle_seconds()), Seconds(c.next_use_seconds()),
                  c.reload_seconds() > 0 ? Seconds(c.reload_seconds()) : "", Score(c),
                  absl::StrCat(c.slabs()), Words(c.outcome())});
    if (c.has_rotation()) {
      absl::StrAppend(&rotations, "  ", c.tenant(), " rotates:\n", RotationText(c.rotation()));
    }
  }
  return absl::StrCat(text, Indented(table.ToString()), rotations);
}

}  // namespace

json RemapJson(const v1::GetRemapLogResponse& log) {
  json result = {{"decisions", json::array()}, {"totals", json::array()}};
  for (const v1::RemapDecision& d : log.decisions()) {
    json candidates = json::array();
    for (const v1::RemapCandidate& c : d.candidates()) candidates.push_back(CandidateJson(c));
    result["decisions"].push_back({{"sequence", d.sequence()},
                                   {"decided_at", d.decided_at()},
                                   {"repeats", d.repeats()},
                                   {"tenant", d.tenant()},
                                   {"reason", d.reason()},
                                   {"wanted_slabs", d.wanted_slabs()},
                                   {"planned_slabs", d.planned_slabs()},
                                   {"candidates", std::move(candidates)}});
  }
  for (const v1::RemapTotal& t : log.totals()) {
    result["totals"].push_back({{"rule", t.rule()},
                                {"outcome", t.outcome()},
                                {"candidates", t.candidates()},
                                {"slabs", t.slabs()}});
  }
  return result;
}

std::string RemapTotalsTable(const v1::GetRemapLogResponse& log) {
  TextTable table({"RULE", "OUTCOME", ">TIMES", ">SLABS"});
  for (const v1::RemapTotal& t : log.totals()) {
    table.AddRow({Words(t.rule()), Words(t.outcome()), absl::StrCat(t.candidates()),
                  absl::StrCat(t.slabs())});
  }
  return table.ToString();
}

std::string RemapExplanation(const v1::GetRemapLogResponse& log, absl::TimeZone zone) {
  if (log.decisions().empty()) return "no decisions: memory was taken from nobody so far\n";
  std::string text;
  for (const v1::RemapDecision& d : log.decisions()) {
    if (!text.empty()) absl::StrAppend(&text, "\n");
    absl::StrAppend(&text, DecisionText(d, zone));
  }
  return text;
}

}  // namespace palimpsest::palctl
