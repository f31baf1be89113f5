#include <nlohmann/json.hpp>
#include <optional>
#include <utility>

#include "common/random.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/replay_target.h"
#include "tools/replay/replay_report.h"
#include "tools/replay/served_report.h"
#include "tools/replay/served_trace.h"

namespace palimpsest::palctl {
namespace {

// What is replayed, and through what.
struct Replayed {
  replay::TraceSource source;
  replay::Trace trace;
  replay::ReplayOptions run;
  std::optional<replay::TierCosts> tiers;
};

absl::StatusOr<Replayed> Read(const ReplayOptions& options) {
  Replayed replayed{.source = {.file = options.file,
                               .format = options.format,
                               .starts_file = options.starts_file,
                               .seed = options.seed},
                    .run = {.blocks = options.blocks,
                            .history = options.history,
                            .discipline = options.leaves_first ? cache::Discipline::kLeavesFirst
                                                               : cache::Discipline::kPlain}};
  for (const auto& [name, hints] : replay::HintNames()) {
    if (name == options.hints) replayed.run.hints = hints;
  }
  if (!options.tiers_file.empty()) {
    absl::StatusOr<replay::TierCosts> costs = replay::ReadTierCosts(options.tiers_file);
    if (!costs.ok()) return costs.status();
    replayed.tiers = *std::move(costs);
    if (replayed.run.blocks == 0) replayed.run.blocks = replayed.tiers->blocks();
  }
  absl::StatusOr<replay::Trace> trace = replay::ReadTrace(replayed.source);
  if (!trace.ok()) return trace.status();
  replayed.trace = *std::move(trace);
  return replayed;
}

absl::StatusOr<replay::ReplayReport> Simulate(const Replayed& replayed,
                                              const ReplayOptions& options) {
  return replay::MakeReplayReport(replayed.source, replayed.trace, options.policy, replayed.run,
                                  Bytes(static_cast<int64_t>(options.token_bytes)), replayed.tiers);
}

void Print(const nlohmann::json& result, const Terminal& terminal) {
  terminal.out << result.dump(1, ' ', false, nlohmann::json::error_handler_t::replace) << std::endl;
}

}  // namespace

int RunReplay(const ReplayOptions& options, const Terminal& terminal) {
  const absl::StatusOr<Replayed> replayed = Read(options);
  if (!replayed.ok()) return Fail(terminal, replayed.status());
  const auto report = Simulate(*replayed, options);
  if (!report.ok()) return Fail(terminal, report.status());
  if (options.json) {
    Print(replay::ReplayJson(*report), terminal);
  } else {
    terminal.out << replay::ReplayTable(*report) << std::flush;
  }
  return kDone;
}

int RunServedReplay(const Node& node, const ReplayOptions& options, const Terminal& terminal) {
  absl::StatusOr<ReplayTarget> target = ReplayTarget::Find(node, options.tenant, options.model);
  if (!target.ok()) return Fail(terminal, target.status());
  absl::StatusOr<Replayed> replayed = Read(options);
  if (!replayed.ok()) return Fail(terminal, replayed.status());
  absl::StatusOr<replay::ServedTrace> served =
      replay::MakeServedTrace(replayed->trace, {.requests = options.requests,
                                                .speed = options.speed,
                                                .block_tokens = options.block_tokens,
                                                .most_output = options.most_output,
                                                .most_tokens = target->most_tokens()});
  if (!served.ok()) return Fail(terminal, served.status());
  replayed->trace = std::move(served->trace);
  const auto expected = Simulate(*replayed, options);
  if (!expected.ok()) return Fail(terminal, expected.status());

  replay::ServedReport report{.too_long = served->too_long,
                              .salt = options.salt.value_or(RandomSeed()),
                              .speed = options.speed,
                              .kv_block_tokens = options.kv_block_tokens};
  const absl::Status sent =
      target->Send(replayed->trace, replayed->run.hints, options.patience, terminal, report);
  if (!sent.ok()) return Fail(terminal, sent);
  if (options.json) {
    nlohmann::json result = replay::ReplayJson(*expected);
    result["served"] = replay::ServedJson(*expected, report);
    Print(result, terminal);
  } else {
    terminal.out << replay::ReplayTable(*expected) << replay::ServedTable(*expected, report)
                 << std::flush;
  }
  return report.summary.finished == report.summary.requests ? kDone : kFailed;
}

}  // namespace palimpsest::palctl
