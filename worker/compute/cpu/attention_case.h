// One layer's attention over random KV, for tests: what the kernels say, and float64.
#ifndef PALIMPSEST_WORKER_COMPUTE_CPU_ATTENTION_CASE_H_
#define PALIMPSEST_WORKER_COMPUTE_CPU_ATTENTION_CASE_H_

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "common/e4m3.h"
#include "common/ids.h"
#include "worker/compute/cpu/kernels.h"

namespace palimpsest {

inline std::vector<float> RandomFloats(int64_t count, std::mt19937& random) {
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& v : values) v = normal(random);
  return values;
}

inline float FromBf16(uint16_t v) { return std::bit_cast<float>(uint32_t{v} << 16); }

// Random KV in scattered blocks, with NaN wherever nothing was written. `latent`: values are the
// first numbers of the one KV head's keys.
class AttentionCase {
 public:
  AttentionCase(std::mt19937& random, int32_t positions, bool latent)
      : kv_heads_(latent ? 1 : 1 + random() % 3),
        group_(1 + random() % 8),
        dim_(16 * (1 + random() % 8)),
        value_dim_(latent ? 16 * (1 + random() % (dim_ / 16)) : dim_),
        value_plane_(latent ? 0 : 1),
        block_tokens_(1 << random() % 7),
        positions_(positions) {
    const int64_t token = kv_heads_ * dim_;
    const int64_t block = 2 * block_tokens_ * token;
    const int32_t blocks = (positions + block_tokens_ - 1) / block_tokens_;
    kv_.assign((blocks + 3) * block, 0x7fff);
    std::vector<uint32_t> ids(blocks + 2);
    std::iota(ids.begin(), ids.end(), 1);
    std::shuffle(ids.begin(), ids.end(), random);
    for (int32_t b = 0; b < blocks; ++b) table_.push_back(BlockId(ids[b]));
    std::normal_distribution<float> normal;
    for (int32_t p = 0; p < positions; ++p) {
      for (int plane = 0; plane < 2; ++plane) {
        for (int64_t i = 0; i < token; ++i) {
          kv_[At(p, plane) + i] =
              static_cast<uint16_t>(std::bit_cast<uint32_t>(normal(random)) >> 16);
        }
      }
    }
    queries_ = RandomFloats(int64_t{positions} * QueryWidth(), random);
    task_.query_stride = QueryWidth();
    task_.output_stride = Width();
    task_.value_dim = value_dim_;
    task_.scale = 0.3f / std::sqrt(static_cast<float>(1 + random() % dim_));
    task_.softcap = random() % 2 == 0 ? 0.0f : 1.5f;
    task_.kv_heads = kv_heads_;
    task_.group = group_;
    task_.head_dim = dim_;
    task_.kv = reinterpret_cast<const std::byte*>(kv_.data());
    task_.block_bytes = block * 2;
    task_.block_tokens = block_tokens_;
    task_.value_offset = value_plane_ * block_tokens_ * token * 2;
    task_.token_bytes = token * 2;
  }

  void RoundToE4m3() {
    for (uint16_t& v : kv_) {
      v = std::bit_cast<uint32_t>(E4m3ToFloat(FloatToE4m3(FromBf16(v)))) >> 16;
    }
  }
  // The same numbers in eight bits; exact if they were rounded.
  void StoreAsE4m3() {
    for (const uint16_t v : kv_) codes_.push_back(FloatToE4m3(FromBf16(v)));
    task_.kv = reinterpret_cast<const std::byte*>(codes_.data());
    task_.e4m3 = true;
    task_.block_bytes /= 2;
    task_.value_offset /= 2;
    task_.token_bytes /= 2;
  }

  void SetWindow(int32_t window) { task_.window = window; }
  void KeepFirstTile() { task_.keep_first_tile = true; }
  int32_t kv_heads() const { return kv_heads_; }
  int32_t group() const { return group_; }
  int64_t QueryWidth() const { return int64_t{kv_heads_} * group_ * dim_; }
  int64_t Width() const { return int64_t{kv_heads_} * group_ * value_dim_; }

  // Attention of tokens first .. first + count - 1, for all heads or head by head.
  std::vector<float> Run(const Kernels& kernels, int32_t first, int32_t count, bool together) {
    std::vector<float> out(count * Width());
    // Blocks that nobody sees may be given away.
    std::vector<BlockId> table = table_;
    for (int32_t b = 0; b < static_cast<int32_t>(table.size()); ++b) {
      bool seen = false;
      for (int32_t j = b * block_tokens_; j < (b + 1) * block_tokens_; ++j) {
        for (int32_t p = first; p < first + count; ++p) seen |= Sees(p, j);
      }
      if (!seen) table[b] = BlockId(0);
    }
    AttentionTask task = task_;
    task.block_table = table.data();
    task.first_position = first;
    task.tokens = count;
    task.kv_heads = together ? kv_heads_ : 1;
    std::vector<float> scratch(
        AttentionScratchFloats(int64_t{count} * group_ * task.kv_heads, dim_));
    for (int32_t h = 0; h < kv_heads_; h += task.kv_heads) {
      task.query = queries_.data() + first * QueryWidth() + h * group_ * dim_;
      task.output = out.data() + h * group_ * value_dim_;
      const int64_t number = task.e4m3 ? 1 : 2;
      task.key_offset = h * dim_ * number;
      task.value_offset = task_.value_offset + h * value_dim_ * number;
      kernels.attention(task, scratch.data());
    }
    return out;
  }

  // For each KV head the share of far keys.
  std::vector<float> FarShares(const Kernels& kernels, int32_t position, int32_t recent) const {
    std::vector<float> shares(kv_heads_);
    AttentionTask task = task_;
    task.block_table = table_.data();
    task.first_position = position;
    task.tokens = 1;
    task.query = queries_.data() + position * QueryWidth();
    std::vector<float> scratch(AttentionScratchFloats(int64_t{group_} * kv_heads_, dim_));
    kernels.far_shares(task, recent, scratch.data(), shares.data());
    return shares;
  }

  // Attention weights of a query head over positions 0 .. position; they sum to one.
  std::vector<double> Weights(int32_t position, int64_t head) const {
    const float* query = queries_.data() + position * QueryWidth() + head * dim_;
    std::vector<double> weight(position + 1);
    double total = 0;
    for (int32_t j = 0; j <= position; ++j) {
      if (!Sees(position, j)) continue;
      for (int64_t d = 0; d < dim_; ++d) {
        weight[j] += double{query[d]} * FromBf16(kv_[At(j, 0) + head / group_ * dim_ + d]);
      }
      weight[j] *= task_.scale;
      if (task_.softcap > 0) weight[j] = task_.softcap * std::tanh(weight[j] / task_.softcap);
      total += weight[j] = std::exp(weight[j]);
    }
    for (double& w : weight) w /= total;
    return weight;
  }

  std::vector<double> Reference(int32_t position) const {
    std::vector<double> out(Width());
    for (int64_t h = 0; h < kv_heads_ * group_; ++h) {
      const std::vector<double> weight = Weights(position, h);
      for (int32_t j = 0; j <= position; ++j) {
        if (weight[j] == 0) continue;
        for (int64_t d = 0; d < value_dim_; ++d) {
          out[h * value_dim_ + d] +=
              weight[j] * FromBf16(kv_[At(j, value_plane_) + h / group_ * value_dim_ + d]);
        }
      }
    }
    return out;
  }

 private:
  bool Sees(int32_t position, int32_t key) const {
    if (key > position) return false;
    const int32_t oldest = position < task_.window ? 0 : position - task_.window + 1;
    if (!task_.keep_first_tile) return key >= oldest;
    return key < kKeyTile || key / kKeyTile >= oldest / kKeyTile;
  }

  int64_t At(int32_t position, int plane) const {
    const int64_t token = int64_t{kv_heads_} * dim_;
    return (int64_t{table_[position / block_tokens_].value()} * 2 + plane) * block_tokens_ * token +
           position % block_tokens_ * token;
  }

  const int32_t kv_heads_, group_, dim_, value_dim_, value_plane_, block_tokens_, positions_;
  std::vector<uint16_t> kv_;
  std::vector<uint8_t> codes_;
  std::vector<BlockId> table_;
  std::vector<float> queries_;
  AttentionTask task_;
};

}  // namespace palimpsest

#endif  // PALIMPSEST_WORKER_COMPUTE_CPU_ATTENTION_CASE_H_
