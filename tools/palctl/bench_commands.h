// The command line of `palctl bench`.
#ifndef PALIMPSEST_TOOLS_PALCTL_BENCH_COMMANDS_H_
#define PALIMPSEST_TOOLS_PALCTL_BENCH_COMMANDS_H_

#include <CLI/CLI.hpp>
#include <optional>

#include "tools/palctl/bench_heads.h"
#include "tools/palctl/commands.h"

namespace palimpsest::palctl {

// Each subcommand fills its own part.
struct BenchCommandLine {
  BenchControlOptions control;
  BenchEngineOptions engine;
  BenchActivationOptions activation;
  BenchRemapOptions remap;
  BenchPrefixOptions prefix;
  BenchHeadsOptions heads;
};

// `line` must outlive the parsing.
void AddBenchCommands(CLI::App& app, BenchCommandLine& line);

// After the parsing: runs the one that was asked for. Nothing if it is none of `bench` or needs a
// node that runs.
std::optional<int> RunBenchCommand(const CLI::App& app, BenchCommandLine& line,
                                   const Terminal& terminal);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_BENCH_COMMANDS_H_
