// Measures the CPU runner on a random model of SmolLM2-135M's shape, beside the memory bandwidth
// and arithmetic peak found in the same run. Prints one JSON object.
#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "nlohmann/json.hpp"
#include "worker/compute/cpu/cpu_runner.h"
#include "worker/compute/cpu/machine_peaks.h"
#include "worker/compute/cpu/packing.h"
#include "worker/compute/cpu/test_model.h"

namespace palimpsest {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int32_t kBlockTokens = 16;
constexpr int32_t kContext = 1024;
constexpr int kSequences = 8;
constexpr int32_t kPrompt = 512;

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

class Bench {
 public:
  Bench(const TestModel& model, int threads, const Kernels* kernels)
      : kv_(model.config(), kBlockTokens, kSequences * kContext / kBlockTokens + 1),
        blocks_(kSequences),
        runner_(CpuRunner::Create(
                    model.config(), model.layout(), {model.image(), kv_.data(), kv_.block_bytes()},
                    nullptr, {.threads = threads, .block_tokens = kBlockTokens, .kernels = kernels})
                    .value()) {
    uint32_t next = 1;
    for (auto& table : blocks_) {
      for (int i = 0; i < kContext / kBlockTokens; ++i) table.push_back(BlockId(next++));
    }
    for (int32_t t = 0; t < kContext; ++t) tokens_.push_back(100 + t);
    request_.params.temperature = 0;
  }

  const CpuRunner& runner() const { return *runner_; }

  // Computes `count` tokens from `position` on in each of the first `sequences` sequences.
  void Step(int sequences, int32_t position, int32_t count) {
    StepPlan plan;
    for (int s = 0; s < sequences; ++s) {
      plan.chunks.push_back(
          {absl::MakeConstSpan(tokens_).subspan(position, count), position, blocks_[s], &request_});
    }
    if (!runner_->Submit(plan).ok() || !runner_->Wait().ok()) std::abort();
  }

  double PrefillTokensPerSecond() {
    const Clock::time_point start = Clock::now();
    Step(1, 0, kPrompt);
    return kPrompt / Seconds(start);
  }

  double DecodeTokensPerSecond(int sequences, int steps) {
    const Clock::time_point start = Clock::now();
    for (int i = 0; i < steps; ++i) Step(sequences, kPrompt + i, 1);
    return sequences * steps / Seconds(start);
  }

 private:
  static double Seconds(Clock::time_point start) {
    return std::chrono::duration<double>(Clock::now() - start).count();
  }

  TestKv kv_;
  std::vector<std::vector<BlockId>> blocks_;
  std::vector<TokenId> tokens_;
  SamplingRequest request_;
  std::unique_ptr<CpuRunner> runner_;
};

nlohmann::json Measure(const TestModel& model, int threads, int rounds, const Kernels* kernels) {
  Bench bench(model, threads, kernels);
  threads = bench.runner().threads();
  for (int s = 1; s <= kSequences; s += kSequences - 1) bench.Step(s, 0, kPrompt);
  const int64_t image_bytes = model.layout().total.count();
  std::vector<double> bandwidth, flops, prefill, decode1, decode8;
  for (int i = 0; i < rounds; ++i) {
    bandwidth.push_back(MeasureReadBandwidth(threads, {model.image(), size_t(image_bytes)}));
    decode1.push_back(bench.DecodeTokensPerSecond(1, 32));
    decode8.push_back(bench.DecodeTokensPerSecond(8, 8));
    flops.push_back(MeasureFlops(threads));
    prefill.push_back(bench.PrefillTokensPerSecond());
  }
  // Each weight outside the embedding takes part in one multiply-add per prompt token.
  const MatrixPlacement& embed = model.layout().embed;
  const int64_t embedding = PackedMatrixBytes(embed.rows, embed.cols).count();
  const double prefill_flops = static_cast<double>(image_bytes - embedding);
  return {{"kernels", bench.runner().kernels().name},
          {"kv_dtype", std::string(KvDtypeName(model.config().kv_dtype))},
          {"threads", threads},
          {"read_gb_per_s", Median(bandwidth) * 1e-9},
          {"peak_gflop_per_s", Median(flops) * 1e-9},
          {"decode_1_tokens_per_s", Median(decode1)},
          {"decode_1_share_of_bandwidth",
           Median(decode1) * static_cast<double>(image_bytes) / Median(bandwidth)},
          {"decode_8_tokens_per_s", Median(decode8)},
          {"decode_8_over_decode_1", Median(decode8) / Median(decode1)},
          {"prefill_512_tokens_per_s", Median(prefill)},
          {"prefill_share_of_peak", Median(prefill) * prefill_flops / Median(flops)}};
}

int Main(int argc, char** argv) {
  CLI::App app("Benchmark of the CPU runner on a random model of SmolLM2-135M's shape");
  int threads = 0, rounds = 7;
  std::string isa, kv_dtype = "bf16";
  app.add_option("--threads", threads, "Threads; 0: one per CPU");
  app.add_option("--rounds", rounds, "Rounds, of which medians are printed")
      ->check(CLI::Range(1, 1000));
  app.add_option("--kernels", isa, "avx512, avx2 or generic; default: the fastest");
  app.add_option("--kv-dtype", kv_dtype, "bf16 or fp8_e4m3");
  CLI11_PARSE(app, argc, argv);
  const auto dtype = ParseKvDtype(kv_dtype);
  if (!dtype.ok()) {
    std::cerr << dtype.status().message() << "\n";
    return 1;
  }
  const Kernels* kernels = nullptr;
  for (const Kernels* k : SupportedKernels()) {
    if (k->name == isa) kernels = k;
  }
  if (!isa.empty() && kernels == nullptr) {
    std::cerr << "this machine does not run kernels '" << isa << "'\n";
    return 1;
  }
  ModelConfig config = SmolLm2Config();
  config.kv_dtype = *dtype;
  const TestModel model(config, 1);
  std::cout << Measure(model, threads, rounds, kernels).dump(2) << "\n";
  return 0;
}

}  // namespace
}  // namespace palimpsest

int main(int argc, char** argv) { return palimpsest::Main(argc, argv); }
