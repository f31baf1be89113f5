// Measures the GPU runner on random weights of a real model's shape: decode time by batch size,
// time to the first token by prompt length; decode time by the number of layers that gave their
// memory away. Prints one JSON object; no broker, no gRPC.
#include <cuda_profiler_api.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fstream>
#include <iostream>
#include <map>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "CLI/CLI.hpp"
#include "common/cuda/status.h"
#include "common/rotation.h"
#include "nlohmann/json.hpp"
#include "worker/compute/cuda/collective_bench.h"
#include "worker/compute/cuda/gpu_model.h"
#include "worker/compute/cuda/layer_copies.h"

namespace palimpsest::cuda {
namespace {

using Json = nlohmann::ordered_json;
using Clock = std::chrono::steady_clock;

double Milliseconds(Clock::time_point since) {
  return std::chrono::duration<double, std::milli>(Clock::now() - since).count();
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

[[noreturn]] void Die(const absl::Status& status) {
  std::cerr << "gpu_bench: " << status << "\n";
  std::exit(EXIT_FAILURE);
}

template <typename T>
T ValueOrDie(absl::StatusOr<T> value) {
  if (!value.ok()) Die(value.status());
  return *std::move(value);
}

void OkOrDie(const absl::Status& status) {
  if (!status.ok()) Die(status);
}

ModelConfig Shape(const std::string& name) {
  ModelConfig c;
  c.architecture = "LlamaForCausalLM";
  c.head_dim = 128;
  c.max_position = 8192;
  if (name == "llama3-8b") {
    c.num_layers = 32;
    c.hidden_size = 4096;
    c.num_heads = 32;
    c.num_kv_heads = 8;
    c.intermediate_size = 14336;
    c.vocab_size = 128256;
    c.rope_theta = 500000;
  } else if (name == "llama2-13b") {
    c.num_layers = 40;
    c.hidden_size = 5120;
    c.num_heads = c.num_kv_heads = 40;
    c.intermediate_size = 13824;
    c.vocab_size = 32000;
  } else if (name == "deepseek-v2-lite") {
    // Its attention, and the MLP of its first layer in all of them.
    c.num_layers = 27;
    c.hidden_size = 2048;
    c.num_heads = 16;
    c.num_kv_heads = 1;
    c.head_dim = 192;
    c.intermediate_size = 10944;
    c.vocab_size = 102400;
    c.latent = LatentAttention{
        .kv_lora_rank = 512, .qk_nope_head_dim = 128, .qk_rope_head_dim = 64, .v_head_dim = 128};
  } else {
    return ValueOrDie(ReadModelConfig(name));
  }
  return c;
}

class Bench {
 public:
  Bench(GpuModel& model, const CudaRunnerOptions& options)
      : model_(model), block_tokens_(options.block_tokens) {
    const auto start = Clock::now();
    runner_ = ValueOrDie(model.NewRunner());
    start_ms_ = Milliseconds(start);
  }

  GpuRunner& runner() { return *runner_; }
  double start_ms() const { return start_ms_; }

  // Decodes `steps` tokens of `batch` sequences that hold `context` tokens, two steps in flight.
  // Returns the wall time of a step.
  double Decode(int32_t batch, int32_t context, int32_t steps) {
    Open(batch, context + steps + 1);
    StepPlan plan = Plan(batch, context, -1);
    OkOrDie(runner_->Submit(plan));
    const auto start = Clock::now();
    stall_ = absl::ZeroDuration();
    copied_ = Bytes(0);
    for (int32_t step = 1; step <= steps; ++step) {
      OkOrDie(runner_->Submit(Plan(batch, context + step, 0)));
      const StepResult result = ValueOrDie(runner_->Wait());
      stall_ += result.times.rotation_stall;
      copied_ += result.rotation_bytes;
    }
    const double time = Milliseconds(start);
    ValueOrDie(runner_->Wait());
    return time / steps;
  }
  // Of the steps of the last Decode: waiting for rotating layers, and bytes copied for them.
  absl::Duration stall() const { return stall_; }
  Bytes copied() const { return copied_; }

  // Until the graphs of the present rotation are there; ranks build theirs when they need them.
  void AwaitGraphs() const {
    const auto missing = [&] {
      const CudaRunnerStats stats = runner_->stats();
      return stats.rotation_graphs.graphs < stats.graphs.graphs;
    };
    while (model_.ranks() == 1 && missing()) std::this_thread::yield();
  }

  // Milliseconds that one layer's copy from the image takes by itself.
  double CopyLayer() const {
    const ModelMemory& memory = model_.memory(0);
    const ImageLayout& layout = model_.layout();
    const auto bytes = static_cast<size_t>(LayerBytes(layout, 0).count());
    const int64_t at = (layout.slab_bytes * layout.stages[1].first_slab).count();
    std::vector<double> times;
    for (int repeat = 0; repeat < 7; ++repeat) {
      const auto start = Clock::now();
      OkOrDie(CudaStatus(cudaMemcpyAsync(const_cast<std::byte*>(memory.parameters) + at,
                                         memory.image.front().data + at, bytes, cudaMemcpyDefault,
                                         cudaStreamPerThread),
                         "copy a layer"));
      OkOrDie(CudaStatus(cudaStreamSynchronize(cudaStreamPerThread), "copy a layer"));
      times.push_back(Milliseconds(start));
    }
    return Median(times);
  }

  // One decode step at a time, timed by events on the GPU.
  double DecodeOnGpu(int32_t batch, int32_t context, int32_t steps) {
    Open(batch, context + steps + 1);
    runner_->SetTiming(true);
    std::vector<double> times;
    for (int32_t step = 0; step < steps; ++step) {
      OkOrDie(runner_->Submit(Plan(batch, context + step, -1)));
      const StepResult result = ValueOrDie(runner_->Wait());
      times.push_back(absl::ToDoubleMilliseconds(result.times.device));
    }
    runner_->SetTiming(false);
    return Median(times);
  }

  // From Submit to the first token of a prompt.
  Json FirstToken(int32_t tokens) {
    Open(1, tokens);
    std::vector<TokenId> prompt(static_cast<size_t>(tokens));
    for (int32_t i = 0; i < tokens; ++i) prompt[i] = (i * 7919 + 13) % model_.config().vocab_size;
    StepPlan plan;
    plan.chunks.push_back({prompt, 0, tables_[0], &greedy_});
    std::vector<double> times;
    for (int repeat = 0; repeat < 7; ++repeat) {
      const auto start = Clock::now();
      OkOrDie(runner_->Submit(plan));
      ValueOrDie(runner_->Wait());
      if (repeat > 0) times.push_back(Milliseconds(start));
    }
    return {{"tokens", tokens},
            {"ms", Median(times)},
            {"ms_min", *std::min_element(times.begin(), times.end())}};
  }

  // One step between the profiler's marks.
  void Profile(int32_t batch, int32_t context) {
    Open(batch, context + 8);
    for (int32_t step = 0; step < 4; ++step) {
      if (step == 3) cudaProfilerStart();
      OkOrDie(runner_->Submit(Plan(batch, context + step, -1)));
      ValueOrDie(runner_->Wait());
    }
    cudaProfilerStop();
  }
  void ProfilePrompt(int32_t tokens) {
    FirstToken(tokens);
    cudaProfilerStart();
    Open(1, tokens);
    const std::vector<TokenId> prompt(static_cast<size_t>(tokens), 17);
    StepPlan plan;
    plan.chunks.push_back({prompt, 0, tables_[0], &greedy_});
    OkOrDie(runner_->Submit(plan));
    ValueOrDie(runner_->Wait());
    cudaProfilerStop();
  }

  void UseSampling(const SamplingParams& params) { greedy_.params = params; }

 private:
  void Open(int32_t batch, int32_t tokens) {
    uint32_t next = 1;
    tables_.clear();
    for (int32_t i = 0; i < batch; ++i) {
      tables_.push_back(TakeBlocks(tokens, block_tokens_, &next));
    }
    if (next > static_cast<uint32_t>(model_.blocks()) + 1) {
      Die(absl::ResourceExhaustedError("the KV cache is too small for this measurement"));
    }
  }

  // `from` >= 0: each token is the one of the step before.
  StepPlan Plan(int32_t batch, int32_t position, int32_t from) {
    StepPlan plan;
    tokens_.assign(static_cast<size_t>(batch), 100);
    for (int32_t i = 0; i < batch; ++i) {
      if (from < 0) tokens_[i] = (i * 101 + position * 31) % model_.config().vocab_size;
      plan.chunks.push_back({absl::MakeConstSpan(tokens_).subspan(i, 1), position, tables_[i],
                             &greedy_, from < 0 ? -1 : i});
    }
    return plan;
  }

  GpuModel& model_;
  const int32_t block_tokens_;
  absl::Duration stall_;
  Bytes copied_;
  std::unique_ptr<GpuRunner> runner_;
  double start_ms_ = 0;
  std::vector<std::vector<BlockId>> tables_;
  std::vector<TokenId> tokens_;
  SamplingRequest greedy_ = {.params = {.temperature = 0}, .history = {}, .output_index = 0};
};

struct Flags {
  std::string shape = "llama3-8b";
  std::string out, cache, commit, date;
  std::string profile;
  int32_t layers = 0;
  int32_t steps = 256;
  int32_t context = 128;
  int32_t fused_rows = 32;
  bool fused_decode = true;
  int32_t tensor_core_tokens = 16384;
  int32_t ranks = 1;
  std::string kv_dtype = "bf16";
  bool direct = true;
  bool collectives = false;
  bool graphs = true;
  bool quick = false;
  std::vector<std::string> rotations;
  ImagePlace place = ImagePlace::kHost;
  std::vector<int32_t> batches = {1, 8, 32, 128, 256};
  std::vector<int32_t> prompts = {128, 512, 2048, 4000};
  std::vector<int32_t> profile_batches = {1};
};

// Tokens of KV that the measurements need.
int64_t KvTokens(const Flags& flags, int32_t block_tokens) {
  int64_t tokens = 140000;
  for (const int64_t batch : flags.batches) {
    tokens = std::max(tokens, batch * (flags.context + flags.steps + 1 + block_tokens));
  }
  return tokens;
}

Json Algorithms(const GpuRunner& runner, double start_ms) {
  return {{"cublaslt", runner.gemms().version()},
          {"measured", runner.gemms().measured()},
          {"start_ms", start_ms}};
}

// "ALPHA" or "ALPHA,SLOTS".
Rotation ParseRotation(const std::string& text, int32_t layers) {
  int32_t freed = 0, slots = 1;
  const int fields = std::sscanf(text.c_str(), "%d,%d", &freed, &slots);
  if (fields < 1 || freed < 1 || slots < 1 || slots > kMaxSlots || freed + slots > layers) {
    Die(absl::InvalidArgumentError("expected --rotate ALPHA[,SLOTS], got " + text));
  }
  return EvenRotation(1, layers, freed, slots);
}

// Decode steps beside what they would take if copies and computation overlapped in full.
Json Rotate(const Flags& flags, Bench& bench, GpuModel& model) {
  std::map<int32_t, double> plain;
  Json out;
  const double layer_ms = bench.CopyLayer();
  const double layer_bytes = static_cast<double>(LayerBytes(model.layout(), 0).count());
  const double bytes_per_ms = layer_bytes / layer_ms;
  out["layer_bytes"] = layer_bytes;
  out["link_bytes_per_s"] = bytes_per_ms * 1e3;
  for (const int32_t batch : flags.batches) {
    bench.Decode(batch, flags.context, 8);
    plain[batch] = bench.Decode(batch, flags.context, flags.steps);
  }
  for (const std::string& text : flags.rotations) {
    const Rotation rotation = ParseRotation(text, model.config().num_layers);
    const auto start = Clock::now();
    OkOrDie(model.SetRotation(bench.runner(), rotation));
    Json entry = {{"freed", rotation.freed()},
                  {"slots", rotation.slots},
                  {"rotating", rotation.stages.size()},
                  {"set_ms", Milliseconds(start)}};
    // Kernel by kernel, while graphs are built.
    entry["eager_ms_step"] = bench.Decode(flags.batches.front(), flags.context, 8);
    bench.AwaitGraphs();
    for (const int32_t batch : flags.batches) {
      bench.Decode(batch, flags.context, 4);
      const double ms = bench.Decode(batch, flags.context, flags.steps);
      const double copied = static_cast<double>(bench.copied().count()) / flags.steps;
      const double roofline = std::max(plain[batch], copied / bytes_per_ms);
      entry["decode"].push_back(
          {{"batch", batch},
           {"ms_step", ms},
           {"ms_step_without", plain[batch]},
           {"copy_ms", copied / bytes_per_ms},
           {"roofline_ms", roofline},
           {"of_roofline", ms / roofline},
           {"stall_ms", absl::ToDoubleMilliseconds(bench.stall()) / flags.steps},
           {"gpu_ms_alone", bench.DecodeOnGpu(batch, flags.context, 16)}});
    }
    const DecodeGraphs::Stats graphs = bench.runner().stats().rotation_graphs;
    entry["graphs"] = {{"graphs", graphs.graphs},
                       {"seconds", absl::ToDoubleSeconds(graphs.time)},
                       {"bytes", graphs.memory.count()}};
    std::cerr << entry << std::endl;
    out["rotations"].push_back(std::move(entry));
  }
  OkOrDie(model.SetRotation(bench.runner(), Rotation()));
  return out;
}

Json Run(const Flags& flags, GpuModel& model, const CudaRunnerOptions& options) {
  Bench bench(model, options);
  cudaDeviceProp properties;
  cudaGetDeviceProperties(&properties, options.device);
  Json out = {{"shape", flags.shape},
              {"date", flags.date},
              {"commit", flags.commit},
              {"gpu", properties.name},
              {"gpus", model.ranks()},
              {"kv_dtype", flags.kv_dtype},
              {"direct_exchange", flags.direct},
              {"parameter_bytes", model.parameter_bytes().count()},
              {"runner", Algorithms(bench.runner(), bench.start_ms())}};
  if (flags.profile == "decode") {
    for (const int32_t batch : flags.profile_batches) bench.Profile(batch, 256);
    return out;
  }
  if (flags.profile == "prefill") {
    bench.ProfilePrompt(4000);
    return out;
  }
  if (!flags.rotations.empty()) {
    out["rotation"] = Rotate(flags, bench, model);
    return out;
  }
  for (const int32_t batch : flags.batches) {
    bench.Decode(batch, flags.context, 8);
    const double ms = bench.Decode(batch, flags.context, flags.steps);
    out["decode"].push_back({{"batch", batch},
                             {"ms_step", ms},
                             {"tokens_per_s", batch * 1e3 / ms},
                             {"gpu_ms", bench.DecodeOnGpu(batch, 256, 16)}});
    std::cerr << out["decode"].back() << std::endl;
  }
  for (const int32_t tokens : flags.prompts) {
    out["first_token"].push_back(bench.FirstToken(tokens));
    std::cerr << out["first_token"].back() << std::endl;
  }
  const int32_t context = 4000;
  if (flags.quick || model.config().max_position < 2 * context) return out;
  const double ms = bench.Decode(32, context, 64);
  out["long_context"] = {{"batch", 32}, {"context", context}, {"ms_step", ms}};
  std::cerr << out["long_context"] << std::endl;
  SamplingParams params;
  params.temperature = 0.8f;
  params.top_k = 50;
  params.top_p = 0.95f;
  params.seed = 1;
  bench.UseSampling(params);
  for (const int32_t batch : {1, 256}) {
    out["decode_top_k_top_p"].push_back(
        {{"batch", batch}, {"ms_step", bench.Decode(batch, 128, 64)}});
    std::cerr << out["decode_top_k_top_p"].back() << std::endl;
  }
  size_t free = 0, total = 0;
  cudaMemGetInfo(&free, &total);
  out["gpu_bytes_used"] = total - free;
  return out;
}

void Write(const Flags& flags, const Json& json) {
  const std::string text = json.dump(1);
  std::cout << text << "\n";
  if (!flags.out.empty()) std::ofstream(flags.out) << text << "\n";
}

int RunCollectives(const Flags& flags) {
  std::vector<int> devices(static_cast<size_t>(std::max(flags.ranks, 2)));
  std::iota(devices.begin(), devices.end(), 0);
  Json json = ValueOrDie(MeasureCollectives(devices));
  json["date"] = flags.date;
  json["commit"] = flags.commit;
  Write(flags, json);
  return json["ok"].get<bool>() ? EXIT_SUCCESS : EXIT_FAILURE;
}

int Main(int argc, char** argv) {
  Flags flags;
  CLI::App app("Measures the GPU runner on random weights");
  app.add_option("--shape", flags.shape,
                 "llama3-8b, llama2-13b, deepseek-v2-lite, or a folder with config.json");
  app.add_option("--out", flags.out, "file for the JSON");
  app.add_option("--gemm-cache", flags.cache, "file of GEMM algorithms");
  app.add_option("--commit", flags.commit, "commit of this program, for the JSON");
  app.add_option("--date", flags.date, "date, for the JSON");
  app.add_option("--layers", flags.layers, "layers instead of the shape's");
  app.add_option("--steps", flags.steps, "decode steps of each measurement");
  app.add_option("--context", flags.context, "tokens that sequences hold when decodes begin");
  app.add_option("--batches", flags.batches, "batch sizes")->delimiter(',');
  app.add_option("--prompts", flags.prompts, "prompt lengths")->delimiter(',');
  app.add_option("--profile", flags.profile, "decode or prefill: one step for a profiler");
  app.add_option("--profile-batches", flags.profile_batches, "batch sizes")->delimiter(',');
  app.add_flag("--graphs,!--no-graphs", flags.graphs, "replay decode steps as graphs");
  app.add_option("--fused-rows", flags.fused_rows,
                 "steps of up to this many rows use fused products");
  app.add_flag("--fused-decode,!--no-fused-decode", flags.fused_decode, "see CudaRunnerOptions");
  app.add_option("--tensor-core-tokens", flags.tensor_core_tokens, "see CudaRunnerOptions");
  app.add_option("--tp", flags.ranks, "GPUs that the model is shared among");
  app.add_option("--kv-dtype", flags.kv_dtype, "bf16 or fp8_e4m3");
  app.add_flag("--direct,!--no-direct", flags.direct, "exchange small messages without NCCL");
  app.add_flag("--collectives", flags.collectives, "check and measure the exchange between GPUs");
  app.add_option("--rotate", flags.rotations,
                 "ALPHA[,SLOTS] ...: only decodes, while so many layers have no memory");
  app.add_option("--image", flags.place, "where rotating layers are copied from")
      ->transform(CLI::CheckedTransformer(kImagePlaces));
  app.add_flag("--quick", flags.quick, "only decode and first token");
  CLI11_PARSE(app, argc, argv);

  if (flags.collectives) return RunCollectives(flags);
  ModelConfig config = Shape(flags.shape);
  if (flags.layers > 0) {
    config.num_layers = flags.layers;
    if (!config.layer_windows.empty()) config.layer_windows.resize(flags.layers);
  }
  config.kv_dtype = ValueOrDie(ParseKvDtype(flags.kv_dtype));
  CudaRunnerOptions options;
  options.graphs = flags.graphs && flags.profile.empty();
  options.gemm_cache_file = flags.cache;
  options.max_fused_rows = flags.fused_rows;
  options.fused_decode = flags.fused_decode;
  options.tensor_core_tokens = flags.tensor_core_tokens;
  const auto model = ValueOrDie(
      GpuModel::Create(config, KvTokens(flags, options.block_tokens), options, flags.ranks));
  GpuCollectivesOptions collectives;
  if (!flags.direct) collectives.max_direct_sum_bytes = collectives.max_direct_gather_bytes = 0;
  model->SetCollectives(collectives);
  OkOrDie(model->FillRandom(1));
  OkOrDie(model->FillKv(2));
  if (!flags.rotations.empty()) OkOrDie(model->MakeImage(flags.place));
  Write(flags, Run(flags, *model, options));
  return EXIT_SUCCESS;
}

}  // namespace
}  // namespace palimpsest::cuda

int main(int argc, char** argv) { return palimpsest::cuda::Main(argc, argv); }
