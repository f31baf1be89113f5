#include "worker/compute/cpu/test_model.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "worker/compute/cpu/packing.h"
#include "worker/compute/cpu/rope.h"

namespace palimpsest {
namespace {

uint16_t RoundToBf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

double ThroughBf16(double x) {
  return std::bit_cast<float>(uint32_t{RoundToBf16(static_cast<float>(x))} << 16);
}

// Rotates one head in place.
void RotateHead(double* head, absl::Span<const float> frequencies, int64_t position) {
  const size_t half = frequencies.size();
  for (size_t i = 0; i < half; ++i) {
    const double angle = static_cast<double>(position) * frequencies[i];
    const double a = head[i], b = head[half + i];
    head[i] = a * std::cos(angle) - b * std::sin(angle);
    head[half + i] = b * std::cos(angle) + a * std::sin(angle);
  }
}

// Attention output of the last token over all cached keys and values, `kv_width` each.
std::vector<double> AttendLast(const ModelConfig& config, const std::vector<double>& qkv,
                               const std::vector<std::vector<double>>& keys,
                               const std::vector<std::vector<double>>& values) {
  const int64_t dim = config.head_dim, group = config.num_heads / config.num_kv_heads;
  const auto last = static_cast<int64_t>(keys.size()) - 1;
  const int64_t first = config.sliding_window.has_value()
                            ? std::max<int64_t>(0, last - *config.sliding_window + 1)
                            : 0;
  std::vector<double> out(config.num_heads * dim);
  for (int64_t h = 0; h < config.num_heads; ++h) {
    const int64_t kv = h / group * dim;
    std::vector<double> weight(last + 1);
    double largest = -INFINITY, total = 0;
    for (int64_t j = first; j <= last; ++j) {
      for (int64_t d = 0; d < dim; ++d) weight[j] += qkv[h * dim + d] * keys[j][kv + d];
      weight[j] /= std::sqrt(static_cast<double>(dim));
      largest = std::max(largest, weight[j]);
    }
    for (int64_t j = first; j <= last; ++j) total += weight[j] = std::exp(weight[j] - largest);
    for (int64_t j = first; j <= last; ++j) {
      for (int64_t d = 0; d < dim; ++d) out[h * dim + d] += weight[j] / total * values[j][kv + d];
    }
  }
  return out;
}

void AddTo(std::vector<double>& x, const std::vector<double>& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

}  // namespace

ModelConfig RandomConfig(std::mt19937& random) {
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  ModelConfig c;
  c.architecture = "LlamaForCausalLM";
  c.num_layers = pick(1, 3);
  c.hidden_size = 32 * pick(1, 4);
  c.num_kv_heads = pick(1, 3);
  c.num_heads = c.num_kv_heads * pick(1, 4);
  c.head_dim = 16 * pick(1, 6);
  c.intermediate_size = 32 * pick(1, 5);
  c.vocab_size = pick(33, 300);
  c.max_position = 4096;
  c.rms_norm_eps = 1e-5f;
  c.rope_theta = pick(0, 1) == 0 ? 10000.0 : 500000.0;
  if (const int scaling = pick(0, 2); scaling > 0) {
    c.rope_scaling =
        RopeScaling{.kind = scaling == 1 ? RopeScaling::Kind::kLinear : RopeScaling::Kind::kLlama3,
                    .factor = 4.0,
                    .low_freq_factor = 1.0,
                    .high_freq_factor = 4.0,
                    .original_max_position = 64};
  }
  c.tie_word_embeddings = pick(0, 1) == 1;
  c.qkv_bias = pick(0, 1) == 1;
  c.o_bias = pick(0, 1) == 1;
  c.mlp_bias = pick(0, 1) == 1;
  if (pick(0, 1) == 1) c.sliding_window = pick(1, 150);
  return c;
}

ModelConfig SmolLm2Config() {
  ModelConfig c;
  c.architecture = "LlamaForCausalLM";
  c.num_layers = 30;
  c.hidden_size = 576;
  c.num_heads = 9;
  c.num_kv_heads = 3;
  c.head_dim = 64;
  c.intermediate_size = 1536;
  c.vocab_size = 49152;
  c.max_position = 8192;
  c.rope_theta = 100000.0;
  c.tie_word_embeddings = true;
  return c;
}

Region::Region(int64_t bytes) : bytes_(bytes) {
  constexpr int64_t kHugePage = int64_t{2} << 20;
  const int64_t rounded = (bytes + kHugePage - 1) / kHugePage * kHugePage;
  data_ = static_cast<std::byte*>(std::aligned_alloc(kHugePage, rounded));
  madvise(data_, rounded, MADV_HUGEPAGE);
  std::memset(data_, 0, rounded);
}

Region::~Region() { std::free(data_); }

TestModel::TestModel(const ModelConfig& config, uint32_t seed)
    : config_(config),
      layout_(LayOutImage(config, Bytes(4096)).value()),
      image_(layout_.total.count()) {
  std::mt19937 random(seed);
  FillMatrix(layout_.embed, random);
  for (const LayerPlacement& layer : layout_.layers) {
    FillVector(layer.attention_norm, 1.0f, 0.3f, random);
    FillMatrix(layer.qkv, random);
    FillVector(layer.qkv_bias, 0.0f, 0.5f, random);
    FillMatrix(layer.o, random);
    FillVector(layer.o_bias, 0.0f, 0.5f, random);
    FillVector(layer.mlp_norm, 1.0f, 0.3f, random);
    FillMatrix(layer.gate_up, random);
    FillVector(layer.gate_up_bias, 0.0f, 0.5f, random);
    FillMatrix(layer.down, random);
    FillVector(layer.down_bias, 0.0f, 0.5f, random);
  }
  FillVector(layout_.final_norm, 1.0f, 0.3f, random);
  if (!config.tie_word_embeddings) FillMatrix(layout_.lm_head, random);
}

void TestModel::FillMatrix(const MatrixPlacement& at, std::mt19937& random) {
  // Uniform with the variance that keeps activations at their size.
  const float bound = 2.0f * std::sqrt(3.0f / static_cast<float>(at.cols));
  std::vector<uint16_t> row(at.cols);
  for (int64_t r = 0; r < at.rows; ++r) {
    for (uint16_t& w : row) {
      w = RoundToBf16(bound * (static_cast<float>(random()) * 0x1.0p-31f - 1.0f));
    }
    PackRows(row.data(), r, 1, at.rows, at.cols, image_.data() + at.offset.count());
  }
}

void TestModel::FillVector(const VectorPlacement& at, float middle, float spread,
                           std::mt19937& random) {
  auto* values = reinterpret_cast<float*>(image_.data() + at.offset.count());
  for (int32_t i = 0; i < at.size; ++i) {
    values[i] = middle + spread * (static_cast<float>(random()) * 0x1.0p-31f - 1.0f);
  }
}

const float* TestModel::VectorAt(const VectorPlacement& at) const {
  return reinterpret_cast<const float*>(image_.data() + at.offset.count());
}

std::vector<double> TestModel::Multiply(const MatrixPlacement& at, const VectorPlacement& bias,
                                        const std::vector<double>& x) const {
  std::vector<double> out(at.rows);
  std::vector<float> row(at.cols);
  for (int64_t r = 0; r < at.rows; ++r) {
    UnpackRow(image_.data() + at.offset.count(), r, at.cols, row.data());
    for (int64_t k = 0; k < at.cols; ++k) out[r] += double{row[k]} * x[k];
    if (bias.size > 0) out[r] += VectorAt(bias)[r];
  }
  return out;
}

std::vector<double> TestModel::Norm(const VectorPlacement& at, const std::vector<double>& x) const {
  double squares = 0;
  for (const double v : x) squares += v * v;
  const double scale =
      1 / std::sqrt(squares / static_cast<double>(x.size()) + config_.rms_norm_eps);
  std::vector<double> out(x.size());
  for (size_t i = 0; i < x.size(); ++i) out[i] = x[i] * scale * VectorAt(at)[i];
  return out;
}

std::vector<std::vector<double>> TestModel::ReferenceLogits(
    absl::Span<const TokenId> tokens) const {
  const int64_t dim = config_.head_dim, kv_width = config_.num_kv_heads * dim;
  const std::vector<float> frequencies = RopeFrequencies(config_);
  std::vector<std::vector<std::vector<double>>> keys(config_.num_layers), values(keys);
  std::vector<std::vector<double>> logits;
  for (size_t t = 0; t < tokens.size(); ++t) {
    std::vector<float> embedded(config_.hidden_size);
    UnpackRow(image_.data() + layout_.embed.offset.count(), tokens[t], config_.hidden_size,
              embedded.data());
    std::vector<double> x(embedded.begin(), embedded.end());
    for (int l = 0; l < config_.num_layers; ++l) {
      const LayerPlacement& at = layout_.layers[l];
      std::vector<double> qkv = Multiply(at.qkv, at.qkv_bias, Norm(at.attention_norm, x));
      for (int64_t h = 0; h < config_.num_heads + config_.num_kv_heads; ++h) {
        RotateHead(qkv.data() + h * dim, frequencies, static_cast<int64_t>(t));
      }
      const auto k = qkv.begin() + config_.num_heads * dim;
      keys[l].emplace_back(k, k + kv_width);
      values[l].emplace_back(k + kv_width, k + 2 * kv_width);
      for (double& v : keys[l].back()) v = ThroughBf16(v);
      for (double& v : values[l].back()) v = ThroughBf16(v);
      AddTo(x, Multiply(at.o, at.o_bias, AttendLast(config_, qkv, keys[l], values[l])));

      const std::vector<double> gate_up =
          Multiply(at.gate_up, at.gate_up_bias, Norm(at.mlp_norm, x));
      std::vector<double> active(config_.intermediate_size);
      for (size_t i = 0; i < active.size(); ++i) {
        active[i] = gate_up[i] / (1 + std::exp(-gate_up[i])) * gate_up[active.size() + i];
      }
      AddTo(x, Multiply(at.down, at.down_bias, active));
    }
    logits.push_back(Multiply(layout_.lm_head, VectorPlacement{}, Norm(layout_.final_norm, x)));
  }
  return logits;
}

TestKv::TestKv(const ModelConfig& config, int32_t block_tokens, int64_t blocks)
    : block_bytes_(config.KvBytes(block_tokens)), region_(block_bytes_.count() * blocks) {
  std::memset(region_.data(), 0xff, region_.size());
}

}  // namespace palimpsest
