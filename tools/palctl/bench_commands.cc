#include "tools/palctl/bench_commands.h"

#include <string>
#include <utility>

#include "tools/palctl/bench_shapes.h"

namespace palimpsest::palctl {
namespace {

void AddBinaries(CLI::App& command, std::string& binaries) {
  command.add_option(
      "--binaries", binaries,
      "folder of the programs: bin/ of a bundle, or bazel-bin (default: where palctl is)");
}

void AddDevice(CLI::App& command, bool& cuda) {
  command
      .add_option_function<std::string>(
          "--device", [&cuda](const std::string& device) { cuda = device == "cuda"; },
          "cuda (the default) or cpu")
      ->check(CLI::IsMember({"cuda", "cpu"}));
}

void AddBenchEngine(CLI::App& bench, BenchEngineOptions& options) {
  CLI::App* engine = bench.add_subcommand(
      "engine",
      "starts a broker and a worker with dummy weights and measures decode steps, first tokens and "
      "the worker's start, through the worker's gRPC interface; then vLLM on the same workload, if "
      "Python has it");
  engine->add_option("--shape", options.shape, "the model's shape")
      ->check(CLI::IsMember(BenchShapes()))
      ->capture_default_str();
  engine->add_option("--json", options.json_file, "write the results to this file")
      ->type_name("FILE");
  AddDevice(*engine, options.cuda);
  const auto numbers = [engine](const char* name, auto& list, const char* help) {
    engine->add_option(name, list, help)->delimiter(',')->capture_default_str();
  };
  numbers("--gpus", options.gpus, "which GPUs; several share the model (tensor parallel)");
  numbers("--batches", options.batches, "batch sizes of decode steps");
  numbers("--prompts", options.prompts, "prompt lengths for first tokens");
  const auto number = [engine](const char* name, auto& value, int least, const char* help) {
    engine->add_option(name, value, help)->check(CLI::Range(least, 1 << 20))->capture_default_str();
  };
  number("--decode-tokens", options.decode_tokens, 1, "decode steps of a measurement");
  number("--long-batch", options.long_batch, 0, "batch size behind long prompts; 0: none");
  number("--long-prompt", options.long_prompt, 1, "their length");
  number("--max-step-tokens", options.max_step_tokens, 1, "the worker's engine.max_step_tokens");
  number("--rounds", options.rounds, 1, "measurements of each decode; the median counts");
  AddBinaries(*engine, options.binaries);
  engine->add_option("--gemm-cache", options.gemm_cache_file,
                     "file of matrix products' algorithms (default: measured anew)");
  engine->add_flag("!--no-vllm", options.vllm, "leave vLLM out");
  engine->add_option("--vllm-script", options.vllm_script,
                     "default: tools/bench/vllm_bench.py of the bundle or the source tree");
}

void AddBenchActivation(CLI::App& bench, BenchActivationOptions& options) {
  CLI::App* activation = bench.add_subcommand(
      "activation",
      "starts a node with two tenants whose images do not fit together, and measures how long a "
      "request to the one without memory waits for its first token");
  activation->add_option("--shape", options.shape, "the models' shape")
      ->check(CLI::IsMember(BenchShapes()))
      ->capture_default_str();
  activation->add_option("--json", options.json_file, "write the results to this file")
      ->type_name("FILE");
  AddDevice(*activation, options.cuda);
  activation->add_option("--gpus", options.gpus, "several share each model (tensor parallel)")
      ->delimiter(',')
      ->capture_default_str();
  activation->add_option("--prompt", options.prompt_tokens, "tokens of the request")
      ->check(CLI::Range(1, 8000))
      ->capture_default_str();
  activation->add_option("--rounds", options.rounds, "activations; the median counts")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  AddBinaries(*activation, options.binaries);
}

void AddBenchRemap(CLI::App& bench, BenchRemapOptions& options) {
  CLI::App* remap = bench.add_subcommand(
      "remap",
      "starts a node under one system after another (ways to share memory among tenants, tiers "
      "for KV blocks), sends all the same traffic or conversations from traces, and reports "
      "latencies, throughput, where the memory was and where hits came from");
  remap
      ->add_option("--config", options.config_file,
                   "what to measure; see tools/bench/remap and tools/bench/tiers")
      ->type_name("FILE");
  remap
      ->add_option("--traces", options.traces,
                   "folder of the trace files (default: that of the configuration)")
      ->type_name("FOLDER");
  remap->add_option("--json", options.json_file, "write the results to this file")
      ->type_name("FILE");
  remap->add_option("--plot", options.plot_file, "draw them in this SVG file")->type_name("FILE");
  remap
      ->add_option("--schedules", options.schedules_file,
                   "only write the loads to this file, for tools/bench/vllm_remap.py")
      ->type_name("FILE");
  remap
      ->add_option("--from", options.from,
                   "measure nothing: show results that these files hold, together")
      ->type_name("FILE");
  AddBinaries(*remap, options.binaries);
  remap->add_option("--folder", options.folder, "where the nodes and their disk tiers are")
      ->type_name("FOLDER");
}

void AddBenchPrefix(CLI::App& bench, BenchPrefixOptions& options) {
  CLI::App* prefix = bench.add_subcommand(
      "prefix",
      "starts a node with host memory and a disk below T0, and measures the time to the first "
      "token of a prompt whose prefix is computed, in T0, in host memory or on the disk");
  CLI::Option* const shape = prefix->add_option("--shape", options.shape, "the model's shape")
                                 ->check(CLI::IsMember(BenchShapes()))
                                 ->capture_default_str();
  prefix->add_option("--model", options.model, "a checkpoint in place of a shape")
      ->type_name("FOLDER")
      ->excludes(shape);
  AddDevice(*prefix, options.cuda);
  prefix->add_option("--gpus", options.gpus, "several share the model (tensor parallel)")
      ->delimiter(',')
      ->capture_default_str();
  prefix->add_option("--prefix", options.prefix_tokens, "its tokens, whole blocks of 16")
      ->check(CLI::Range(16, 1 << 20))
      ->capture_default_str();
  prefix->add_option("--rounds", options.rounds, "measurements of each kind; medians count")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  prefix->add_option("--json", options.json_file, "write the results to this file")
      ->type_name("FILE");
  prefix->add_option("--folder", options.folder, "where the node and its disk tier are")
      ->type_name("FOLDER");
  AddBinaries(*prefix, options.binaries);
}

}  // namespace

void AddBenchCommands(CLI::App& app, BenchCommandLine& line) {
  CLI::App* bench = app.add_subcommand("bench", "measurements");
  bench->require_subcommand(1);
  CLI::App* control = bench->add_subcommand(
      "control", "p50 and p99 of a control round trip to the broker over its Unix socket");
  control->add_option("--calls", line.control.calls, "round trips to measure")
      ->check(CLI::Range(1, 10'000'000))
      ->capture_default_str();
  control->add_flag("--json", line.control.json, "{calls, answer_bytes, p50_seconds, p99_seconds}");
  AddBenchEngine(*bench, line.engine);
  AddBenchActivation(*bench, line.activation);
  AddBenchRemap(*bench, line.remap);
  AddBenchPrefix(*bench, line.prefix);
  AddBenchHeads(*bench, line.heads);
}

std::optional<int> RunBenchCommand(const CLI::App& app, BenchCommandLine& line,
                                   const Terminal& terminal) {
  if (!app.got_subcommand("bench")) return std::nullopt;
  const CLI::App& bench = *app.get_subcommand("bench");
  if (bench.got_subcommand("engine")) return RunBenchEngine(std::move(line.engine), terminal);
  if (bench.got_subcommand("activation")) {
    return RunBenchActivation(std::move(line.activation), terminal);
  }
  if (bench.got_subcommand("remap")) return RunBenchRemap(std::move(line.remap), terminal);
  if (bench.got_subcommand("heads")) return RunBenchHeads(line.heads, terminal);
  if (bench.got_subcommand("prefix")) return RunBenchPrefix(std::move(line.prefix), terminal);
  return std::nullopt;
}

}  // namespace palimpsest::palctl
