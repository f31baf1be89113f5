// Writes what is derived from the metric table: docs/metrics.md and the Grafana dashboard.
//   generate markdown | generate dashboard | generate exposition PROCESS
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "common/metrics.h"
#include "common/metrics_table.h"

namespace palimpsest {
namespace {

using Json = nlohmann::ordered_json;

constexpr MetricProcess kProcesses[] = {MetricProcess::kBroker, MetricProcess::kWorker,
                                        MetricProcess::kRouter};

absl::string_view TypeName(MetricType type) {
  switch (type) {
    case MetricType::kCounter:
      return "counter";
    case MetricType::kGauge:
      return "gauge";
    case MetricType::kHistogram:
      return "histogram";
  }
  return "";
}

std::vector<std::string> Labels(const MetricDescriptor& metric) {
  std::vector<std::string> labels;
  for (size_t i = 0; i < metric.label_count(); ++i) labels.emplace_back(metric.labels[i]);
  return labels;
}

std::string Markdown() {
  std::string out =
      "# Metrics\n\n"
      "Each process serves these on `/metrics` at its `metrics_listen` address. This page is "
      "generated "
      "from\n`common/metrics_table.h` by `tools/metrics/update`; so is the Grafana dashboard\n"
      "`deploy/grafana/palimpsest.json`.\n";
  for (MetricProcess process : kProcesses) {
    absl::StrAppend(&out, "\n## ", std::string(MetricProcessName(process)),
                    "\n\n| name | type | labels | meaning |\n|---|---|---|---|\n");
    for (const MetricDescriptor& metric : kMetricTable) {
      if (metric.process != process) continue;
      absl::StrAppend(&out, "| `", std::string(metric.name), "` | ", TypeName(metric.type), " | ",
                      absl::StrJoin(Labels(metric), ", "), " | ", std::string(metric.help), " |\n");
    }
  }
  return out;
}

// The queries that show one metric, with their legends.
Json Targets(const MetricDescriptor& metric) {
  const std::string name(metric.name);
  const std::string by = absl::StrJoin(Labels(metric), ", ");
  std::vector<std::string> legend;
  for (const std::string& label : Labels(metric)) legend.push_back(absl::StrCat("{{", label, "}}"));
  const std::string legend_text = legend.empty() ? "{{instance}}" : absl::StrJoin(legend, " ");
  const std::string group = by.empty() ? "instance" : by;
  Json targets = Json::array();
  auto add = [&](const std::string& expression, const std::string& text) {
    targets.push_back({{"refId", std::string(1, static_cast<char>('A' + targets.size()))},
                       {"datasource", {{"type", "prometheus"}, {"uid", "${datasource}"}}},
                       {"expr", expression},
                       {"legendFormat", text}});
  };
  switch (metric.type) {
    case MetricType::kGauge:
      add(absl::StrCat("sum by (", group, ") (", name, ")"), legend_text);
      break;
    case MetricType::kCounter:
      add(absl::StrCat("sum by (", group, ") (rate(", name, "[$__rate_interval]))"), legend_text);
      break;
    case MetricType::kHistogram:
      for (absl::string_view quantile : {"0.5", "0.99"}) {
        add(absl::StrCat("histogram_quantile(", quantile, ", sum by (le, ", group, ") (rate(", name,
                         "_bucket[$__rate_interval])))"),
            absl::StrCat("p", quantile == "0.5" ? "50" : "99", " ", legend_text));
      }
      break;
  }
  return targets;
}

std::string PanelUnit(const MetricDescriptor& metric) {
  if (metric.type == MetricType::kCounter) return metric.unit == MetricUnit::kBytes ? "Bps" : "ops";
  if (metric.unit == MetricUnit::kSeconds) return "s";
  return metric.unit == MetricUnit::kBytes ? "bytes" : "short";
}

Json Panel(const MetricDescriptor& metric, int id, int x, int y) {
  // Shares of the pool read best stacked.
  const bool stacked = metric.name.find("slabs") != std::string_view::npos &&
                       metric.label_count() > 0 && metric.type == MetricType::kGauge;
  return {{"id", id},
          {"type", "timeseries"},
          {"title", std::string(metric.name.substr(std::string_view("palimpsest_").size()))},
          {"description", std::string(metric.help)},
          {"datasource", {{"type", "prometheus"}, {"uid", "${datasource}"}}},
          {"gridPos", {{"h", 7}, {"w", 8}, {"x", x}, {"y", y}}},
          {"fieldConfig",
           {{"defaults",
             {{"unit", PanelUnit(metric)},
              {"min", 0},
              {"custom",
               {{"fillOpacity", stacked ? 60 : 10},
                {"stacking", {{"mode", stacked ? "normal" : "none"}}}}}}},
            {"overrides", Json::array()}}},
          {"targets", Targets(metric)}};
}

Json Dashboard() {
  Json panels = Json::array();
  int id = 1;
  int y = 0;
  for (MetricProcess process : kProcesses) {
    panels.push_back({{"id", id++},
                      {"type", "row"},
                      {"title", std::string(MetricProcessName(process))},
                      {"collapsed", false},
                      {"gridPos", {{"h", 1}, {"w", 24}, {"x", 0}, {"y", y++}}},
                      {"panels", Json::array()}});
    int x = 0;
    for (const MetricDescriptor& metric : kMetricTable) {
      if (metric.process != process) continue;
      panels.push_back(Panel(metric, id++, x, y));
      x += 8;
      if (x == 24) {
        x = 0;
        y += 7;
      }
    }
    if (x != 0) y += 7;
  }
  return {{"uid", "palimpsest"},
          {"title", "Palimpsest"},
          {"tags", {"palimpsest"}},
          {"schemaVersion", 39},
          {"editable", true},
          {"refresh", "5s"},
          {"time", {{"from", "now-15m"}, {"to", "now"}}},
          {"templating",
           {{"list", Json::array({{{"name", "datasource"},
                                   {"label", "Data source"},
                                   {"type", "datasource"},
                                   {"query", "prometheus"}}})}}},
          {"panels", panels}};
}

int Run(absl::Span<char* const> args) {
  const absl::string_view what = args.size() > 1 ? args[1] : "";
  if (what == "markdown" && args.size() == 2) {
    std::cout << Markdown();
    return 0;
  }
  if (what == "dashboard" && args.size() == 2) {
    std::cout << Dashboard().dump(1) << "\n";
    return 0;
  }
  if (what == "exposition" && args.size() == 3) {
    for (MetricProcess process : kProcesses) {
      if (MetricProcessName(process) != args[2]) continue;
      std::cout << Metrics(process).Text();
      return 0;
    }
  }
  std::cerr << "usage: generate markdown | dashboard | exposition broker|worker|router\n";
  return 2;
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) {
  return palimpsest::Run(absl::MakeConstSpan(argv, static_cast<size_t>(argc)));
}
