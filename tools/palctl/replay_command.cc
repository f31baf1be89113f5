#include <nlohmann/json.hpp>

#include "tools/palctl/commands.h"
#include "tools/replay/replay_report.h"

namespace palimpsest::palctl {

int RunReplay(const ReplayOptions& options, const Terminal& terminal) {
  const replay::TraceSource source{.file = options.file,
                                   .format = options.format,
                                   .starts_file = options.starts_file,
                                   .seed = options.seed};
  const absl::StatusOr<replay::Trace> trace = replay::ReadTrace(source);
  if (!trace.ok()) return Fail(terminal, trace.status());
  const auto report =
      replay::MakeReplayReport(source, *trace, options.policy,
                               {.blocks = options.blocks,
                                .history = options.history,
                                .discipline = options.leaves_first ? cache::Discipline::kLeavesFirst
                                                                   : cache::Discipline::kPlain},
                               Bytes(static_cast<int64_t>(options.token_bytes)));
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
