// Checks the GPU runner on the GPU machine: norms of every width, samples of heads, logits against
// a reference, equal results when plans are replayed or pipelined, harmless padding rows, sampling
// against worker/core/sampling.h.
//
//   gpu_check --reference FILE [--gemm-cache FILE] [--tp GPUS] [--out FILE] [--short] [--rotation]
//
// FILE is what tests/reference/make_reference.py wrote: a small model whose weights both sides
// generate, a prompt, logits at some of its positions in float32, and how far transformers in
// bfloat16 is from them. The runner may be twice as far. A reference with KV in eight bits is for a
// runner with such a cache. Last, layers rotate in a deeper model of the same shape, with random
// weights (rotation_check.h). Prints one JSON object; exits with 1 if a check failed.
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "nlohmann/json.hpp"
#include "worker/compute/cuda/gpu_model.h"
#include "worker/compute/cuda/head_sample_check.h"
#include "worker/compute/cuda/logits_check.h"
#include "worker/compute/cuda/norm_check.h"
#include "worker/compute/cuda/rotation_check.h"
#include "worker/compute/cuda/stepping_check.h"

namespace palimpsest::cuda {
namespace {

constexpr int32_t kBlockTokens = 16;
constexpr int32_t kMaxSequences = 40;

Json ReadJson(const std::string& path) {
  std::ifstream file(path);
  if (!file) Die(absl::NotFoundError(path));
  return Json::parse(file);
}

// `one` is the same model on one GPU, `wide` the same with KV in bf16; null: none to compare with.
Json RunAll(GpuModel& model, GpuModel* one, GpuModel* wide, const Json& reference, bool brief,
            bool& passed) {
  Json out;
  const auto add = [&](const char* name, Json result) {
    passed = passed && result.at("ok").get<bool>();
    out[name] = std::move(result);
    std::cerr << name << ": " << out[name] << std::endl;
  };
  LogitsCheck logits(model, reference, kBlockTokens);
  SteppingCheck stepping(model, reference["tokens"].get<std::vector<TokenId>>(), kBlockTokens);
  if (brief) stepping.Shorten();
  add("norms", CheckNorms());
  add("head_samples", CheckHeadSamples());
  add("decode_logits", logits.DecodeLogits(1));
  add("batch_logits", logits.DecodeLogits(20));
  add("prefill_logits", logits.PrefillLogits());
  add("mixed_logits", logits.MixedLogits());
  add("replay", stepping.Replay());
  add("pipelined", stepping.Pipelined());
  add("padding", stepping.Padding());
  add("refusals", stepping.Refusals());
  add("sampling", stepping.Sampling());
  if (one != nullptr) add("one_gpu", logits.AgainstOneGpu(*one));
  if (wide != nullptr) add("kv_rounding", logits.AgainstWideKv(*wide));
  return out;
}

// Layers rotate in a model of several slabs a layer, if they are large enough.
Json Rotation(const ModelConfig& shape, const CudaRunnerOptions& options, int32_t ranks,
              const GpuCollectivesOptions& collectives, ImagePlace place, int schedules) {
  constexpr int32_t kLayers = 9;
  ModelConfig config = shape;
  config.num_layers = kLayers;
  for (size_t i = 0; !shape.layer_windows.empty() && i < kLayers; ++i) {
    config.layer_windows.resize(kLayers);
    config.layer_windows[i] = shape.layer_windows[i % shape.layer_windows.size()];
  }
  const auto model = ValueOrDie(GpuModel::Create(config, 16384, options, ranks, MiB(2)));
  model->SetCollectives(collectives);
  OkOrDie(model->FillRandom(1));
  return ValueOrDie(RunRotationCheck(*model, place, options.block_tokens, schedules));
}

int Main(int argc, char** argv) {
  std::string path, out, cache;
  bool brief = false, overlap = true, direct = true, only_rotation = false;
  int32_t ranks = 1, schedules = 0;
  ImagePlace place = ImagePlace::kHost;
  // Low enough for both kernels to run.
  int32_t tensor_core_tokens = 200;
  CLI::App app("Checks the GPU runner against a reference");
  app.add_option("--reference", path, "file of tests/reference/make_reference.py")->required();
  app.add_option("--out", out, "file for the JSON");
  app.add_option("--gemm-cache", cache, "file of GEMM algorithms");
  app.add_option("--tensor-core-tokens", tensor_core_tokens, "see CudaRunnerOptions");
  app.add_flag("--overlap,!--no-overlap", overlap, "see CudaRunnerOptions");
  app.add_flag("--short", brief, "less of what only repeats");
  app.add_option("--tp", ranks, "GPUs that the model is shared among");
  app.add_flag("--direct,!--no-direct", direct, "exchange small messages without NCCL");
  app.add_flag("--rotation", only_rotation, "only the check of rotating layers");
  app.add_option("--schedules", schedules, "schedules with rotating layers; 0: 40, short: 3");
  app.add_option("--image", place, "where rotating layers are copied from")
      ->transform(CLI::CheckedTransformer(kImagePlaces));
  CLI11_PARSE(app, argc, argv);
  if (schedules == 0) schedules = brief ? 3 : 40;

  const Json reference = ReadJson(path);
  ModelConfig config = ValueOrDie(ParseModelConfig(reference["config"].dump(), ""));
  config.kv_dtype = ValueOrDie(ParseKvDtype(reference.value("kv_dtype", "bf16")));
  CudaRunnerOptions options;
  options.block_tokens = kBlockTokens;
  options.max_sequences = kMaxSequences;
  options.max_step_tokens = 4096;
  // Runners that measured for themselves might choose other algorithms, and differ in low bits.
  const std::string own_cache =
      std::filesystem::temp_directory_path() / ("gpu_check." + std::to_string(getpid()) + ".gemm");
  options.gemm_cache_file = cache.empty() ? own_cache : cache;
  options.overlap_launches = overlap;
  options.tensor_core_tokens = tensor_core_tokens;
  const auto model = ValueOrDie(GpuModel::Create(config, 32768, options, ranks));
  OkOrDie(model->LoadDummy(reference["seed"]));
  GpuCollectivesOptions collectives;
  if (!direct) collectives.max_direct_sum_bytes = collectives.max_direct_gather_bytes = 0;
  model->SetCollectives(collectives);
  std::unique_ptr<GpuModel> one;
  if (ranks > 1) {
    one = ValueOrDie(GpuModel::Create(config, 32768, options));
    OkOrDie(one->LoadDummy(reference["seed"]));
  }
  std::unique_ptr<GpuModel> wide;
  if (config.kv_dtype != KvDtype::kBf16) {
    ModelConfig plain = config;
    plain.kv_dtype = KvDtype::kBf16;
    wide = ValueOrDie(GpuModel::Create(plain, 32768, options, ranks));
    OkOrDie(wide->LoadDummy(reference["seed"]));
  }
  bool passed = true;
  Json checks;
  if (!only_rotation) checks = RunAll(*model, one.get(), wide.get(), reference, brief, passed);
  checks["rotation"] = Rotation(config, options, ranks, collectives, place, schedules);
  std::cerr << "rotation: " << checks["rotation"] << std::endl;
  passed = passed && checks["rotation"]["ok"].get<bool>();
  const Json json = {{"model", reference["name"]},
                     {"ranks", ranks},
                     {"kv_dtype", std::string(KvDtypeName(config.kv_dtype))},
                     {"checks", checks},
                     {"passed", passed}};
  std::filesystem::remove(own_cache);
  std::cout << json.dump(1) << "\n";
  if (!out.empty()) std::ofstream(out) << json.dump(1) << "\n";
  return passed ? EXIT_SUCCESS : EXIT_FAILURE;
}

}  // namespace
}  // namespace palimpsest::cuda

int main(int argc, char** argv) { return palimpsest::cuda::Main(argc, argv); }
