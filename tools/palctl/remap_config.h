// What `palctl bench remap` measures: tenants, load, and the systems that are compared, from a YAML
// file. tools/bench/remap/ has examples; docs/benchmarks.md explains every key.
#ifndef PALIMPSEST_TOOLS_PALCTL_REMAP_CONFIG_H_
#define PALIMPSEST_TOOLS_PALCTL_REMAP_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "common/bytes.h"
#include "common/yaml_config.h"
#include "tools/load/latency.h"
#include "tools/load/schedule.h"
#include "tools/load/trace.h"

namespace palimpsest::palctl {

// A model that is served, its share of the memory and of the requests.
struct RemapTenant {
  std::string name;
  std::string shape;     // of dummy weights (bench_shapes.h); or
  std::string folder;    // of a checkpoint
  double share = 0;      // of `memory`
  double requests = 1;   // relative to those of the others
  Bytes workspace;       // on a GPU
  std::string settings;  // lines of YAML for the broker's entry of this tenant
};

// One way to share the memory. Lines of YAML go into configurations as they are: a system whose
// settings the broker does not know is reported as refused.
struct RemapSystem {
  std::string name;
  std::string policy;         // the broker's `policy`
  std::string pool;           // more of the broker's `pool`
  std::string tenants;        // each tenant's entry at the broker
  std::string engine;         // the workers' `engine`
  std::string tiers;          // the broker's `tiers`; empty: blocks stay in T0
  bool floors = false;        // each tenant has its floor at its share: what it is sure of
  bool fixed_shares = false;  // and its quota too: all it can have
};

// Systems under the same loads. A point for each combination; loads of a system end at the first
// rate at which less than `stop_below` of the requests are good.
struct RemapRun {
  std::string name;
  std::vector<std::string> systems;
  std::vector<double> rates;  // requests or conversations a second of all tenants, ascending
  std::vector<int32_t> prompt_tokens;  // 0: as in the trace
  std::vector<int32_t> tenants;        // how many; the first ones
};

struct RemapBenchConfig {
  std::string name;
  bool cuda = false;
  std::vector<int> gpus;
  Bytes slab;
  Bytes memory;     // of which tenants have shares; the pool is what the shares add up to
  Bytes workspace;  // of tenants that do not say, on a GPU
  Bytes context;    // of each tenant's worker beside slabs, on a GPU
  int32_t max_sequence_tokens = 0;
  std::string policy, engine;  // of all systems
  std::string arrivals_file, lengths_file;
  load::LengthRules lengths;
  // Requests are turns of the conversations in `lengths_file`.
  std::optional<load::ConversationRules> conversations;
  uint64_t seed = 0;
  absl::Duration duration;  // requests arrive for so long
  absl::Duration warm_up;   // those of its beginning do not count
  absl::Duration drain;     // and are waited for so long afterwards
  absl::Duration sample_interval;
  load::Objective objective;
  double stop_below = 0;
  bool raw_requests = false;
  std::vector<RemapTenant> tenants;
  std::vector<RemapSystem> systems;
  std::vector<RemapRun> runs;
};

// InvalidArgument lists every error with its line. Paths stay as they are written.
absl::StatusOr<RemapBenchConfig> ReadRemapBenchConfig(YamlConfig& yaml);

// One measurement.
struct RemapPoint {
  const RemapRun* run = nullptr;
  double rate = 0;
  int32_t prompt_tokens = 0;
  // Differs between loads and is the same for every system.
  uint64_t load = 0;
};

// Points that one node serves after another: those of a system with so many tenants.
struct RemapNodeRun {
  const RemapSystem* system = nullptr;
  int32_t tenants = 0;
  std::vector<RemapPoint> points;
};

// All points, as few nodes as possible, rates ascending within a run and prompt length. Points into
// `config`.
std::vector<RemapNodeRun> ExpandRuns(const RemapBenchConfig& config);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_REMAP_CONFIG_H_
