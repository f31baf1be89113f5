// palctl bench heads: how unequal a model's KV heads are, and what dropping the coldest costs.
#ifndef PALIMPSEST_TOOLS_PALCTL_BENCH_HEADS_H_
#define PALIMPSEST_TOOLS_PALCTL_BENCH_HEADS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "tools/palctl/commands.h"
#include "tools/palctl/heads_bench.h"

namespace palimpsest::palctl {

struct BenchHeadsOptions {
  std::string model_folder;
  std::string text_file;  // tools/load/trace.h, ParsePrompts
  int32_t sequences = 16;
  int32_t sampled_sequences = 8;
  HeadsBenchOptions bench;
  std::vector<double> keeps = {0.75, 0.5, 0.25, 0};
  std::vector<double> control_keeps = {0.75, 0.5};
  std::string profile_file;  // empty: none is written
  std::string rank_by_file;  // empty: as sampled here
  bool json = false;
};

void AddBenchHeads(CLI::App& bench, BenchHeadsOptions& options);
// Needs no node.
int RunBenchHeads(const BenchHeadsOptions& options, const Terminal& terminal);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_BENCH_HEADS_H_
