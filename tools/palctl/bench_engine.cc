// palctl bench engine: the whole engine on a model of dummy weights, beside vLLM where that is.
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <iterator>
#include <nlohmann/json.hpp>
#include <system_error>
#include <utility>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/time/clock.h"
#include "common/fd.h"
#include "common/file.h"
#include "common/process.h"
#include "tools/palctl/bench_node.h"
#include "tools/palctl/bench_shapes.h"
#include "tools/palctl/commands.h"
#include "tools/palctl/text_table.h"

namespace palimpsest::palctl {
namespace {

using Json = nlohmann::ordered_json;
namespace fs = std::filesystem;

constexpr int32_t kPrompt = 128;
constexpr int32_t kLongContextTokens = 64;
constexpr int kFirstTokenRounds = 5;
constexpr Bytes kWorkspace = GiB(3);
constexpr absl::Duration kLongestPeer = absl::Minutes(9);
constexpr absl::Duration kLongestLook = absl::Seconds(30);
constexpr Bytes kLongestLog = MiB(16);
constexpr size_t kLogEnd = 2000;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double Milliseconds(absl::Duration duration) { return absl::ToDoubleMilliseconds(duration); }

// Milliseconds of a step's parts between two readings of the worker's sums.
Json Split(const v1::StepTotals& before, const v1::StepTotals& after) {
  const auto mean = [](double seconds, uint64_t count) {
    return count == 0 ? 0.0 : 1e3 * seconds / static_cast<double>(count);
  };
  const uint64_t steps = after.steps() - before.steps();
  return {
      {"steps", steps},
      {"graph_steps", after.graph_steps() - before.graph_steps()},
      {"schedule_ms", mean(after.schedule_seconds() - before.schedule_seconds(), steps)},
      {"launch_ms", mean(after.launch_seconds() - before.launch_seconds(), steps)},
      {"wait_ms", mean(after.wait_seconds() - before.wait_seconds(), steps)},
      {"commit_ms", mean(after.commit_seconds() - before.commit_seconds(), steps)},
      {"stream_ms", mean(after.stream_seconds() - before.stream_seconds(), steps)},
      {"device_ms", mean(after.device_seconds() - before.device_seconds(),
                         after.device_steps() - before.device_steps())},
      {"sample_ms", mean(after.sampling_seconds() - before.sampling_seconds(),
                         after.sampling_steps() - before.sampling_steps())},
  };
}

// Time of a decode step: what `tokens` more tokens add to the time of one, as vllm_bench.py does
// it.
absl::StatusOr<Json> MeasureDecode(BenchClient& client, int32_t batch, int32_t prompt,
                                   int32_t tokens, int rounds) {
  std::vector<double> steps;
  Json split;
  for (int round = 0; round < rounds; ++round) {
    const auto one = client.Ask(batch, prompt, 1);
    if (!one.ok()) return one.status();
    const auto before = client.Stats();
    if (!before.ok()) return before.status();
    const auto all = client.Ask(batch, prompt, 1 + tokens);
    if (!all.ok()) return all.status();
    const auto after = client.Stats();
    if (!after.ok()) return after.status();
    steps.push_back(Milliseconds(all->all - one->all) / tokens);
    split = Split(before->steps(), after->steps());
  }
  const double step = Median(steps);
  return Json{{"batch", batch},
              {"prompt_tokens", prompt},
              {"ms_step", step},
              {"ms_step_least", *std::min_element(steps.begin(), steps.end())},
              {"ms_step_most", *std::max_element(steps.begin(), steps.end())},
              {"tokens_per_s", batch * 1e3 / step},
              {"engine", std::move(split)}};
}

absl::StatusOr<Json> MeasureFirstToken(BenchClient& client, int32_t prompt) {
  std::vector<double> times;
  for (int round = 0; round < kFirstTokenRounds; ++round) {
    const auto answer = client.Ask(1, prompt, 1);
    if (!answer.ok()) return answer.status();
    times.push_back(Milliseconds(answer->first_token));
  }
  return Json{{"tokens", prompt},
              {"ms", *std::min_element(times.begin(), times.end())},
              {"ms_median", Median(times)}};
}

Json ReadinessJson(const BenchNode::Readiness& readiness) {
  return {{"serving_ms", Milliseconds(readiness.serving)},
          {"resident_ms", Milliseconds(readiness.resident)},
          {"first_token_ms", Milliseconds(readiness.first_token)}};
}

absl::StatusOr<Json> MeasureWorkload(BenchClient& client, const BenchEngineOptions& options,
                                     const Terminal& terminal) {
  Json result;
  // Graphs, caches and clocks are warm afterwards.
  if (const auto warm = client.Ask(4, kPrompt, 32); !warm.ok()) return warm.status();
  for (const int32_t batch : options.batches) {
    auto measured = MeasureDecode(client, batch, kPrompt, options.decode_tokens, options.rounds);
    if (!measured.ok()) return measured.status();
    terminal.err << "decode " << measured->dump() << std::endl;
    result["decode"].push_back(*std::move(measured));
  }
  for (const int32_t prompt : options.prompts) {
    auto measured = MeasureFirstToken(client, prompt);
    if (!measured.ok()) return measured.status();
    terminal.err << "first token " << measured->dump() << std::endl;
    result["first_token"].push_back(*std::move(measured));
  }
  if (options.long_batch > 0) {
    auto measured = MeasureDecode(client, options.long_batch, options.long_prompt,
                                  kLongContextTokens, /*rounds=*/1);
    if (!measured.ok()) return measured.status();
    terminal.err << "long context " << measured->dump() << std::endl;
    result["long_context"] = *std::move(measured);
  }
  return result;
}

// KV tokens of the largest thing that is measured.
int64_t KvTokens(const BenchEngineOptions& options) {
  const int64_t batch = *std::max_element(options.batches.begin(), options.batches.end());
  int64_t tokens = batch * (kPrompt + options.decode_tokens + 1);
  tokens = std::max(tokens,
                    int64_t{options.long_batch} * (options.long_prompt + kLongContextTokens + 1));
  for (const int32_t prompt : options.prompts) tokens = std::max<int64_t>(tokens, prompt + 1);
  return tokens;
}

absl::StatusOr<Json> MeasureNode(const BenchEngineOptions& options, const std::string& config,
                                 const Terminal& terminal) {
  BenchNodeOptions node_options;
  node_options.binaries = options.binaries;
  node_options.config = config;
  node_options.cuda = options.cuda;
  node_options.gpus = options.gpus;
  node_options.max_batch = std::max(
      options.long_batch, *std::max_element(options.batches.begin(), options.batches.end()));
  node_options.max_step_tokens = options.max_step_tokens;
  int32_t longest =
      std::max(kPrompt + options.decode_tokens + 1, options.long_prompt + kLongContextTokens + 1);
  for (const int32_t prompt : options.prompts) longest = std::max(longest, prompt + 1);
  node_options.max_sequence_tokens = longest;
  node_options.kv_tokens = KvTokens(options);
  node_options.workspace = kWorkspace;
  node_options.gemm_cache_file = options.gemm_cache_file;
  const auto node = BenchNode::Start(node_options);
  if (!node.ok()) return node.status();
  const auto first = (*node)->StartWorker();
  if (!first.ok()) return first.status();
  if (absl::Status status = (*node)->StopWorker(); !status.ok()) return status;
  const auto again = (*node)->StartWorker();
  if (!again.ok()) return again.status();
  terminal.err << "worker start " << ReadinessJson(*again).dump() << std::endl;
  auto result = MeasureWorkload((*node)->client(), options, terminal);
  if (!result.ok()) {
    return absl::Status(result.status().code(),
                        absl::StrCat(result.status().message(), "\n", (*node)->LogEnds()));
  }
  (*result)["parameter_bytes"] = (*node)->image_bytes().count();
  (*result)["start"] = ReadinessJson(*again);
  (*result)["first_start"] = ReadinessJson(*first);
  if (absl::Status status = (*node)->StopWorker(); !status.ok()) return status;
  return result;
}

// Runs Python with our environment; its output goes to `log` (-1: ours).
absl::Status RunPython(std::vector<std::string> arguments, int log, absl::Duration timeout) {
  SpawnOptions options;
  options.argv = {"/usr/bin/env", "python3"};
  std::move(arguments.begin(), arguments.end(), std::back_inserter(options.argv));
  for (char** variable = environ; *variable != nullptr; ++variable) {
    options.environment.push_back(*variable);
  }
  options.output = log;
  auto process = ChildProcess::Spawn(options);
  if (!process.ok()) return process.status();
  return process->Wait(timeout);
}

bool HasVllm() {
  constexpr char kLook[] =
      "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)";
  return RunPython({"-c", kLook}, -1, kLongestLook).ok();
}

// What vllm_bench.py says; it runs when everything of ours has ended.
absl::StatusOr<Json> MeasureVllm(const BenchEngineOptions& options, const std::string& config) {
  std::string folder = "/tmp/palimpsest-peer.XXXXXX";
  if (mkdtemp(folder.data()) == nullptr) return ErrnoStatus("cannot make a folder in /tmp");
  const auto remove = absl::MakeCleanup([&folder] {
    std::error_code ignored;
    fs::remove_all(folder, ignored);
  });
  if (absl::Status status = WriteBenchModel(folder, config); !status.ok()) return status;
  const std::string out = folder + "/vllm.json", log_file = folder + "/log";
  const UniqueFd log(open(log_file.c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
  const absl::Status status =
      RunPython({options.vllm_script, folder, out, "--batches", absl::StrJoin(options.batches, ","),
                 "--prompts", absl::StrJoin(options.prompts, ","), "--decode-tokens",
                 absl::StrCat(options.decode_tokens), "--rounds", absl::StrCat(options.rounds),
                 "--long-batch", absl::StrCat(options.long_batch), "--long-prompt",
                 absl::StrCat(options.long_prompt), "--gpus", absl::StrCat(options.gpus.size())},
                log.get(), kLongestPeer);
  const auto text = ReadFile(out, MiB(1));
  if (status.ok() && text.ok()) {
    Json result = Json::parse(*text, nullptr, /*allow_exceptions=*/false);
    if (result.is_object()) return result;
  }
  const std::string said = ReadFile(log_file, kLongestLog).value_or("");
  return absl::InternalError(absl::StrCat(
      "vLLM: ", status.message(), "\n", said.substr(said.size() - std::min(said.size(), kLogEnd))));
}

std::string Cell(const Json& all, const char* list, const char* key, int64_t value,
                 const char* field) {
  if (!all.contains(list)) return "";
  for (const Json& row : all[list]) {
    if (row[key] == value) return absl::StrFormat("%.2f", row[field].get<double>());
  }
  return "";
}

std::string Table(const Json& result) {
  const Json& ours = result["palimpsest"];
  const Json peer = result.value("vllm", Json::object());
  TextTable table({"MEASURED", ">PALIMPSEST", ">VLLM", ">DEVICE", ">SCHEDULE", ">LAUNCH", ">COMMIT",
                   ">STREAM"});
  const auto number = [](const Json& value) {
    return absl::StrFormat("%.3f", value.get<double>());
  };
  const auto add = [&](const std::string& what, const Json& row, const std::string& theirs) {
    const Json& engine = row["engine"];
    table.AddRow({what, number(row["ms_step"]), theirs, number(engine["device_ms"]),
                  number(engine["schedule_ms"]), number(engine["launch_ms"]),
                  number(engine["commit_ms"]), number(engine["stream_ms"])});
  };
  for (const Json& row : ours["decode"]) {
    add(absl::StrCat("ms a step at batch ", row["batch"].get<int>()), row,
        Cell(peer, "decode", "batch", row["batch"], "ms_step"));
  }
  if (ours.contains("long_context")) {
    const Json& row = ours["long_context"];
    add(absl::StrCat("ms a step at batch ", row["batch"].get<int>(), " behind ",
                     row["prompt_tokens"].get<int>(), " tokens"),
        row, peer.contains("long_context") ? number(peer["long_context"]["ms_step"]) : "");
  }
  for (const Json& row : ours["first_token"]) {
    table.AddRow({absl::StrCat("ms to the first token of ", row["tokens"].get<int>()),
                  number(row["ms"]), Cell(peer, "first_token", "tokens", row["tokens"], "ms")});
  }
  if (ours.contains("start")) {
    for (const char* what : {"serving_ms", "resident_ms", "first_token_ms"}) {
      table.AddRow({absl::StrCat("worker start, ", what), number(ours["start"][what])});
    }
  }
  return table.ToString();
}

absl::Status FillMissing(BenchEngineOptions& options) {
  std::error_code error;
  const fs::path self = fs::read_symlink("/proc/self/exe", error).parent_path();
  if (options.binaries.empty()) options.binaries = DefaultBinaries();
  if (options.vllm_script.empty()) {
    for (const fs::path& root : {self.parent_path(), fs::path(".")}) {
      const fs::path script = root / "tools/bench/vllm_bench.py";
      if (fs::exists(script, error)) options.vllm_script = script.string();
    }
  }
  if (options.batches.empty() || options.prompts.empty() || options.gpus.empty()) {
    return absl::InvalidArgumentError("--batches, --prompts and --gpus need at least one number");
  }
  return absl::OkStatus();
}

}  // namespace

int RunBenchEngine(BenchEngineOptions options, const Terminal& terminal) {
  if (absl::Status status = FillMissing(options); !status.ok()) return Fail(terminal, status);
  const auto config = BenchShapeConfig(options.shape);
  if (!config.ok()) return Fail(terminal, config.status());
  Json result = {{"shape", options.shape},
                 {"date", absl::FormatTime("%Y-%m-%dT%H:%M:%SZ", absl::Now(), absl::UTCTimeZone())},
                 {"device", options.cuda ? "cuda" : "cpu"},
                 {"gpus", options.gpus},
                 {"rounds", options.rounds}};
  auto ours = MeasureNode(options, *config, terminal);
  if (!ours.ok()) return Fail(terminal, ours.status());
  result["palimpsest"] = *std::move(ours);
  int code = kDone;
  if (options.cuda && options.vllm && !options.vllm_script.empty() && HasVllm()) {
    auto theirs = MeasureVllm(options, *config);
    if (theirs.ok()) {
      result["vllm"] = *std::move(theirs);
    } else {
      result["vllm_error"] = std::string(theirs.status().message());
      code = Fail(terminal, theirs.status());
    }
  }
  if (!options.json_file.empty()) {
    absl::Status status = WriteFileAtomically(options.json_file, result.dump(1) + "\n");
    if (!status.ok()) return Fail(terminal, status);
  }
  terminal.out << Table(result) << std::flush;
  return code;
}

}  // namespace palimpsest::palctl
