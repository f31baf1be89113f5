// On what a measurement ran, for its results.
#ifndef PALIMPSEST_TOOLS_PALCTL_BENCH_MACHINE_H_
#define PALIMPSEST_TOOLS_PALCTL_BENCH_MACHINE_H_

#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace palimpsest::palctl {

// The commit that a bundle was built from, or of the folder that palctl runs in. Runs git; blocks.
std::string BenchCommit();

// Now, as in 2026-11-30T18:00:00Z.
std::string BenchDate();

// {"cpu", "cpus"} and, with `gpus`, {"gpu", "driver", "gpus"}. Runs nvidia-smi; blocks.
nlohmann::ordered_json BenchHardware(const std::vector<int>& gpus);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_BENCH_MACHINE_H_
