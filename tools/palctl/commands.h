// The commands of palctl. Each returns the process's exit status:
//   0 done, 1 the node refused or the request failed, 2 wrong usage, 3 nobody listens there,
//   130 interrupted.
// Results go to `out`, errors and progress to `err`.
#ifndef PALIMPSEST_TOOLS_PALCTL_COMMANDS_H_
#define PALIMPSEST_TOOLS_PALCTL_COMMANDS_H_

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>
#include <vector>

#include "absl/time/time.h"
#include "tools/palctl/node.h"

namespace palimpsest::palctl {

inline constexpr int kDone = 0;
inline constexpr int kFailed = 1;
inline constexpr int kUsage = 2;
inline constexpr int kUnreachable = 3;
inline constexpr int kInterrupted = 130;

struct Terminal {
  std::ostream& out;
  std::ostream& err;
  // Whether `out` is a terminal that can be drawn on and a key pressed at.
  bool interactive = false;
};

// Prints "palctl: MESSAGE"; the exit status that fits.
int Fail(const Terminal& terminal, const absl::Status& status);

struct StatusOptions {
  bool json = false;
  absl::Duration timeout = absl::Seconds(3);
};
int RunStatus(const Node& node, const StatusOptions& options, const Terminal& terminal);

struct TopOptions {
  absl::Duration interval = absl::Seconds(1);
  int64_t count = 0;  // snapshots; 0: until q or Ctrl-C
};
int RunTop(const Node& node, const TopOptions& options, const Terminal& terminal);

struct RemapOptions {
  bool explain = false;  // each decision; otherwise sums over all
  bool json = false;
  std::string tenant;  // empty: all
  uint32_t last = 20;
  absl::Duration timeout = absl::Seconds(3);
};
int RunRemap(const Node& node, const RemapOptions& options, const Terminal& terminal);

// What is to become of blocks; cache_hints.proto has what the fields mean.
struct CacheActionOptions {
  std::string kind;  // "retain", "demote", "prefetch", "release"
  double seconds = 0;
  double half_life = 0;  // seconds
  std::string budget;    // a size; empty: no limit
  uint32_t priority = 0;
};
absl::StatusOr<v1::CacheAction> ToCacheAction(const CacheActionOptions& options);

struct GenerateOptions {
  std::string tenant;  // empty: the only one with a token
  std::string model;
  std::vector<std::string> prompts;
  std::string prompts_file;  // one prompt a line
  bool chat = false;
  std::string earlier_file;  // of a chat: JSON, the messages before the prompt
  std::optional<uint32_t> max_tokens;
  std::optional<float> temperature;
  std::optional<uint32_t> top_k;
  std::optional<float> top_p;
  std::optional<float> min_p;
  std::optional<float> repetition_penalty;
  std::optional<uint64_t> seed;
  std::vector<std::string> stop;
  bool ignore_eos = false;
  std::optional<uint32_t> logprobs;
  std::string conversation;             // empty: none
  std::optional<double> expected_idle;  // seconds
  bool last_turn = false;
  std::string then;  // CacheActionOptions::kind; empty: nothing
  std::vector<std::string> tool_call_markers;
  bool json = false;
  bool stream = false;  // with json: a line {"delta"} for each piece of text
  int concurrency = 1;
  absl::Duration timeout = absl::Minutes(10);
};
int RunGenerate(const Node& node, const GenerateOptions& options, const Terminal& terminal);

struct HintOptions {
  std::string tenant;  // empty: the only one with a token
  std::string model;
  std::string conversation;
  CacheActionOptions action;
};
int RunHint(const Node& node, const HintOptions& options, const Terminal& terminal);

struct TokenizeOptions {
  std::string tenant;
  std::string model;
  std::string text;
  bool chat = false;
  bool json = false;
};
int RunTokenize(const Node& node, const TokenizeOptions& options, const Terminal& terminal);

struct DrainOptions {
  std::string tenant;
  absl::Duration timeout = absl::Minutes(1);
};
int RunDrain(const Node& node, const DrainOptions& options, const Terminal& terminal);

struct DoctorOptions {
  std::string block = "2 MiB";                // size of a block
  uint32_t blocks = 8;                        // through each tier
  absl::Duration timeout = absl::Minutes(1);  // of each tier
  bool json = false;
};
// kFailed if a tier does not give back what it was given.
int RunDoctor(const Node& node, const DoctorOptions& options, const Terminal& terminal);

struct LimitOptions {
  std::string tier;    // tier_names.h
  std::string tenant;  // empty: all together
  std::string bytes;   // a size
};
int RunLimit(const Node& node, const LimitOptions& options, const Terminal& terminal);

struct TrimOptions {
  std::string tier;    // empty: all
  std::string tenant;  // empty: all
  std::string keep = "0";
};
int RunTrim(const Node& node, const TrimOptions& options, const Terminal& terminal);

struct PurgeOptions {
  std::string tenant;
  absl::Duration timeout = absl::Minutes(1);
};
int RunPurge(const Node& node, const PurgeOptions& options, const Terminal& terminal);

struct EventsOptions {
  std::string tenant;     // empty: everybody's
  uint64_t count = 0;     // of events behind the snapshot; 0: until it is interrupted
  bool snapshot = false;  // only that
  bool json = false;
};
int RunEvents(const Node& node, const EventsOptions& options, const Terminal& terminal);

struct BenchControlOptions {
  int64_t calls = 2000;
  bool json = false;
};
int RunBenchControl(const Node& node, const BenchControlOptions& options, const Terminal& terminal);

struct BenchEngineOptions {
  std::string shape = "llama3-8b";  // bench_shapes.h
  bool cuda = true;
  std::vector<int> gpus = {0};
  std::string binaries;  // empty: where this program is
  std::string gemm_cache_file;
  std::vector<int32_t> batches = {1, 8, 32, 128, 256};
  std::vector<int32_t> prompts = {128, 512, 2048, 4000};
  int32_t decode_tokens = 256;
  // Decode behind long prompts; a batch of 0: none.
  int32_t long_batch = 32;
  int32_t long_prompt = 4000;
  int32_t max_step_tokens = 8192;
  int rounds = 3;
  bool vllm = true;         // measured too, where Python has it
  std::string vllm_script;  // empty: tools/bench/vllm_bench.py of the bundle or the source tree
  std::string json_file;
};
// Starts a node of its own; needs none that runs.
int RunBenchEngine(BenchEngineOptions options, const Terminal& terminal);

struct BenchActivationOptions {
  std::string shape = "llama3-8b";  // bench_shapes.h
  bool cuda = true;
  std::vector<int> gpus = {0};
  std::string binaries;  // empty: where this program is
  int32_t prompt_tokens = 128;
  int rounds = 6;
  std::string json_file;
};
// Starts a node of its own; needs none that runs.
int RunBenchActivation(BenchActivationOptions options, const Terminal& terminal);

struct BenchRemapOptions {
  std::string config_file;  // remap_config.h
  std::string traces;       // folder of the trace files; empty: that of the configuration
  std::string binaries;     // empty: where this program is
  std::string folder;       // for the nodes' own folders; empty: /tmp
  std::string json_file;
  std::string plot_file;
  std::string schedules_file;     // only write the loads there
  std::vector<std::string> from;  // measure nothing: results of earlier runs
};
// Starts nodes of its own; needs none that runs.
int RunBenchRemap(BenchRemapOptions options, const Terminal& terminal);

struct BenchPrefixOptions {
  std::string shape = "llama3-8b";  // bench_shapes.h; or
  std::string model;                // folder of a checkpoint
  bool cuda = true;
  std::vector<int> gpus = {0};
  std::string binaries;  // empty: where this program is
  std::string folder;    // for the node's own folder, with its disk tier; empty: /tmp
  int32_t prefix_tokens = 4096;
  int rounds = 5;
  std::string json_file;
};
// Starts a node of its own; needs none that runs.
int RunBenchPrefix(BenchPrefixOptions options, const Terminal& terminal);

struct PlanOptions {
  std::string config_file;            // config.json of a model
  std::vector<std::string> memories;  // SIZE, or several NAME=SIZE
  int64_t tokens = 0;                 // of a sequence
  int32_t ranks = 1;                  // of tensor parallelism; memory and results are of one
  std::string kv_dtype = "bf16";      // common/kv_format.h
  std::optional<int32_t> kv_scale_bytes;
  std::optional<int32_t> kv_scale_group;
  int64_t block_tokens = 16;
  bool json = false;
};
// Needs no node.
int RunPlan(const PlanOptions& options, const Terminal& terminal);

struct ReplayOptions {
  std::string file;
  std::string format;
  std::string starts_file;  // tools/replay/trace_formats.h
  uint64_t seed = 1;
  std::string policy = "lru";
  uint64_t blocks = 0;
  uint64_t history = 1 << 16;
  uint64_t token_bytes = 128 << 10;
  bool leaves_first = false;
  std::string hints = "none";  // tools/replay/client_hints.h
  std::string tiers_file;      // tools/replay/tier_costs.h; empty: no tiers
  bool json = false;

  // Of a replay against a running node; tools/replay/served_trace.h.
  bool serve = false;
  std::string tenant;  // empty: the only one with a token
  std::string model;   // empty: the tenant's only one
  uint64_t requests = 0;
  double speed = 1;
  int64_t block_tokens = 0;
  int64_t most_output = 64;
  std::optional<uint64_t> salt;  // none: a random one
  int64_t kv_block_tokens = 16;  // of the node
  // How long the last request may take.
  absl::Duration patience = absl::Minutes(10);
};
// Needs no node.
int RunReplay(const ReplayOptions& options, const Terminal& terminal);
// Sends what the trace holds to the node, too. kFailed if a request failed.
int RunServedReplay(const Node& node, const ReplayOptions& options, const Terminal& terminal);

// Parses the command line and runs the command.
int RunPalctl(int argc, const char* const* argv, const Terminal& terminal);

}  // namespace palimpsest::palctl

#endif  // PALIMPSEST_TOOLS_PALCTL_COMMANDS_H_
