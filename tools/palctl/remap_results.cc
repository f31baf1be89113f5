#include "tools/palctl/remap_results.h"

#include <algorithm>
#include <cmath>
#include <set>
#include <tuple>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "tools/palctl/text_table.h"

namespace palimpsest::palctl {
namespace {

using Json = nlohmann::ordered_json;
using load::Outcome;
using load::RequestRecord;

constexpr size_t kErrors = 5;

// Rounded to microseconds, which is more than any clock here tells.
double Rounded(double seconds) { return std::round(seconds * 1e6) / 1e6; }
double Rounded(absl::Duration duration) { return Rounded(absl::ToDoubleSeconds(duration)); }

std::string Hex(uint64_t digest) { return absl::StrFormat("%016x", digest); }

const char* OutcomeName(Outcome outcome) {
  switch (outcome) {
    case Outcome::kFinished:
      return "finished";
    case Outcome::kFailed:
      return "failed";
    case Outcome::kUnfinished:
      return "unfinished";
  }
  return "";
}

Json RawJson(absl::Span<const RequestRecord> records) {
  Json raw = Json::array();
  for (const RequestRecord& record : records) {
    const Json first = record.tokens.empty() ? Json(nullptr) : Json(Rounded(record.tokens[0]));
    raw.push_back({Rounded(record.due), Rounded(record.sent), first, Rounded(record.end),
                   record.tokens.size(), record.preemptions, OutcomeName(record.outcome),
                   Hex(record.digest), record.cached_tokens, record.request});
  }
  return raw;
}

// A number of a point, at a path such as {"ttft", "p99"}; NaN where there is none.
double At(const Json& point, const std::vector<const char*>& path) {
  const Json* value = &point;
  for (const char* key : path) {
    if (!value->is_object() || !value->contains(key)) return std::nan("");
    value = &(*value)[key];
  }
  return value->is_number() ? value->get<double>() : std::nan("");
}

std::string TextAt(const Json& point, const char* key) {
  return point.contains(key) && point[key].is_string() ? point[key].get<std::string>() : "";
}

struct Measure {
  const char* title;
  const char* unit;
  std::vector<const char*> path;
  bool log;
};

const std::vector<Measure>& Measures() {
  static const auto* const kMeasures = new std::vector<Measure>{
      {"time to first token, P50", "seconds", {"ttft", "p50"}, true},
      {"time to first token, P99", "seconds", {"ttft", "p99"}, true},
      {"time between tokens, P99", "seconds", {"tbt", "p99"}, true},
      {"output", "tokens/s", {"output_tokens_per_s"}, false},
      {"goodput", "good requests/s", {"goodput"}, false},
      {"preempted", "share of finished requests", {"preempted_share"}, false}};
  return *kMeasures;
}

struct Variable {
  const char* label;
  const char* key;
};
constexpr Variable kVariables[] = {
    {"requests/s", "rate"}, {"tokens in a prompt", "prompt_tokens"}, {"tenants", "tenants"}};

std::vector<std::string> Different(const Json& points, const char* key) {
  std::vector<std::string> different;
  for (const Json& point : points) {
    std::string text = TextAt(point, key);
    if (std::find(different.begin(), different.end(), text) == different.end()) {
      different.push_back(std::move(text));
    }
  }
  return different;
}

// What is drawn against: the first that varies within the points of the run.
const Variable* Varying(const Json& points, const std::string& run) {
  // A sweep of something else may have several rates too; each is a line of its own then.
  for (const Variable& variable : {kVariables[1], kVariables[2], kVariables[0]}) {
    std::set<double> values;
    for (const Json& point : points) {
      if (TextAt(point, "run") == run) values.insert(At(point, {variable.key}));
    }
    if (values.size() < 2) continue;
    for (const Variable& known : kVariables) {
      if (known.key == variable.key) return &known;
    }
  }
  return nullptr;
}

PlotPanel MeasurePanel(const Json& points, const std::string& run, const Variable& variable,
                       const Measure& measure) {
  PlotPanel panel;
  panel.title = absl::StrCat(run, ": ", measure.title);
  panel.x_label = variable.label;
  panel.y_label = measure.unit;
  panel.log_y = measure.log;
  for (const Json& point : points) {
    if (TextAt(point, "run") != run) continue;
    std::string label = TextAt(point, "system");
    if (variable.key != kVariables[0].key && Different(points, "run").size() == 1) {
      absl::StrAppendFormat(&label, ", %g/s", At(point, {"rate"}));
    }
    auto series = std::find_if(panel.series.begin(), panel.series.end(),
                               [&](const PlotSeries& one) { return one.label == label; });
    if (series == panel.series.end()) {
      series = panel.series.insert(panel.series.end(), {label, {}});
    }
    series->points.emplace_back(At(point, {variable.key}), At(point, measure.path));
  }
  for (PlotSeries& series : panel.series) std::sort(series.points.begin(), series.points.end());
  return panel;
}

std::vector<std::pair<double, double>> Over(const Json& xs, const Json& ys, double scale) {
  std::vector<std::pair<double, double>> points;
  for (size_t i = 0; i < std::min(xs.size(), ys.size()); ++i) {
    points.emplace_back(xs[i].get<double>(), ys[i].get<double>() * scale);
  }
  return points;
}

PlotPanel SlabPanel(const Json& point) {
  const Json& memory = point["memory"];
  PlotPanel panel;
  panel.title = absl::StrFormat("%s at %g/s: memory", TextAt(point, "system"), At(point, {"rate"}));
  panel.x_label = "seconds";
  panel.y_label = "GiB";
  panel.stacked = true;
  const double scale = At(memory, {"slab_bytes"}) / static_cast<double>(GiB(1).count());
  for (const char* role : {"workspace", "parameter", "slot", "kv"}) {
    for (const Json& tenant : memory["tenants"]) {
      auto line = Over(memory["seconds"], tenant[role], scale);
      const bool any =
          std::any_of(line.begin(), line.end(), [](const auto& at) { return at.second > 0; });
      if (!any) continue;
      panel.series.push_back({absl::StrCat(TextAt(tenant, "name"), " ", role), std::move(line)});
    }
  }
  panel.series.push_back({"free", Over(memory["seconds"], memory["free"], scale)});
  return panel;
}

std::vector<PlotPanel> SlabPanels(const Json& points) {
  std::vector<PlotPanel> panels;
  for (const std::string& system : Different(points, "system")) {
    const Json* best = nullptr;
    const auto rank = [](const Json& point) {
      return std::make_tuple(At(point, {"tenants"}), At(point, {"rate"}));
    };
    for (const Json& point : points) {
      if (TextAt(point, "system") != system || !point.contains("memory")) continue;
      if (best == nullptr || rank(point) > rank(*best)) best = &point;
    }
    if (best != nullptr) panels.push_back(SlabPanel(*best));
  }
  return panels;
}

}  // namespace

Json SummaryJson(const load::LoadSummary& summary) {
  return {{"requests", summary.requests},
          {"finished", summary.finished},
          {"failed", summary.failed},
          {"unfinished", summary.unfinished},
          {"good", summary.good},
          {"goodput", Rounded(summary.goodput)},
          {"goodput_share", Rounded(summary.goodput_share)},
          {"ttft",
           {{"p50", Rounded(summary.ttft_p50)},
            {"p90", Rounded(summary.ttft_p90)},
            {"p99", Rounded(summary.ttft_p99)},
            {"mean", Rounded(summary.ttft_mean)}}},
          {"tbt",
           {{"p50", Rounded(summary.tbt_p50)},
            {"p90", Rounded(summary.tbt_p90)},
            {"p99", Rounded(summary.tbt_p99)},
            {"max", Rounded(summary.tbt_max)}}},
          {"output_tokens", summary.output_tokens},
          {"output_tokens_per_s", Rounded(summary.output_tokens_per_second)},
          {"input_tokens", summary.prompt_tokens},
          {"cached_tokens", summary.cached_tokens},
          {"makespan_s", Rounded(summary.makespan)},
          {"preempted", summary.preempted},
          {"preempted_share", Rounded(summary.preempted_share)},
          {"late", {{"p99", Rounded(summary.late_p99)}, {"max", Rounded(summary.late_max)}}},
          {"digest", Hex(summary.digest)}};
}

Json RecordsJson(const RemapBenchConfig& config,
                 absl::Span<const std::vector<RequestRecord>> records) {
  std::vector<RequestRecord> all;
  std::set<std::string> errors;
  Json by_tenant = Json::array(), raw = Json::object();
  for (size_t i = 0; i < records.size(); ++i) {
    const std::string& name = config.tenants[i].name;
    Json one =
        SummaryJson(load::Summarize(records[i], config.objective, config.duration, config.warm_up));
    one["name"] = name;
    by_tenant.push_back(std::move(one));
    raw[name] = RawJson(records[i]);
    for (const RequestRecord& record : records[i]) {
      if (!record.error.empty() && errors.size() < kErrors) errors.insert(record.error);
    }
    all.insert(all.end(), records[i].begin(), records[i].end());
  }
  Json json = SummaryJson(load::Summarize(all, config.objective, config.duration, config.warm_up));
  json["by_tenant"] = std::move(by_tenant);
  if (!errors.empty()) json["errors"] = errors;
  if (config.raw_requests) json["requests_raw"] = std::move(raw);
  return json;
}

std::vector<std::vector<load::ScheduledRequest>> LoadOf(const RemapBenchConfig& config,
                                                        int32_t tenants, const RemapPoint& point,
                                                        const RemapTraces& traces) {
  double sum = 0;
  for (int32_t i = 0; i < tenants; ++i) sum += config.tenants[static_cast<size_t>(i)].requests;
  load::ScheduleOptions options;
  options.seed = config.seed;
  options.point = point.load;
  options.duration = config.duration;
  options.prompt_tokens = point.prompt_tokens;
  for (int32_t i = 0; i < tenants; ++i) {
    const double part = config.tenants[static_cast<size_t>(i)].requests;
    options.rates.push_back(sum > 0 ? point.rate * part / sum : 0);
  }
  return config.conversations.has_value()
             ? load::MakeConversations(traces.arrivals, traces.conversations, options,
                                       *config.conversations)
             : load::MakeSchedule(traces.arrivals, traces.lengths, options);
}

Json SchedulesJson(const RemapBenchConfig& config, const RemapTraces& traces) {
  Json tenants = Json::array(), points = Json::array();
  for (const RemapTenant& tenant : config.tenants) {
    tenants.push_back({{"name", tenant.name}, {"shape", tenant.shape}, {"share", tenant.share}});
  }
  std::set<std::tuple<std::string, uint64_t>> seen;
  for (const RemapNodeRun& node : ExpandRuns(config)) {
    for (const RemapPoint& point : node.points) {
      if (!seen.emplace(point.run->name, point.load).second) continue;
      Json requests = Json::array();
      for (const auto& tenant : LoadOf(config, node.tenants, point, traces)) {
        Json list = Json::array();
        for (const load::ScheduledRequest& request : tenant) {
          list.push_back(
              {Rounded(request.due), request.lengths.prompt_tokens, request.lengths.output_tokens});
        }
        requests.push_back(std::move(list));
      }
      points.push_back({{"run", point.run->name},
                        {"tenants", node.tenants},
                        {"rate", point.rate},
                        {"prompt_tokens", point.prompt_tokens},
                        {"load", point.load},
                        {"requests", std::move(requests)}});
    }
  }
  return {{"name", config.name},
          {"memory_bytes", config.memory.count()},
          {"max_sequence_tokens", config.max_sequence_tokens},
          {"duration_s", absl::ToDoubleSeconds(config.duration)},
          {"drain_s", absl::ToDoubleSeconds(config.drain)},
          {"objective",
           {{"ttft_s", absl::ToDoubleSeconds(config.objective.ttft)},
            {"tbt_s", absl::ToDoubleSeconds(config.objective.tbt)}}},
          {"stop_below", config.stop_below},
          {"tenants", std::move(tenants)},
          {"points", std::move(points)}};
}

std::string PointTable(const Json& points) {
  TextTable table({"RUN", "SYSTEM", ">TENANTS", ">PROMPT", ">RATE", ">TTFT P50", ">P90", ">P99",
                   ">TBT P50", ">P99", ">TOKENS/S", ">GOODPUT", ">PREEMPTED", ">UNFINISHED",
                   ">FAILED"});
  // A peer does not tell everything.
  const auto seconds = [](double value) {
    return std::isnan(value) ? "" : absl::StrFormat("%.3f", value);
  };
  const auto percent = [](double value) {
    return std::isnan(value) ? "" : absl::StrFormat("%.1f%%", 100 * value);
  };
  for (const Json& point : points) {
    table.AddRow({TextAt(point, "run"), TextAt(point, "system"),
                  absl::StrFormat("%g", At(point, {"tenants"})),
                  At(point, {"prompt_tokens"}) == 0
                      ? "trace"
                      : absl::StrFormat("%g", At(point, {"prompt_tokens"})),
                  absl::StrFormat("%g", At(point, {"rate"})), seconds(At(point, {"ttft", "p50"})),
                  seconds(At(point, {"ttft", "p90"})), seconds(At(point, {"ttft", "p99"})),
                  seconds(At(point, {"tbt", "p50"})), seconds(At(point, {"tbt", "p99"})),
                  absl::StrFormat("%.1f", At(point, {"output_tokens_per_s"})),
                  percent(At(point, {"goodput_share"})), percent(At(point, {"preempted_share"})),
                  absl::StrFormat("%g", At(point, {"unfinished"})),
                  absl::StrFormat("%g", At(point, {"failed"}))});
  }
  return table.ToString();
}

std::vector<PlotPanel> PointPanels(const Json& points) {
  std::vector<PlotPanel> panels;
  for (const std::string& run : Different(points, "run")) {
    const Variable* const variable = Varying(points, run);
    if (variable == nullptr) continue;
    for (const Measure& measure : Measures()) {
      panels.push_back(MeasurePanel(points, run, *variable, measure));
    }
  }
  for (PlotPanel& panel : SlabPanels(points)) panels.push_back(std::move(panel));
  return panels;
}

std::string ResultText(const Json& result) {
  std::string text = "{\n";
  for (const auto& [key, value] : result.items()) {
    if (text.size() > 2) text += ",\n";
    absl::StrAppend(&text, Json(key).dump(), ": ");
    if (key != "points") {
      text += value.dump();
      continue;
    }
    text += "[";
    for (size_t i = 0; i < value.size(); ++i) {
      absl::StrAppend(&text, i == 0 ? "\n" : ",\n", value[i].dump());
    }
    text += "\n]";
  }
  return text + "\n}\n";
}

}  // namespace palimpsest::palctl
