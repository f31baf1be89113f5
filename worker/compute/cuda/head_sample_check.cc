#include "worker/compute/cuda/head_sample_check.h"

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "common/cuda/status.h"
#include "common/e4m3.h"
#include "worker/compute/cuda/head_sample.h"
#include "worker/core/far_keys.h"

namespace palimpsest::cuda {
namespace {

constexpr int32_t kBlockTokens = 16;
constexpr int32_t kRecent = 256;
constexpr double kLargestError = 0.01;
constexpr int kTimedRuns = 50;

struct Shape {
  int32_t tokens;
  int32_t kv_heads;
  int32_t group;
  int32_t head_dim;
  bool e4m3;
  float soft_cap;
};

constexpr Shape kShapes[] = {{200, 2, 1, 64, false, 0},   {383, 3, 3, 64, false, 0},
                             {1000, 8, 4, 128, false, 0}, {1000, 8, 4, 128, true, 0},
                             {1000, 2, 8, 256, false, 5}, {5000, 8, 4, 128, false, 0},
                             {20000, 8, 4, 128, false, 0}};

struct FreeDevice {
  void operator()(void* memory) const { cudaFree(memory); }
};

template <typename T>
std::unique_ptr<T, FreeDevice> ToDevice(const std::vector<T>& values) {
  void* memory = nullptr;
  OkOrDie(CudaStatus(cudaMalloc(&memory, values.size() * sizeof(T)), "memory for samples"));
  std::unique_ptr<T, FreeDevice> held(static_cast<T*>(memory));
  OkOrDie(CudaStatus(
      cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
      "copying to samples"));
  return held;
}

// One layer's KV of one sequence, a query, and what a sample of them is.
class Case {
 public:
  explicit Case(const Shape& shape) : shape_(shape), random_(shape.tokens + shape.head_dim) {
    const int32_t blocks = (shape.tokens + kBlockTokens - 1) / kBlockTokens;
    blocks_.resize(static_cast<size_t>(blocks));
    std::iota(blocks_.begin(), blocks_.end(), 1);
    std::shuffle(blocks_.begin(), blocks_.end(), random_);
    query_ = Fill(Query(shape.kv_heads * shape.group), 1);
    const size_t elements = static_cast<size_t>((blocks + 1) * PageStride());
    kv_ = Fill(elements, 1);
    // Some keys that some heads look for.
    for (int i = 0; i < shape.tokens / 100; ++i) {
      const auto token = static_cast<int32_t>(random_() % static_cast<uint64_t>(shape.tokens));
      const auto head = static_cast<int32_t>(random_() % static_cast<uint64_t>(shape.kv_heads));
      for (int32_t d = 0; d < shape.head_dim; ++d) {
        kv_[static_cast<size_t>(At(token, head) + d)] =
            query_[Query(head * shape.group) + static_cast<size_t>(d)];
      }
    }
    if (shape.e4m3) {
      for (float& value : kv_) {
        codes_.push_back(FloatToE4m3(value));
        value = E4m3ToFloat(codes_.back());
      }
    }
  }

  // The largest error of a share or an effect; adds the time of a sample.
  double Error(double& microseconds) const {
    std::vector<__nv_bfloat16> query, wide;
    for (const float value : query_) query.push_back(__float2bfloat16(value));
    for (const float value : kv_) wide.push_back(__float2bfloat16(value));
    const auto on_device = ToDevice(query);
    const auto bf16 = ToDevice(wide);
    const auto e4m3 = ToDevice(codes_.empty() ? std::vector<uint8_t>(1) : codes_);
    const auto blocks = ToDevice(blocks_);
    std::vector<float> found(static_cast<size_t>(2 * shape_.kv_heads));
    const auto results = ToDevice(found);
    HeadSampleArgs args;
    args.query = on_device.get();
    args.e4m3 = shape_.e4m3;
    args.keys = shape_.e4m3 ? static_cast<const void*>(e4m3.get()) : bf16.get();
    args.values = shape_.e4m3 ? static_cast<const void*>(e4m3.get() + PlaneElements())
                              : bf16.get() + PlaneElements();
    args.page_stride = PageStride();
    args.blocks = blocks.get();
    args.block_tokens = kBlockTokens;
    args.tokens = shape_.tokens;
    args.far_begin = kFarKeyTile;
    args.far_end = FarKeysEnd(shape_.tokens - 1, kRecent);
    args.kv_heads = shape_.kv_heads;
    args.group = shape_.group;
    args.head_dim = shape_.head_dim;
    args.scale = Scale();
    args.soft_cap = shape_.soft_cap;
    args.shares = results.get();
    args.effects = results.get() + shape_.kv_heads;
    microseconds = Time(args);
    OkOrDie(CudaStatus(cudaMemcpy(found.data(), results.get(), found.size() * sizeof(float),
                                  cudaMemcpyDeviceToHost),
                       "a sample of heads"));
    const float* const shares = found.data();
    const float* const effects = shares + shape_.kv_heads;
    double worst = 0;
    for (int32_t head = 0; head < shape_.kv_heads; ++head) {
      double share = 0, effect = 0;
      Expect(head, share, effect);
      worst = std::max(worst, std::abs(shares[head] - share));
      worst = std::max(worst, std::abs(effects[head] - effect));
    }
    return worst;
  }

 private:
  size_t Query(int32_t heads) const {
    return static_cast<size_t>(heads) * static_cast<size_t>(shape_.head_dim);
  }
  int64_t PlaneElements() const {
    return int64_t{kBlockTokens} * shape_.kv_heads * shape_.head_dim;
  }
  int64_t PageStride() const { return 2 * PlaneElements(); }
  float Scale() const { return 1 / std::sqrt(static_cast<float>(shape_.head_dim)); }
  // Of a key; its value lies a plane behind it.
  int64_t At(int32_t token, int32_t head) const {
    return blocks_[static_cast<size_t>(token / kBlockTokens)] * PageStride() +
           (int64_t{token % kBlockTokens} * shape_.kv_heads + head) * shape_.head_dim;
  }

  // Numbers that are exact in bf16.
  std::vector<float> Fill(size_t count, float spread) {
    std::normal_distribution<float> normal(0, spread);
    std::vector<float> values(count);
    for (float& value : values) value = __bfloat162float(__float2bfloat16(normal(random_)));
    return values;
  }

  static double Time(const HeadSampleArgs& args) {
    cudaEvent_t begin = nullptr, end = nullptr;
    OkOrDie(CudaStatus(cudaEventCreate(&begin), "event"));
    OkOrDie(CudaStatus(cudaEventCreate(&end), "event"));
    OkOrDie(CudaStatus(SampleHeads(args, nullptr), "sample heads"));
    OkOrDie(CudaStatus(cudaEventRecord(begin, nullptr), "event"));
    for (int i = 0; i < kTimedRuns; ++i) {
      OkOrDie(CudaStatus(SampleHeads(args, nullptr), "sample heads"));
    }
    OkOrDie(CudaStatus(cudaEventRecord(end, nullptr), "event"));
    OkOrDie(CudaStatus(cudaEventSynchronize(end), "samples of heads"));
    float milliseconds = 0;
    OkOrDie(CudaStatus(cudaEventElapsedTime(&milliseconds, begin, end), "time of samples"));
    cudaEventDestroy(begin);
    cudaEventDestroy(end);
    return 1000.0 * milliseconds / kTimedRuns;
  }

  void Expect(int32_t head, double& share, double& effect) const {
    const int32_t far_end = FarKeysEnd(shape_.tokens - 1, kRecent);
    double moved = 0, length = 0;
    for (int32_t g = 0; g < shape_.group; ++g) {
      const float* query = query_.data() + int64_t{head * shape_.group + g} * shape_.head_dim;
      double weight[2] = {};
      std::vector<double> sum[2] = {std::vector<double>(static_cast<size_t>(shape_.head_dim)),
                                    std::vector<double>(static_cast<size_t>(shape_.head_dim))};
      for (int32_t token = 0; token < shape_.tokens; ++token) {
        const float* key = kv_.data() + At(token, head);
        const float* value = key + PlaneElements();
        double score = 0;
        for (int32_t d = 0; d < shape_.head_dim; ++d) score += double{query[d]} * key[d];
        score *= Scale();
        if (shape_.soft_cap > 0) score = shape_.soft_cap * std::tanh(score / shape_.soft_cap);
        const int far = token >= kFarKeyTile && token < far_end;
        weight[far] += std::exp(score);
        for (size_t d = 0; d < sum[far].size(); ++d) sum[far][d] += std::exp(score) * value[d];
      }
      share += weight[1] / (weight[0] + weight[1]) / shape_.group;
      for (size_t d = 0; d < sum[0].size(); ++d) {
        const double with = (sum[0][d] + sum[1][d]) / (weight[0] + weight[1]);
        moved += std::pow(with - sum[0][d] / weight[0], 2);
        length += std::pow(with, 2);
      }
    }
    effect = std::min(1.0, std::sqrt(moved / length));
  }

  const Shape shape_;
  std::mt19937_64 random_;
  std::vector<int32_t> blocks_;
  std::vector<float> query_;
  std::vector<float> kv_;
  std::vector<uint8_t> codes_;
};

}  // namespace

Json CheckHeadSamples() {
  double worst = 0;
  Json times = Json::array();
  for (const Shape& shape : kShapes) {
    double microseconds = 0;
    worst = std::max(worst, Case(shape).Error(microseconds));
    times.push_back({{"tokens", shape.tokens},
                     {"kv_heads", shape.kv_heads},
                     {"group", shape.group},
                     {"head_dim", shape.head_dim},
                     {"e4m3", shape.e4m3},
                     {"layer_microseconds", microseconds}});
  }
  return {{"ok", worst < kLargestError}, {"largest_error", worst}, {"shapes", std::move(times)}};
}

}  // namespace palimpsest::cuda
