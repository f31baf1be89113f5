#include "worker/compute/cuda/norm_check.h"

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "common/cuda/status.h"
#include "worker/compute/cuda/kernels.h"
#include "worker/compute/cuda/special_kernels.h"

namespace palimpsest::cuda {
namespace {

// Up to the widest that RmsNormArgs allows; each size has other threads and vectors a thread.
constexpr int32_t kSizes[] = {64, 576, 4096, 5120, 7168, 8192, 12288, 16384, 32768};
constexpr int32_t kInputRows = 6;
const std::vector<int32_t> kPicked = {2, 0, 5};
constexpr float kEpsilon = 1e-5f;
constexpr float kOffset = 1.0f;
// Of bf16, whose numbers have eight bits.
constexpr double kRounding = 1.0 / 256;

struct FreeDevice {
  void operator()(void* memory) const { cudaFree(memory); }
};

template <typename T>
std::unique_ptr<T, FreeDevice> ToDevice(const std::vector<T>& values) {
  void* memory = nullptr;
  OkOrDie(CudaStatus(cudaMalloc(&memory, values.size() * sizeof(T)), "memory for norms"));
  std::unique_ptr<T, FreeDevice> held(static_cast<T*>(memory));
  OkOrDie(CudaStatus(
      cudaMemcpy(memory, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice),
      "copying to norms"));
  return held;
}

std::vector<__nv_bfloat16> RandomValues(size_t count, float middle, std::mt19937_64& random) {
  std::uniform_real_distribution<float> uniform(middle - 1, middle + 1);
  std::vector<__nv_bfloat16> values(count);
  for (__nv_bfloat16& value : values) value = __float2bfloat16(uniform(random));
  return values;
}

enum class Kind { kPlain, kOffsetAndAdd, kLayer };

class WidthCheck {
 public:
  explicit WidthCheck(int32_t size)
      : size_(size),
        random_(size),
        input_(RandomValues(size_t{kInputRows} * size, 0.25f, random_)),
        weight_(RandomValues(size, 0.5f, random_)),
        bias_(RandomValues(size, 0, random_)),
        before_(RandomValues(kPicked.size() * size, 0, random_)) {}

  // The largest error of an element, in roundings of its size.
  double Error(Kind kind) const {
    const std::vector<__nv_bfloat16> found = Run(kind);
    double worst = 0;
    for (size_t row = 0; row < kPicked.size(); ++row) {
      const __nv_bfloat16* input = input_.data() + int64_t{kPicked[row]} * size_;
      double sum = 0, squares = 0;
      for (int32_t i = 0; i < size_; ++i) sum += __bfloat162float(input[i]);
      const double mean = kind == Kind::kLayer ? sum / size_ : 0.0;
      for (int32_t i = 0; i < size_; ++i) {
        squares += std::pow(__bfloat162float(input[i]) - mean, 2);
      }
      const double scale = 1 / std::sqrt(squares / size_ + kEpsilon);
      for (int32_t i = 0; i < size_; ++i) {
        const size_t at = row * size_ + i;
        const double normed = (__bfloat162float(input[i]) - mean) * scale;
        double expected = normed * __bfloat162float(weight_[i]);
        double terms = std::abs(expected);
        if (kind == Kind::kLayer) {
          expected += __bfloat162float(bias_[i]);
          terms += std::abs(__bfloat162float(bias_[i]));
        } else if (kind == Kind::kOffsetAndAdd) {
          expected += normed * kOffset + __bfloat162float(before_[at]);
          terms += std::abs(normed * kOffset) + std::abs(__bfloat162float(before_[at]));
        }
        const double error = std::abs(__bfloat162float(found[at]) - expected);
        worst = std::max(worst, error / (terms * kRounding + 1e-6));
        if (!std::isfinite(error)) return INFINITY;
      }
    }
    return worst;
  }

 private:
  std::vector<__nv_bfloat16> Run(Kind kind) const {
    const auto input = ToDevice(input_), weight = ToDevice(weight_), bias = ToDevice(bias_);
    const auto output = ToDevice(before_);
    const auto rows = ToDevice(kPicked);
    if (kind == Kind::kPlain) {
      const RmsNormArgs args{.input = input.get(),
                             .weight = weight.get(),
                             .row_indexes = rows.get(),
                             .output = output.get(),
                             .rows = static_cast<int32_t>(kPicked.size()),
                             .size = size_,
                             .epsilon = kEpsilon};
      OkOrDie(CudaStatus(RmsNorm(args, nullptr), "launching a norm"));
    } else {
      const bool layer = kind == Kind::kLayer;
      const NormArgs args{.form = layer ? NormForm::kLayer : NormForm::kRms,
                          .input = input.get(),
                          .weight = weight.get(),
                          .bias = layer ? bias.get() : nullptr,
                          .offset = layer ? 0 : kOffset,
                          .row_indexes = rows.get(),
                          .output = output.get(),
                          .add = !layer,
                          .rows = static_cast<int32_t>(kPicked.size()),
                          .size = size_,
                          .epsilon = kEpsilon};
      OkOrDie(CudaStatus(Normalize(args, nullptr), "launching a norm"));
    }
    std::vector<__nv_bfloat16> found(before_.size());
    OkOrDie(CudaStatus(cudaMemcpy(found.data(), output.get(), found.size() * sizeof(found[0]),
                                  cudaMemcpyDeviceToHost),
                       "norms"));
    return found;
  }

  const int32_t size_;
  std::mt19937_64 random_;
  const std::vector<__nv_bfloat16> input_, weight_, bias_, before_;
};

}  // namespace

Json CheckNorms() {
  double worst = 0;
  for (const int32_t size : kSizes) {
    const WidthCheck check(size);
    for (const Kind kind : {Kind::kPlain, Kind::kOffsetAndAdd, Kind::kLayer}) {
      worst = std::max(worst, check.Error(kind));
    }
  }
  return {{"ok", worst <= 2}, {"roundings", worst}};
}

}  // namespace palimpsest::cuda
