// Speed of the weight-reading products of decode on this GPU, against what memory can deliver and
// against cuBLASLt:
//   skinny_gemm_bench [--check] [--json FILE] [--pool-gb 28]
// First checks that the products are right, and exits 1 if not (--check: ends there). Then times
// each product of several models alone (many launches over different copies of the weights in one
// CUDA graph, so that no cache serves them), and whole decode steps: every product of every layer
// and the choice of the token, each depending on the one before, as one graph. Attention is left
// out of the steps; with a pause in its place, a kernel that only waits, they show how much of its
// time the next product's weights can use.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "worker/compute/cuda/bench_device.h"
#include "worker/compute/cuda/cublaslt_baseline.h"
#include "worker/compute/cuda/ptx.cuh"
#include "worker/compute/cuda/skinny_gemm.h"
#include "worker/compute/cuda/skinny_gemm_check.h"

namespace palimpsest::bench {
namespace {

constexpr int kMaxM = kSkinnyGemmMaxTokens;
constexpr int kTokenCounts[] = {1, 8, 16, 24, 32};

struct Model {
  const char* name;
  int layers;
  int hidden;
  int query;  // columns of the attention's output
  int qkv;
  int intermediate;
  int vocabulary;
  bool gated;  // SiLU-gated MLP; otherwise ReLU and biases (RMSNorm stands for LayerNorm)
};

constexpr Model kModels[] = {
    {"Llama-3-8B", 32, 4096, 4096, 6144, 14336, 128256, true},
    {"Llama-2-13b", 40, 5120, 5120, 15360, 13824, 32000, true},
    {"OPT-13b", 40, 5120, 5120, 15360, 20480, 50272, false},
    {"SmolLM2-135M", 30, 576, 576, 960, 1536, 49152, true},
};

// One kind of product of a model; `n` counts columns of y.
struct Product {
  const char* name;
  int n;
  int k;
  bool norm;
  bool bias;
  bool residual;
  SkinnyActivation activation;

  int64_t weights() const {
    return int64_t{activation == SkinnyActivation::kSiluAndMul ? 2 : 1} * n * k;
  }
};

enum { kQkv, kO, kUp, kDown, kHead };

std::vector<Product> Products(const Model& m) {
  using A = SkinnyActivation;
  const bool bias = !m.gated;
  return {{"qkv", m.qkv, m.hidden, true, bias, false, A::kNone},
          {"o", m.hidden, m.query, false, bias, true, A::kNone},
          {m.gated ? "gate_up" : "fc1", m.intermediate, m.hidden, true, bias, false,
           m.gated ? A::kSiluAndMul : A::kRelu},
          {m.gated ? "down" : "fc2", m.hidden, m.intermediate, false, bias, true, A::kNone},
          {"lm_head", m.vocabulary, m.hidden, true, false, false, A::kNone}};
}

// Stands for work between products that leaves memory idle: a few blocks that wait.
__global__ void Pause(int64_t cycles) {
  ptx::LaunchDependents();
  ptx::GridDependencyWait();
  const int64_t begin = clock64();
  while (clock64() - begin < cycles) {
  }
}

struct Overlap {
  const char* name;
  bool programmatic = false;
  bool prefetch = false;
  int pause_us = 0;  // 0: no pause
};

// All device memory of the benchmark.
struct Memory {
  explicit Memory(size_t pool_bytes)
      : weights(pool_bytes / 2),
        hidden(kMaxM * 5120),
        wide(kMaxM * 20480),
        activated(kMaxM * 20480),
        vectors(40960),
        logits(kMaxM * 131072) {
    Fill(weights.data(), weights.size(), 0.02f, 0, 11);
    Fill(hidden.data(), hidden.size(), 1, 0, 12);
    Fill(wide.data(), wide.size(), 1, 0, 13);
    Fill(activated.data(), activated.size(), 1, 0, 14);
    Fill(vectors.data(), vectors.size(), 0.5f, 1, 15);
    Check(cudaDeviceSynchronize(), "fill");
  }
  Buffer<__nv_bfloat16> weights;
  Buffer<__nv_bfloat16> hidden;
  Buffer<__nv_bfloat16> wide;  // query, key and value
  Buffer<__nv_bfloat16> activated;
  Buffer<__nv_bfloat16> vectors;  // norm weights and biases
  Buffer<float> logits;
};

class Bench {
 public:
  Bench(const Memory& memory, const CublasLtBaseline* baseline, double bandwidth)
      : memory_(memory), baseline_(baseline), bandwidth_(bandwidth) {}

  // Appends a JSON object for each product and number of tokens.
  void Shapes(const Model& model, std::string& json) const {
    const std::vector<Product> products = Products(model);
    for (int i = kQkv; i <= kHead; ++i) {
      for (const int m : kTokenCounts) Shape(model, products[i], i, m, json);
    }
  }

  // Milliseconds of one decode step's products.
  double Step(const Model& model, int m, const Overlap& overlap) const {
    const std::vector<Product> products = Products(model);
    return TimeGraph(1, 9,
                     [&](int, cudaStream_t stream) {
                       int64_t at = 0;
                       for (int layer = 0; layer < model.layers; ++layer) {
                         for (int i = kQkv; i <= kDown; ++i) {
                           if (i == kO && overlap.pause_us > 0) LaunchPause(overlap, stream);
                           Launch(products[i], i, m, at, overlap, stream);
                           at += products[i].weights();
                         }
                       }
                       Launch(products[kHead], kHead, m, at, overlap, stream);
                     }) *
           1e-3;
  }

  static double StepBytes(const Model& model) {
    const std::vector<Product> products = Products(model);
    int64_t layer = 0;
    for (int i = kQkv; i <= kDown; ++i) layer += products[i].weights();
    return 2.0 * static_cast<double>(layer * model.layers + products[kHead].weights());
  }

 private:
  SkinnyGemm Gemm(const Product& p, int i, int m, int64_t weights_at) const {
    SkinnyGemm gemm;
    gemm.m = m;
    gemm.n = p.n;
    gemm.k = p.k;
    gemm.w = memory_.weights.data() + weights_at;
    // The residual stream is read and written in place; o reads the query part of qkv's output.
    const __nv_bfloat16* in[] = {memory_.hidden.data(), memory_.wide.data(), memory_.hidden.data(),
                                 memory_.activated.data(), memory_.hidden.data()};
    void* out[] = {memory_.wide.data(), memory_.hidden.data(), memory_.activated.data(),
                   memory_.hidden.data(), memory_.logits.data()};
    gemm.x = in[i];
    gemm.x_stride = i == kO ? 20480 : p.k;
    gemm.y = out[i];
    gemm.y_stride = i == kQkv ? 20480 : p.n;
    gemm.fp32_output = i == kHead;
    gemm.norm_weight = p.norm ? memory_.vectors.data() : nullptr;
    gemm.norm_epsilon = 1e-5f;
    gemm.bias = p.bias ? memory_.vectors.data() : nullptr;
    gemm.activation = p.activation;
    gemm.residual = p.residual ? memory_.hidden.data() : nullptr;
    gemm.residual_stride = p.n;
    return gemm;
  }

  void Launch(const Product& p, int i, int m, int64_t at, const Overlap& overlap,
              cudaStream_t stream) const {
    SkinnyGemm gemm = Gemm(p, i, m, at);
    gemm.programmatic = overlap.programmatic;
    gemm.prefetch_weights = overlap.prefetch;
    Check(LaunchSkinnyGemm(gemm, stream), p.name);
  }

  static void LaunchPause(const Overlap& overlap, cudaStream_t stream) {
    cudaLaunchAttribute attribute = {};
    attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute.val.programmaticStreamSerializationAllowed = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(64);
    config.blockDim = dim3(128);
    config.stream = stream;
    config.attrs = &attribute;
    config.numAttrs = overlap.programmatic ? 1 : 0;
    int khz = 0;
    Check(cudaDeviceGetAttribute(&khz, cudaDevAttrClockRate, 0), "attribute");
    Check(cudaLaunchKernelEx(&config, Pause, int64_t{overlap.pause_us} * khz / 1000), "Pause");
  }

  void Shape(const Model& model, const Product& p, int i, int m, std::string& json) const {
    const int64_t copies = static_cast<int64_t>(memory_.weights.size()) / p.weights();
    const double bytes = 2.0 * static_cast<double>(p.weights());
    const int count = std::clamp(static_cast<int>(2.0e9 / bytes), 8, 256);
    auto time = [&](const Overlap& overlap) {
      return TimeGraph(count, 5, [&](int at, cudaStream_t stream) {
        Launch(p, i, m, at % copies * p.weights(), overlap, stream);
      });
    };
    const double chained = time({"", true, true});
    const double alone = time({"", false, false});
    double lt = 0;
    if (baseline_ != nullptr) {
      const int rows = static_cast<int>(p.weights() / p.k);
      lt = baseline_->Time(
          m, rows, p.k, memory_.activated.data(),
          [&](int at) { return memory_.weights.data() + at % copies * p.weights(); },
          memory_.logits.data(), count);
    }
    auto rate = [&](double us) { return us > 0 ? bytes / us * 1e-3 : 0; };
    std::printf("%-13s %-8s m %2d  %8.2f us %7.1f GB/s %5.1f %%  alone %7.1f  cuBLASLt %7.1f\n",
                model.name, p.name, m, chained, rate(chained), 1e11 * rate(chained) / bandwidth_,
                rate(alone), rate(lt));
    char line[512];
    std::snprintf(line, sizeof(line),
                  "%s\n    {\"model\": \"%s\", \"product\": \"%s\", \"rows\": %lld, \"k\": %d, "
                  "\"m\": %d, \"us\": %.2f, \"gb_per_s\": %.1f, \"of_read_bandwidth\": %.3f, "
                  "\"us_without_overlap\": %.2f, \"us_cublaslt\": %.2f}",
                  json.empty() ? "" : ",", model.name, p.name,
                  static_cast<long long>(p.weights() / p.k), p.k, m, chained, rate(chained),
                  1e9 * rate(chained) / bandwidth_, alone, lt);
    json += line;
  }

  const Memory& memory_;
  const CublasLtBaseline* baseline_;
  const double bandwidth_;
};

constexpr Overlap kOverlaps[] = {
    {"none"},
    {"launch only", true},
    {"prefetch", true, true},
    {"none, pause 5 us", false, false, 5},
    {"prefetch, pause 5 us", true, true, 5},
};

void Steps(const Bench& bench, const Model& model, double bandwidth, std::string& json) {
  const double floor = Bench::StepBytes(model) / bandwidth * 1e3;
  for (const Overlap& overlap : kOverlaps) {
    for (const int m : kTokenCounts) {
      const double ms = bench.Step(model, m, overlap);
      std::printf("%-13s step, overlap %-22s m %2d %7.3f ms, floor %7.3f\n", model.name,
                  overlap.name, m, ms, floor);
      char line[384];
      std::snprintf(line, sizeof(line),
                    "%s\n    {\"model\": \"%s\", \"overlap\": \"%s\", \"m\": %d, \"ms\": %.4f, "
                    "\"floor_ms\": %.4f}",
                    json.empty() ? "" : ",", model.name, overlap.name, m, ms, floor);
      json += line;
    }
  }
}

// Everything but the checks; the two lists of JSON objects.
void Measure(size_t pool_bytes, double& bandwidth, std::string& shapes, std::string& steps) {
  const Memory memory(pool_bytes);
  bandwidth = MeasureReadBandwidth(memory.weights.data(), size_t{8} << 30);
  const auto baseline = CublasLtBaseline::Open();
  const Bench bench(memory, baseline.get(), bandwidth);
  for (const Model& model : kModels) {
    bench.Shapes(model, shapes);
    Steps(bench, model, bandwidth, steps);
    std::fflush(stdout);
  }
}

int Run(const char* json_path, size_t pool_bytes, bool check_only) {
  cudaDeviceProp properties;
  Check(cudaGetDeviceProperties(&properties, 0), "cudaGetDeviceProperties");
  std::printf("%s, %d multiprocessors, L2 %.1f MiB\n", properties.name,
              properties.multiProcessorCount, properties.l2CacheSize / 1048576.0);
  Check(PrepareSkinnyGemm(), "PrepareSkinnyGemm");
  const SkinnyCheck check = CheckSkinnyGemm(LaunchSkinnyGemm);
  std::printf("check %s: %d cases, error fp32 %.2e, fused bf16 %.2e\n",
              check.passed ? "passed" : "FAILED", check.cases, check.fp32_error, check.fused_error);
  std::fflush(stdout);
  if (check_only || !check.passed) return check.passed ? 0 : 1;

  double bandwidth = 0;
  std::string shapes;
  std::string steps;
  Measure(pool_bytes, bandwidth, shapes, steps);
  if (json_path == nullptr) return 0;
  FILE* file = std::fopen(json_path, "w");
  if (file == nullptr) {
    std::fprintf(stderr, "cannot write %s: give --json a path in an existing folder\n", json_path);
    return 1;
  }
  std::fprintf(file,
               "{\"gpu\": \"%s\", \"read_gb_per_s\": %.1f,\n  \"check\": {\"cases\": %d, "
               "\"fp32_error\": %.3e, \"fused_bf16_error\": %.3e},\n"
               "  \"products\": [%s],\n  \"steps\": [%s]}\n",
               properties.name, bandwidth * 1e-9, check.cases, check.fp32_error, check.fused_error,
               shapes.c_str(), steps.c_str());
  return std::fclose(file) == 0 ? 0 : 1;
}

}  // namespace
}  // namespace palimpsest::bench

int main(int argc, char** argv) {
  const char* json = nullptr;
  size_t pool_gb = 28;
  bool check_only = false;
  for (int i = 1; i < argc; ++i) {
    if (std::strcmp(argv[i], "--check") == 0) {
      check_only = true;
    } else if (std::strcmp(argv[i], "--json") == 0 && i + 1 < argc) {
      json = argv[++i];
    } else if (std::strcmp(argv[i], "--pool-gb") == 0 && i + 1 < argc) {
      pool_gb = std::strtoul(argv[++i], nullptr, 10);
    } else {
      std::fprintf(stderr, "usage: %s [--check] [--json FILE] [--pool-gb GB]\n", argv[0]);
      return 2;
    }
  }
  return palimpsest::bench::Run(json, pool_gb * 1000000000, check_only);
}
