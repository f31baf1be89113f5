// The float64 forward pass of TestModel: written for clarity, shares no arithmetic with the
// kernels.
#include <algorithm>
#include <bit>
#include <cmath>
#include <map>
#include <numbers>
#include <utility>
#include <vector>

#include "common/e4m3.h"
#include "worker/compute/cpu/packing.h"
#include "worker/compute/cpu/rope.h"
#include "worker/compute/cpu/test_model.h"

namespace palimpsest {
namespace {

using Vector = std::vector<double>;

// Through the nearest number that the KV cache can hold.
void Round(KvDtype dtype, Vector& x) {
  for (double& v : x) {
    if (dtype == KvDtype::kFp8E4m3) {
      v = E4m3ToFloat(FloatToE4m3(static_cast<float>(v)));
      continue;
    }
    const auto bits = std::bit_cast<uint32_t>(static_cast<float>(v));
    v = std::bit_cast<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000);
  }
}

void AddTo(Vector& x, const Vector& y) {
  for (size_t i = 0; i < x.size(); ++i) x[i] += y[i];
}

double SoftCapped(double x, double cap) { return cap > 0 ? cap * std::tanh(x / cap) : x; }

Vector Slice(const Vector& x, int64_t first, int64_t count) {
  return Vector(x.begin() + first, x.begin() + first + count);
}

class Float64Model {
 public:
  Float64Model(const ModelConfig& config, const ImageLayout& layout, const std::byte* image)
      : config_(config),
        layout_(layout),
        image_(image),
        frequencies_(RopeFrequencies(config)),
        cache_(config.num_layers) {}

  // Logits after the next token.
  Vector Step(TokenId token) {
    Vector x = Row(layout_.embed, token);
    for (double& v : x) v *= config_.embedding_scale;
    if (config_.position_table_offset.has_value()) {
      AddTo(x, Row(layout_.positions, position_ + *config_.position_table_offset));
    }
    for (int32_t l = 0; l < config_.num_layers; ++l) {
      const LayerPlacement& at = layout_.layers[l];
      const Vector normed = Norm(at.attention_norm, at.attention_norm_bias, x);
      const Vector attended = config_.latent ? LatentAttend(l, normed) : Attend(l, normed);
      Join(x, Multiply(at.o, at.o_bias, attended), at.post_attention_norm);
      Join(x, Mlp(at, Norm(at.mlp_norm, at.mlp_norm_bias, x)), at.post_mlp_norm);
    }
    ++position_;
    Vector logits = Multiply(layout_.lm_head, VectorPlacement{},
                             Norm(layout_.final_norm, layout_.final_norm_bias, x));
    for (double& v : logits) v = SoftCapped(v, config_.logit_softcap);
    return logits;
  }

 private:
  // Keys and values of each token in one layer.
  struct Cache {
    std::vector<Vector> keys;
    std::vector<Vector> values;
  };

  // A matrix as floats, row by row; unpacked when it is first needed.
  const float* Matrix(const MatrixPlacement& at) {
    std::vector<float>& values = matrices_[at.offset.count()];
    if (values.empty()) {
      values.resize(static_cast<size_t>(int64_t{at.rows} * at.cols));
      for (int64_t r = 0; r < at.rows; ++r) {
        UnpackRow(image_ + at.offset.count(), r, at.cols, values.data() + r * at.cols);
      }
    }
    return values.data();
  }

  Vector Row(const MatrixPlacement& at, int64_t row) {
    const float* values = Matrix(at) + row * at.cols;
    return Vector(values, values + at.cols);
  }

  double Number(const VectorPlacement& at, int64_t i) const {
    return reinterpret_cast<const float*>(image_ + at.offset.count())[i];
  }

  // Rows first .. first + count - 1 of a matrix times x.
  Vector MultiplyRows(const MatrixPlacement& at, int64_t first, int64_t count, const Vector& x) {
    Vector out(count);
    const float* row = Matrix(at) + first * at.cols;
    for (int64_t r = 0; r < count; ++r, row += at.cols) {
      double sum = 0;
      for (int64_t k = 0; k < at.cols; ++k) sum += double{row[k]} * x[k];
      out[r] = sum;
    }
    return out;
  }

  Vector Multiply(const MatrixPlacement& at, const VectorPlacement& bias, const Vector& x) {
    Vector out = MultiplyRows(at, 0, at.rows, x);
    for (int32_t i = 0; i < bias.size; ++i) out[i] += Number(bias, i);
    return out;
  }

  Vector RmsNorm(const VectorPlacement& weight, const Vector& x) const {
    double squares = 0;
    for (const double v : x) squares += v * v;
    const double root = std::sqrt(squares / static_cast<double>(x.size()) + config_.rms_norm_eps);
    Vector out(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      out[i] = x[i] / root * (config_.norm_weight_offset + Number(weight, i));
    }
    return out;
  }

  Vector Norm(const VectorPlacement& weight, const VectorPlacement& bias, const Vector& x) const {
    if (config_.norm == NormKind::kRms) return RmsNorm(weight, x);
    const auto size = static_cast<double>(x.size());
    double sum = 0, squares = 0;
    for (const double v : x) sum += v;
    for (const double v : x) squares += (v - sum / size) * (v - sum / size);
    Vector out(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      out[i] = (x[i] - sum / size) / std::sqrt(squares / size + config_.rms_norm_eps) *
                   Number(weight, i) +
               Number(bias, i);
    }
    return out;
  }

  void Join(Vector& x, const Vector& branch, const VectorPlacement& post_norm) const {
    AddTo(x, post_norm.size > 0 ? RmsNorm(post_norm, branch) : branch);
  }

  Vector Mlp(const LayerPlacement& at, const Vector& x) {
    const Vector up = Multiply(at.gate_up, at.gate_up_bias, x);
    Vector active(config_.intermediate_size);
    for (size_t i = 0; i < active.size(); ++i) {
      const double g = up[i];
      switch (config_.activation) {
        case Activation::kRelu:
          active[i] = std::max(0.0, g);
          break;
        case Activation::kSiluGated:
          active[i] = g / (1 + std::exp(-g)) * up[active.size() + i];
          break;
        case Activation::kGeluTanhGated:
          active[i] =
              0.5 * g *
              (1 + std::tanh(std::sqrt(2 / std::numbers::pi) * (g + 0.044715 * g * g * g))) *
              up[active.size() + i];
          break;
      }
    }
    return Multiply(at.down, at.down_bias, active);
  }

  // Rotates the last rotary_dim() numbers of a head.
  void Rotate(Vector& head) const {
    const size_t half = frequencies_.size(), first = head.size() - 2 * half;
    for (size_t i = 0; i < half; ++i) {
      const double angle = static_cast<double>(position_) * frequencies_[i];
      const double cosine = std::cos(angle) * RopeMagnitude(config_);
      const double sine = std::sin(angle) * RopeMagnitude(config_);
      const double a = head[first + i], b = head[first + half + i];
      head[first + i] = a * cosine - b * sine;
      head[first + half + i] = b * cosine + a * sine;
    }
  }

  // Softmax-weighted sum of the values of KV head `head`.
  Vector AttendHead(int32_t layer, const Vector& query, int64_t head) const {
    const std::vector<Vector>& keys = cache_[layer].keys;
    const std::vector<Vector>& values = cache_[layer].values;
    const int64_t key = head * config_.head_dim, value = head * config_.value_dim();
    const auto first = std::max<int64_t>(0, int64_t{position_} - config_.WindowOf(layer) + 1);
    Vector weights(position_ + 1), out(config_.value_dim());
    double largest = -INFINITY, total = 0;
    for (int64_t j = first; j <= position_; ++j) {
      for (size_t d = 0; d < query.size(); ++d) weights[j] += query[d] * keys[j][key + d];
      weights[j] = SoftCapped(weights[j] * config_.AttentionScale(), config_.attention_softcap);
      largest = std::max(largest, weights[j]);
    }
    for (int64_t j = first; j <= position_; ++j) {
      total += weights[j] = std::exp(weights[j] - largest);
    }
    for (int64_t j = first; j <= position_; ++j) {
      for (size_t d = 0; d < out.size(); ++d) out[d] += weights[j] / total * values[j][value + d];
    }
    return out;
  }

  Vector Attend(int32_t layer, const Vector& x) {
    const LayerPlacement& at = layout_.layers[layer];
    const int64_t dim = config_.head_dim, group = config_.num_heads / config_.num_kv_heads;
    const Vector qkv = Multiply(at.qkv, at.qkv_bias, x);
    const auto head = [&](int64_t h, const VectorPlacement& norm) {
      Vector out = Slice(qkv, h * dim, dim);
      if (norm.size > 0) out = RmsNorm(norm, out);
      if (config_.rotary()) Rotate(out);
      return out;
    };
    Vector keys;
    for (int64_t h = 0; h < config_.num_kv_heads; ++h) {
      const Vector key = head(config_.num_heads + h, at.k_norm);
      keys.insert(keys.end(), key.begin(), key.end());
    }
    const int64_t kv_width = config_.num_kv_heads * dim;
    Vector values = Slice(qkv, config_.num_heads * dim + kv_width, kv_width);
    Round(config_.kv_dtype, keys);
    Round(config_.kv_dtype, values);
    cache_[layer].keys.push_back(std::move(keys));
    cache_[layer].values.push_back(std::move(values));
    Vector out;
    for (int64_t h = 0; h < config_.num_heads; ++h) {
      const Vector one = AttendHead(layer, head(h, at.q_norm), h / group);
      out.insert(out.end(), one.begin(), one.end());
    }
    return out;
  }

  // Not absorbed: keys and values of each head are made from the rounded latents.
  Vector LatentAttend(int32_t layer, const Vector& x) {
    const LayerPlacement& at = layout_.layers[layer];
    const LatentAttention& latent = *config_.latent;
    const Vector down = Multiply(at.qkv, VectorPlacement{}, x);
    const int64_t q_size = at.qkv.rows - latent.cache_width();
    Vector queries = Slice(down, 0, q_size);
    if (latent.q_lora_rank > 0) {
      queries = Multiply(at.q_up, VectorPlacement{}, RmsNorm(at.q_norm, queries));
    }
    Vector cached = RmsNorm(at.k_norm, Slice(down, q_size, latent.kv_lora_rank));
    Vector rotary = Slice(down, q_size + latent.kv_lora_rank, latent.qk_rope_head_dim);
    Rotate(rotary);
    cached.insert(cached.end(), rotary.begin(), rotary.end());
    Round(config_.kv_dtype, cached);

    Vector keys, values;
    for (int64_t h = 0; h < config_.num_heads; ++h) {
      Vector key(latent.qk_nope_head_dim);
      for (int64_t l = 0; l < latent.kv_lora_rank; ++l) {
        const float* row = Matrix(at.k_up) + (h * latent.kv_lora_rank + l) * at.k_up.cols;
        for (size_t n = 0; n < key.size(); ++n) key[n] += row[n] * cached[l];
      }
      keys.insert(keys.end(), key.begin(), key.end());
      keys.insert(keys.end(), cached.begin() + latent.kv_lora_rank, cached.end());
      const Vector value = MultiplyRows(at.v_up, h * latent.v_head_dim, latent.v_head_dim, cached);
      values.insert(values.end(), value.begin(), value.end());
    }
    cache_[layer].keys.push_back(std::move(keys));
    cache_[layer].values.push_back(std::move(values));

    Vector out;
    for (int64_t h = 0; h < config_.num_heads; ++h) {
      Vector query = Slice(queries, h * config_.head_dim, config_.head_dim);
      Rotate(query);
      const Vector one = AttendHead(layer, query, h);
      out.insert(out.end(), one.begin(), one.end());
    }
    return out;
  }

  const ModelConfig& config_;
  const ImageLayout& layout_;
  const std::byte* const image_;
  const std::vector<float> frequencies_;
  std::map<int64_t, std::vector<float>> matrices_;  // by offset
  std::vector<Cache> cache_;
  int32_t position_ = 0;
};

}  // namespace

std::vector<std::vector<double>> TestModel::ReferenceLogits(
    absl::Span<const TokenId> tokens) const {
  Float64Model model(config_, layout_, image_.data());
  std::vector<Vector> logits;
  for (const TokenId token : tokens) logits.push_back(model.Step(token));
  return logits;
}

}  // namespace palimpsest
