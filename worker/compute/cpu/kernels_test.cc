#include "worker/compute/cpu/kernels.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <memory>
#include <numbers>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "oneapi/dnnl/dnnl.h"
#include "worker/compute/cpu/attention_case.h"
#include "worker/compute/cpu/packing.h"

namespace palimpsest {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Free {
  void operator()(std::byte* p) const { std::free(p); }
};

// A random weight matrix, packed, and as floats.
struct Matrix {
  Matrix(int64_t rows, int64_t cols, std::mt19937& random) : rows(rows), cols(cols) {
    std::vector<float> values = RandomFloats(rows * cols, random);
    std::vector<uint16_t> bits(rows * cols);
    for (int64_t i = 0; i < rows * cols; ++i) {
      bits[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(values[i]) >> 16);
      values[i] = FromBf16(bits[i]);
    }
    floats = std::move(values);
    packed.reset(
        static_cast<std::byte*>(std::aligned_alloc(64, PackedMatrixBytes(rows, cols).count())));
    PackRows(bits.data(), 0, rows, rows, cols, packed.get());
  }

  int64_t rows, cols;
  std::vector<float> floats;
  std::unique_ptr<std::byte, Free> packed;
};

class EachBuild : public ::testing::TestWithParam<const Kernels*> {
 protected:
  const Kernels& kernels() const { return *GetParam(); }
  std::mt19937 random_{11};
};

INSTANTIATE_TEST_SUITE_P(Kernels, EachBuild, ::testing::ValuesIn(SupportedKernels()),
                         [](const auto& info) { return std::string(info.param->name); });

struct Case {
  Case(int64_t rows, int64_t cols, int64_t tokens, bool with_bias, std::mt19937& random)
      : matrix(rows, cols, random), input(RandomFloats(tokens * (cols + 5), random)) {
    if (with_bias) bias = RandomFloats(rows, random);
    projection.weights = matrix.packed.get();
    projection.rows = rows;
    projection.cols = cols;
    projection.bias = with_bias ? bias.data() : nullptr;
    projection.input = input.data();
    projection.input_stride = cols + 5;
    projection.tokens = tokens;
    projection.output_stride = rows + 3;
  }

  Matrix matrix;
  std::vector<float> input;
  std::vector<float> bias;
  Projection projection;
};

// input x matrix^T (+ bias) by oneDNN.
std::vector<float> OneDnnProduct(const Case& c) {
  const Projection& p = c.projection;
  std::vector<float> out(p.tokens * p.rows);
  EXPECT_EQ(dnnl_sgemm('N', 'T', p.tokens, p.rows, p.cols, 1.0f, p.input, p.input_stride,
                       c.matrix.floats.data(), p.cols, 0.0f, out.data(), p.rows),
            dnnl_success);
  for (size_t i = 0; i < out.size() && p.bias != nullptr; ++i) out[i] += p.bias[i % p.rows];
  return out;
}

TEST_P(EachBuild, ProjectionsMatchOneDnn) {
  for (int trial = 0; trial < 40; ++trial) {
    const int64_t rows = 1 + random_() % 150, cols = 1 + random_() % 300;
    Case c(rows, cols, 1 + random_() % 30, trial % 2 == 0, random_);
    const std::vector<float> expected = OneDnnProduct(c);
    const float tolerance = 1e-5f * static_cast<float>(cols + 8);
    std::vector<float> out(c.projection.tokens * c.projection.output_stride, kNan);
    c.projection.output = out.data();
    kernels().project(c.projection, 0, PanelCount(rows));
    for (int64_t t = 0; t < c.projection.tokens; ++t) {
      for (int64_t r = 0; r < rows; ++r) {
        ASSERT_NEAR(out[t * (rows + 3) + r], expected[t * rows + r], tolerance)
            << rows << "x" << cols << ", token " << t << ", row " << r;
      }
      ASSERT_TRUE(std::isnan(out[t * (rows + 3) + rows])) << "wrote past the last row";
    }
    std::vector<float> positive(out.size(), kNan);
    Projection relu = c.projection;
    relu.output = positive.data();
    relu.nonlinearity = Nonlinearity::kRelu;
    kernels().project(relu, 0, PanelCount(rows));
    for (int64_t r = 0; r < rows; ++r) ASSERT_EQ(positive[r], std::max(out[r], 0.0f));
    kernels().project_add(c.projection, 0, PanelCount(rows));
    for (int64_t r = 0; r < rows; ++r) {
      ASSERT_NEAR(out[r], 2 * expected[r], 2 * tolerance) << "added to row " << r;
    }
  }
}

TEST_P(EachBuild, GatedProjectionMatchesOneDnn) {
  for (int trial = 0; trial < 20; ++trial) {
    const int64_t half = 32 * (1 + random_() % 4);
    Case c(2 * half, 1 + random_() % 200, 1 + random_() % 30, trial % 2 == 0, random_);
    const std::vector<float> products = OneDnnProduct(c);
    std::vector<float> out(c.projection.tokens * c.projection.output_stride, kNan);
    c.projection.output = out.data();
    const bool gelu = trial % 4 < 2;
    c.projection.nonlinearity = gelu ? Nonlinearity::kGeluTanh : Nonlinearity::kSilu;
    kernels().project_gated(c.projection, 0, PanelCount(half));
    for (int64_t t = 0; t < c.projection.tokens; ++t) {
      for (int64_t i = 0; i < half; ++i) {
        const double gate = products[t * 2 * half + i], up = products[t * 2 * half + half + i];
        const double cubic = gate + 0.044715 * gate * gate * gate;
        const double expected =
            (gelu ? gate / 2 * (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * cubic))
                  : gate / (1 + std::exp(-gate))) *
            up;
        ASSERT_NEAR(out[t * c.projection.output_stride + i], expected,
                    1e-4 * (1 + std::abs(expected) + std::abs(up)));
      }
    }
  }
}

TEST_P(EachBuild, ProjectionBitsEqualReferenceBuildWhateverTheTokensAndUnits) {
  const Kernels& reference = *SupportedKernels().back();
  for (int trial = 0; trial < 6; ++trial) {
    const int64_t rows = 64 + 32 * (random_() % 3), cols = 1 + random_() % 100, tokens = 40;
    Case c(rows, cols, tokens, true, random_);
    std::vector<float> expected(tokens * c.projection.output_stride), out(expected);
    c.projection.output = expected.data();
    // The yardstick: each token and panel by itself.
    for (int64_t t = 0; t < tokens; ++t) {
      Projection one = c.projection;
      one.tokens = 1;
      one.input += t * one.input_stride;
      one.output += t * one.output_stride;
      for (int64_t unit = 0; unit < PanelCount(rows); ++unit)
        reference.project(one, unit, unit + 1);
    }
    for (int64_t first = 0; first < tokens;) {
      Projection some = c.projection;
      some.tokens = std::min<int64_t>(tokens - first, 1 + random_() % 30);
      some.input += first * some.input_stride;
      some.output = out.data() + first * some.output_stride;
      kernels().project(some, 0, PanelCount(rows));
      first += some.tokens;
    }
    ASSERT_EQ(std::memcmp(out.data(), expected.data(), out.size() * sizeof(float)), 0);
  }
}

TEST_P(EachBuild, RmsNormMatchesFloat64) {
  for (int64_t size = 16; size <= 160; size += 16) {
    const std::vector<float> x = RandomFloats(size, random_), weight = RandomFloats(size, random_);
    std::vector<float> out(size), reference(size);
    const float offset = size % 32 == 0 ? 1.0f : 0.0f;
    kernels().rms_norm(x.data(), weight.data(), size, 1e-5f, offset, out.data());
    double squares = 0;
    for (const float v : x) squares += double{v} * v;
    for (int64_t i = 0; i < size; ++i) {
      const double expected = x[i] / std::sqrt(squares / size + 1e-5) * (offset + weight[i]);
      ASSERT_NEAR(out[i], expected, 1e-6 * (1 + std::abs(expected)));
    }
    SupportedKernels().back()->rms_norm(x.data(), weight.data(), size, 1e-5f, offset,
                                        reference.data());
    ASSERT_EQ(out, reference);
  }
}

TEST_P(EachBuild, LayerNormMatchesFloat64) {
  for (int64_t size = 16; size <= 160; size += 16) {
    std::vector<float> x = RandomFloats(size, random_);
    const std::vector<float> weight = RandomFloats(size, random_),
                             bias = RandomFloats(size, random_);
    for (float& v : x) v += 3.0f;
    std::vector<float> reference(size);
    SupportedKernels().back()->layer_norm(x.data(), weight.data(), bias.data(), size, 1e-5f,
                                          reference.data());
    const double mean = std::accumulate(x.begin(), x.end(), 0.0) / static_cast<double>(size);
    double squares = 0;
    for (const float v : x) squares += (v - mean) * (v - mean);
    std::vector<float> out = x;
    kernels().layer_norm(out.data(), weight.data(), bias.data(), size, 1e-5f, out.data());
    for (int64_t i = 0; i < size; ++i) {
      const double expected =
          (x[i] - mean) / std::sqrt(squares / static_cast<double>(size) + 1e-5) * weight[i] +
          bias[i];
      ASSERT_NEAR(out[i], expected, 4e-6 * (1 + std::abs(expected)));
    }
    ASSERT_EQ(out, reference);
  }
}

TEST_P(EachBuild, SoftCapMatchesFloat64AndSaturates) {
  std::vector<float> x = RandomFloats(64, random_);
  for (size_t i = 0; i < x.size(); ++i) x[i] *= static_cast<float>(1 << i % 12);
  x[0] = std::numeric_limits<float>::infinity();
  x[1] = -1e30f;
  x[2] = 0;
  std::vector<float> out = x, reference = x;
  kernels().soft_cap(out.data(), 64, 30.0f);
  for (size_t i = 0; i < x.size(); ++i) {
    ASSERT_NEAR(out[i], 30 * std::tanh(double{x[i]} / 30), 1e-5) << x[i];
  }
  EXPECT_EQ(out[0], 30.0f);
  EXPECT_EQ(out[1], -30.0f);
  EXPECT_EQ(out[2], 0.0f);
  SupportedKernels().back()->soft_cap(reference.data(), 64, 30.0f);
  EXPECT_EQ(out, reference);
}

TEST_P(EachBuild, ExponentialIsWithinTwoUlpAndSaturates) {
  std::vector<float> x(4096);
  for (size_t i = 0; i < x.size(); ++i) x[i] = -87.0f + 175.0f * static_cast<float>(i) / 4096;
  x[0] = 0;
  std::vector<float> out(x.size()), reference(x.size());
  kernels().exponential(x.data(), static_cast<int64_t>(x.size()), out.data());
  for (size_t i = 0; i < x.size(); ++i) {
    const auto exact = static_cast<float>(std::exp(double{x[i]}));
    ASSERT_LE(std::abs(std::bit_cast<int32_t>(out[i]) - std::bit_cast<int32_t>(exact)), 2) << x[i];
  }
  EXPECT_EQ(out[0], 1.0f);
  SupportedKernels().back()->exponential(x.data(), static_cast<int64_t>(x.size()),
                                         reference.data());
  EXPECT_EQ(out, reference);

  const float inf = std::numeric_limits<float>::infinity();
  const std::vector<float> edges = {-inf, -1000, -88, 89, 1000, inf, kNan, -0.0f,
                                    0,    0,     0,   0,  0,    0,   0,    0};
  kernels().exponential(edges.data(), 16, out.data());
  EXPECT_EQ(out[0], 0);
  EXPECT_EQ(out[1], 0);
  EXPECT_EQ(out[2], 0);
  EXPECT_TRUE(std::isfinite(out[3]) && std::isfinite(out[5]) && out[3] > 1e38f);
  EXPECT_TRUE(std::isnan(out[6]));
  EXPECT_EQ(out[7], 1.0f);
}

TEST_P(EachBuild, Bf16RoundsToNearestEven) {
  const auto round = [&](uint32_t bits) {
    const auto in = std::bit_cast<float>(bits);
    uint16_t out;
    kernels().to_bf16(&in, 1, &out);
    return out;
  };
  EXPECT_EQ(round(0x3f800000), 0x3f80);
  EXPECT_EQ(round(0x3f808000), 0x3f80) << "tie to even, down";
  EXPECT_EQ(round(0x3f818000), 0x3f82) << "tie to even, up";
  EXPECT_EQ(round(0x3f808001), 0x3f81);
  EXPECT_EQ(round(0x7f7fffff), 0x7f80) << "overflow to infinity";
  EXPECT_EQ(round(0xff800000), 0xff80);
  EXPECT_TRUE(std::isnan(FromBf16(round(0x7f800001)))) << "NaN whose low bits alone are set";
  EXPECT_TRUE(std::isnan(FromBf16(round(0xffffffff))));
}

TEST_P(EachBuild, AttentionMatchesFloat64AndBitsDoNotDependOnTheCut) {
  const Kernels& reference = *SupportedKernels().back();
  for (int trial = 0; trial < 12; ++trial) {
    const auto positions = static_cast<int32_t>(1 + random_() % 200);
    AttentionCase c(random_, positions, trial % 4 >= 2);
    if (trial % 2 == 1) c.SetWindow(static_cast<int32_t>(1 + random_() % 150));
    for (int32_t first = 0; first < positions;) {
      const auto count =
          std::min(positions - first, static_cast<int32_t>(1 + random_() % (trial % 3 ? 40 : 3)));
      const std::vector<float> out = c.Run(kernels(), first, count, random_() % 2 == 0);
      for (int32_t t = 0; t < count; t += 7) {
        const std::vector<double> exact = c.Reference(first + t);
        const std::vector<float> alone = c.Run(reference, first + t, 1, false);
        for (int64_t i = 0; i < c.Width(); ++i) {
          ASSERT_NEAR(out[t * c.Width() + i], exact[i], 2e-5) << "position " << first + t;
        }
        ASSERT_EQ(std::memcmp(out.data() + t * c.Width(), alone.data(), alone.size() * 4), 0)
            << "position " << first + t << " of a chunk of " << count;
      }
      first += count;
    }
  }
}

TEST_P(EachBuild, AttentionOverE4m3HasTheBitsOfTheSameNumbersInBf16) {
  for (int trial = 0; trial < 12; ++trial) {
    const auto positions = static_cast<int32_t>(1 + random_() % 200);
    AttentionCase wide(random_, positions, false);
    if (trial % 2 == 1) wide.SetWindow(static_cast<int32_t>(1 + random_() % 150));
    wide.RoundToE4m3();
    AttentionCase narrow = wide;
    narrow.StoreAsE4m3();
    for (int32_t first = 0; first < positions;) {
      const auto count =
          std::min(positions - first, static_cast<int32_t>(1 + random_() % (trial % 3 ? 40 : 3)));
      const bool together = random_() % 2 == 0;
      ASSERT_EQ(narrow.Run(kernels(), first, count, together),
                wide.Run(kernels(), first, count, together));
      first += count;
    }
  }
}

// With one key the output is its value.
TEST_P(EachBuild, EveryE4m3CodeIsDecodedExactly) {
  std::vector<uint8_t> kv(2 * 256);
  std::iota(kv.begin() + 256, kv.end(), 0);
  const std::vector<float> query(256);
  const std::vector<BlockId> table = {BlockId(0)};
  std::vector<float> out(256), scratch(AttentionScratchFloats(1, 256));
  AttentionTask task;
  task.query = query.data();
  task.output = out.data();
  task.head_dim = task.value_dim = 256;
  task.tokens = 1;
  task.kv = reinterpret_cast<const std::byte*>(kv.data());
  task.e4m3 = true;
  task.block_bytes = 512;
  task.block_tokens = 1;
  task.block_table = table.data();
  task.value_offset = task.token_bytes = 256;
  kernels().attention(task, scratch.data());
  for (int code = 0; code < 256; ++code) {
    const float expected = E4m3ToFloat(static_cast<uint8_t>(code));
    if (std::isnan(expected)) {
      EXPECT_TRUE(std::isnan(out[code])) << code;
    } else {
      EXPECT_EQ(out[code], expected) << code;
    }
  }
}

}  // namespace
}  // namespace palimpsest
