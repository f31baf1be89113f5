#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <vector>

#include "worker/compute/cuda/bench_device.h"
#include "worker/compute/cuda/skinny_gemm_check.h"

namespace palimpsest::bench {
namespace {

constexpr int kMaxM = kSkinnyGemmMaxTokens;

// [m] reciprocal root mean squares of the rows of x.
__global__ void ReferenceScales(const __nv_bfloat16* x, int64_t stride, int k, float epsilon,
                                double* scales) {
  double sum = 0;
  for (int i = 0; i < k; ++i) {
    const double v = __bfloat162float(x[blockIdx.x * stride + i]);
    sum += v * v;
  }
  scales[blockIdx.x] = 1 / sqrt(sum / k + epsilon);
}

// One warp for each (row of w, token).
__global__ void ReferenceProducts(SkinnyGemm gemm, int rows, const double* scales,
                                  double* products) {
  const int row = blockIdx.x;
  const int token = threadIdx.y;
  const auto* x = static_cast<const __nv_bfloat16*>(gemm.x) + token * gemm.x_stride;
  const auto* w = static_cast<const __nv_bfloat16*>(gemm.w) + static_cast<int64_t>(row) * gemm.k;
  const auto* norm = static_cast<const __nv_bfloat16*>(gemm.norm_weight);
  double sum = 0;
  for (int i = threadIdx.x; i < gemm.k; i += 32) {
    double v = __bfloat162float(x[i]);
    if (norm != nullptr) v *= __bfloat162float(norm[i]);
    sum += v * static_cast<double>(__bfloat162float(w[i]));
  }
  for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(~0u, sum, offset);
  if (norm != nullptr) sum *= scales[token];
  if (gemm.bias != nullptr) {
    sum += __bfloat162float(static_cast<const __nv_bfloat16*>(gemm.bias)[row]);
  }
  if (threadIdx.x == 0) products[static_cast<int64_t>(token) * rows + row] = sum;
}

bool IsGated(SkinnyActivation activation) {
  return activation == SkinnyActivation::kSiluAndMul ||
         activation == SkinnyActivation::kGeluTanhAndMul;
}

double Activate(SkinnyActivation activation, double v, double up) {
  switch (activation) {
    case SkinnyActivation::kNone:
      return v;
    case SkinnyActivation::kRelu:
      return std::max(v, 0.0);
    case SkinnyActivation::kSiluAndMul:
      return v / (1 + std::exp(-v)) * up;
    case SkinnyActivation::kGeluTanhAndMul:
      return 0.5 * v * (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v))) * up;
  }
  return std::numeric_limits<double>::quiet_NaN();
}

float ToFloat(__nv_bfloat16 v) { return __bfloat162float(v); }
float ToFloat(float v) { return v; }

struct Case {
  int n;
  int k;
  bool norm;
  bool bias;
  bool residual;
  SkinnyActivation activation;
  bool fp32_output;
};

class Checker {
 public:
  Checker(SkinnyLauncher launch, const Case& c)
      : launch_(launch),
        case_(c),
        rows_(IsGated(c.activation) ? 2 * c.n : c.n),
        x_stride_(c.k + 8),
        y_stride_(c.n + 3),
        x_(kMaxM * x_stride_),
        w_(static_cast<size_t>(rows_) * c.k),
        norm_(c.k),
        bias_(rows_),
        residual_(static_cast<size_t>(kMaxM) * c.n) {
    Fill(x_.data(), x_.size(), 2.0f, 0.1f, 1);
    Fill(w_.data(), w_.size(), 2.0f / std::sqrt(static_cast<float>(c.k)), 0, 2);
    Fill(norm_.data(), norm_.size(), 0.5f, 1.0f, 3);
    Fill(bias_.data(), bias_.size(), 0.5f, 0, 4);
    Fill(residual_.data(), residual_.size(), 1.0f, 0, 5);
  }

  template <typename T>
  void Run(SkinnyCheck& result) {
    const std::vector<T> all = Product<T>(0, kMaxM);
    const std::vector<T> few = Product<T>(0, kSkinnyGemmSameTokens);
    Expect(result, Same(all, 0, Product<T>(0, kMaxM), kMaxM), "a second run differs");
    const double error = std::max(Error(all, kMaxM), Error(few, kSkinnyGemmSameTokens));
    double& largest = case_.fp32_output ? result.fp32_error : result.fused_error;
    largest = std::max(largest, error);
    Expect(result, error <= (case_.fp32_output ? 5e-5 : 6e-3), "error too large");
    for (int m = 1; m < kMaxM; ++m) {
      const bool is_few = m <= kSkinnyGemmSameTokens;
      const int most = is_few ? kSkinnyGemmSameTokens : kMaxM;
      const int first = m % 3 == 0 ? most - m : 0;
      Expect(result, Same(is_few ? few : all, first, Product<T>(first, m), m),
             "rows depend on m or their place");
    }
    ++result.cases;
  }

 private:
  SkinnyGemm Gemm(int first, int m, void* y) const {
    SkinnyGemm gemm;
    gemm.m = m;
    gemm.n = case_.n;
    gemm.k = case_.k;
    gemm.x = x_.data() + first * x_stride_;
    gemm.x_stride = x_stride_;
    gemm.w = w_.data();
    gemm.y = y;
    gemm.y_stride = y_stride_;
    gemm.fp32_output = case_.fp32_output;
    gemm.norm_weight = case_.norm ? norm_.data() : nullptr;
    gemm.norm_epsilon = 1e-5f;
    gemm.bias = case_.bias ? bias_.data() : nullptr;
    gemm.activation = case_.activation;
    gemm.residual = case_.residual ? residual_.data() + first * case_.n : nullptr;
    gemm.residual_stride = case_.n;
    return gemm;
  }

  // [kMaxM, y_stride_]; what the product does not own stays poison.
  template <typename T>
  std::vector<T> Product(int first, int m) const {
    Buffer<T> y(kMaxM * y_stride_);
    y.Poison();
    Check(launch_(Gemm(first, m, y.data()), nullptr), "launch");
    Check(cudaDeviceSynchronize(), "product");
    return y.Read();
  }

  template <typename T>
  bool Same(const std::vector<T>& all, int first, const std::vector<T>& some, int m) const {
    for (int row = 0; row < kMaxM; ++row) {
      if (row < m && std::memcmp(&all[(first + row) * y_stride_], &some[row * y_stride_],
                                 case_.n * sizeof(T)) != 0) {
        return false;
      }
      for (int64_t i = row < m ? case_.n : 0; i < y_stride_; ++i) {
        const auto* bytes = reinterpret_cast<const unsigned char*>(&some[row * y_stride_ + i]);
        if (bytes[0] != 0xff || bytes[1] != 0xff) return false;
      }
    }
    return true;
  }

  template <typename T>
  double Error(const std::vector<T>& y, int tokens) const {
    Buffer<double> scales(kMaxM);
    Buffer<double> products(static_cast<size_t>(kMaxM) * rows_);
    ReferenceScales<<<kMaxM, 1>>>(x_.data(), x_stride_, case_.k, 1e-5f, scales.data());
    ReferenceProducts<<<rows_, dim3(32, kMaxM)>>>(Gemm(0, kMaxM, nullptr), rows_, scales.data(),
                                                  products.data());
    Check(cudaDeviceSynchronize(), "reference");
    const std::vector<double> sums = products.Read();
    const std::vector<__nv_bfloat16> residual = residual_.Read();
    double difference = 0;
    double norm = 0;
    for (int token = 0; token < tokens; ++token) {
      for (int i = 0; i < case_.n; ++i) {
        const int64_t at = static_cast<int64_t>(token) * rows_ + i;
        double expected =
            Activate(case_.activation, sums[at], rows_ > case_.n ? sums[at + case_.n] : 0);
        if (case_.residual) expected += ToFloat(residual[token * case_.n + i]);
        const double delta = ToFloat(y[token * y_stride_ + i]) - expected;
        difference += delta * delta;
        norm += expected * expected;
      }
    }
    const double error = std::sqrt(difference / norm);
    return std::isnan(error) ? std::numeric_limits<double>::infinity() : error;
  }

  void Expect(SkinnyCheck& result, bool ok, const char* what) const {
    if (ok) return;
    result.passed = false;
    std::printf("FAILED: %s: n %d, k %d, norm %d, bias %d, residual %d, activation %d, fp32 %d\n",
                what, case_.n, case_.k, case_.norm, case_.bias, case_.residual,
                static_cast<int>(case_.activation), case_.fp32_output);
  }

  const SkinnyLauncher launch_;
  const Case case_;
  const int rows_;
  const int64_t x_stride_;
  const int64_t y_stride_;
  Buffer<__nv_bfloat16> x_;
  Buffer<__nv_bfloat16> w_;
  Buffer<__nv_bfloat16> norm_;
  Buffer<__nv_bfloat16> bias_;
  Buffer<__nv_bfloat16> residual_;
};

}  // namespace

SkinnyCheck CheckSkinnyGemm(SkinnyLauncher launch) {
  using A = SkinnyActivation;
  const Case cases[] = {
      {4096, 4096, false, false, false, A::kNone, true},
      {4096, 14336, false, false, true, A::kNone, false},
      {6144, 4096, true, true, false, A::kNone, false},
      {14336, 4096, true, false, false, A::kSiluAndMul, false},
      {2744, 1536, true, true, true, A::kGeluTanhAndMul, false},
      {20480, 5120, false, true, false, A::kRelu, false},
      {576, 1536, false, false, true, A::kNone, true},
      {1536, 576, true, false, false, A::kSiluAndMul, true},
      {960, 576, true, true, true, A::kNone, false},
      {5120, 13824, false, false, false, A::kNone, true},
      {50275, 64, false, false, false, A::kNone, true},
      {7, 704, true, true, true, A::kSiluAndMul, false},
      {1, 64, false, false, false, A::kNone, true},
  };
  SkinnyCheck result;
  for (Case c : cases) {
    // The tight limit is for plain products: a rounded norm has the error of bf16.
    const bool fp32 = c.fp32_output && !c.norm;
    c.fp32_output = fp32;
    Checker checker(launch, c);
    if (fp32) {
      checker.Run<float>(result);
    } else {
      checker.Run<__nv_bfloat16>(result);
    }
  }
  return result;
}

}  // namespace palimpsest::bench
