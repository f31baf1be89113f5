#include <nlohmann/json.hpp>

#include "tools/palctl/commands.h"
#include "tools/replay/replay_report.h"

namespace palimpsest::palctl {

int RunReplay(const ReplayOptions& options, const Terminal& terminal) {
  const replay::TraceSource source{.file = options.file,
                                   .format = options.format,
                                   .starts_file = options.starts_file,
                                   .seed = options.seed};
  replay::ReplayOptions run{.blocks = options.blocks,
                            .history = options.history,
                            .discipline = options.leaves_first ? cache::Discipline::kLeavesFirst
                                                               : cache::Discipline::kPlain};
  for (const auto& [name, hints] : replay::HintNames()) {
    if (name == options.hints) run.hints = hints;
  }
  std::optional<replay::TierCosts> tiers;
  if (!options.tiers_file.empty()) {
    absl::StatusOr<replay::TierCosts> costs = replay::ReadTierCosts(options.tiers_file);
    if (!costs.ok()) return Fail(terminal, costs.status());
    tiers = *std::move(costs);
    if (run.blocks == 0) run.blocks = tiers->blocks();
  }
  const absl::StatusOr<replay::Trace> trace = replay::ReadTrace(source);
  if (!trace.ok()) return Fail(terminal, trace.status());
  const auto report = replay::MakeReplayReport(
      source, *trace, options.policy, run, Bytes(static_cast<int64_t>(options.token_bytes)), tiers);
  if (!report.ok()) return Fail(terminal, report.status());
  if (options.json) {
    terminal.out << replay::ReplayJson(*report).dump(1, ' ', false,
                                                     nlohmann::json::error_handler_t::replace)
                 << std::endl;
  } else {
    terminal.out << replay::ReplayTable(*report) << std::flush;
  }
  return kDone;
}

}  // namespace palimpsest::palctl
