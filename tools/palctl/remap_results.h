// What `palctl bench remap` measured, as JSON, as a table and as plots. Pure.
#ifndef PALIMPSEST_TOOLS_PALCTL_REMAP_RESULTS_H_
#define PALIMPSEST_TOOLS_PALCTL_REMAP_RESULTS_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "tools/load/latency.h"
#include "tools/load/schedule.h"
#include "tools/palctl/remap_config.h"
#include "tools/palctl/svg_plot.h"

namespace palimpsest::palctl {

// What loads are made of: of the files that a configuration names.
struct RemapTraces {
  std::vector<absl::Duration> arrivals;
  std::vector<load::RequestLengths> lengths;      // without conversations
  std::vector<load::Conversation> conversations;  // with them
};

// Fields of one summary; docs/benchmarks.md lists them.
nlohmann::ordered_json SummaryJson(const load::LoadSummary& summary);

// All records of a point, of its tenants in order: the sums over all tenants, those of each under
// "by_tenant", a few different errors, and with `config.raw_requests` every request under
// "requests_raw": [due, sent, first token, end, tokens, preemptions, outcome, digest, cached
// tokens, place in the schedule].
nlohmann::ordered_json RecordsJson(const RemapBenchConfig& config,
                                   absl::Span<const std::vector<load::RequestRecord>> records);

// What vllm_remap.py replays: every load of the configuration with its requests. Not for
// conversations, whose prompts depend on answers.
nlohmann::ordered_json SchedulesJson(const RemapBenchConfig& config, const RemapTraces& traces);

// The requests of one load, for so many tenants.
std::vector<std::vector<load::ScheduledRequest>> LoadOf(const RemapBenchConfig& config,
                                                        int32_t tenants, const RemapPoint& point,
                                                        const RemapTraces& traces);

// A line for each point of "points".
std::string PointTable(const nlohmann::ordered_json& points);

// For each run in which something varies: latencies, throughput and goodput of each system against
// it. For each system: slabs over time at the highest rate that was measured with all tenants.
std::vector<PlotPanel> PointPanels(const nlohmann::ordered_json& points);
inline constexpr int kPanelColumns = 3;

// One point a line.
std::string ResultText(const nlohmann::ordered_json& result);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_REMAP_RESULTS_H_
