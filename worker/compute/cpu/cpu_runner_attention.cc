// Attention of a layer: from the residual stream to the input of the output projection.
#include <algorithm>
#include <cmath>

#include "common/e4m3.h"
#include "worker/compute/cpu/cpu_runner.h"
#include "worker/compute/cpu/packing.h"

namespace palimpsest {
namespace {

void DropFarKeys(int32_t recent_tokens, AttentionTask& task) {
  task.window = std::min(task.window, recent_tokens);
  task.keep_first_tile = true;
}

}  // namespace

void CpuRunner::NormalizeHead(const VectorPlacement& weight, float* head) const {
  if (weight.size == 0) return;
  kernels_.rms_norm(head, VectorAt(weight), weight.size, config_.rms_norm_eps,
                    config_.norm_weight_offset, head);
}

// The block of a row's token.
std::byte* CpuRunner::CacheOf(int64_t row) const {
  const int64_t first_block = chunks_[rows_[row].chunk].first_block;
  const BlockId block = block_tables_[first_block + rows_[row].position / block_tokens_];
  return memory_.kv + int64_t{block.value()} * memory_.kv_block_bytes.count();
}

void CpuRunner::RotateAndStore(int layer, int64_t row, int32_t kv_head) {
  const LayerPlacement& at = layout_.layers[layer];
  const int64_t dim = config_.head_dim, half = std::ssize(frequencies_);
  const float* cosines = cosines_.data() + row * half;
  const float* sines = sines_.data() + row * half;
  float* q = qkv_.data() + row * qkv_stride_;
  float* k = q + (config_.num_heads + kv_head) * dim;
  const float* v = k + config_.num_kv_heads * dim;
  for (int32_t h = kv_head * group_; h < (kv_head + 1) * group_; ++h) {
    NormalizeHead(at.q_norm, q + h * dim);
    kernels_.rotate(q + h * dim, cosines, sines, half);
  }
  NormalizeHead(at.k_norm, k);
  kernels_.rotate(k, cosines, sines, half);

  const int64_t slot = rows_[row].position % block_tokens_;
  std::byte* keys = CacheOf(row) + (int64_t{2} * layer * block_tokens_ + slot) * token_bytes_ +
                    kv_head * dim * KvElementBytes(config_.kv_dtype);
  StoreKv(k, dim, keys);
  StoreKv(v, dim, keys + block_tokens_ * token_bytes_);
}

void CpuRunner::StoreKv(const float* from, int64_t size, std::byte* to) const {
  if (config_.kv_dtype == KvDtype::kBf16) {
    kernels_.to_bf16(from, size, reinterpret_cast<uint16_t*>(to));
    return;
  }
  for (int64_t i = 0; i < size; ++i) to[i] = std::byte{FloatToE4m3(from[i])};
}

AttentionTask CpuRunner::TaskOf(int layer, const AttentionItem& item) const {
  AttentionTask task;
  task.kv_heads = item.groups;
  task.group = group_;
  task.scale = config_.AttentionScale();
  task.softcap = config_.attention_softcap;
  task.window = config_.WindowOf(layer);
  task.first_position = rows_[item.first_row].position;
  task.tokens = item.tokens;
  task.kv = memory_.kv;
  task.e4m3 = config_.kv_dtype == KvDtype::kFp8E4m3;
  task.block_bytes = memory_.kv_block_bytes.count();
  task.block_tokens = block_tokens_;
  task.block_table = block_tables_.data() + chunks_[item.chunk].first_block;
  task.token_bytes = token_bytes_;
  task.head_dim = task.value_dim = config_.head_dim;
  task.query_stride = qkv_stride_;
  task.query =
      qkv_.data() + item.first_row * qkv_stride_ + int64_t{item.group} * group_ * task.head_dim;
  task.key_offset = int64_t{2} * layer * block_tokens_ * token_bytes_ +
                    int64_t{item.group} * config_.head_dim * KvElementBytes(config_.kv_dtype);
  task.value_offset = task.key_offset + block_tokens_ * token_bytes_;
  return task;
}

AttentionTask CpuRunner::LatentTaskOf(int layer, const AttentionItem& item) {
  AttentionTask task = TaskOf(layer, item);
  const int64_t first_head = int64_t{item.group} * group_;
  task.head_dim = config_.latent->cache_width();
  task.value_dim = config_.latent->kv_lora_rank;
  task.query_stride = absorbed_stride_;
  task.query = absorbed_.data() + item.first_row * absorbed_stride_ + first_head * task.head_dim;
  task.output_stride = latent_stride_;
  task.output = latents_.data() + item.first_row * latent_stride_ + first_head * task.value_dim;
  // The values are the first numbers of the keys.
  task.key_offset = task.value_offset = int64_t{layer} * block_tokens_ * token_bytes_;
  return task;
}

void CpuRunner::Attend(int layer, const AttentionItem& item, int thread) {
  AttentionTask task = config_.latent.has_value() ? LatentTaskOf(layer, item) : TaskOf(layer, item);
  if (!config_.latent.has_value()) {
    task.output_stride = attention_stride_;
    task.output = attention_.data() + item.first_row * attention_stride_ +
                  int64_t{item.group} * group_ * task.head_dim;
  }
  if (lossy_heads_.any() && lossy_heads_.dropped[layer * groups_ + item.group] != 0) {
    DropFarKeys(lossy_heads_.recent_tokens, task);
  }
  kernels_.attention(task, thread_states_[thread].attention.data());
}

void CpuRunner::PlanHeadSample(const StepPlan& plan) {
  head_sample_.reset();
  const std::optional<int32_t> chunk = head_sampler_.Choose(plan);
  if (!chunk.has_value()) return;
  const auto past = std::upper_bound(rows_.begin(), rows_.end(), *chunk,
                                     [](int32_t c, const Row& row) { return c < row.chunk; });
  head_sample_ = AttentionItem{.chunk = *chunk,
                               .first_row = static_cast<int32_t>(past - rows_.begin()) - 1,
                               .tokens = 1,
                               .group = 0,
                               .groups = 1,
                               .cost = 0};
  const size_t heads = layout_.layers.size() * static_cast<size_t>(groups_);
  result_.head_sample.shares.assign(heads, 0.0f);
  result_.head_sample.effects.assign(heads, 0.0f);
}

float CpuRunner::EffectOfFarKeys(int layer, const AttentionItem& item, int thread) {
  const int64_t size = int64_t{group_} * config_.head_dim;
  float* with = thread_states_[thread].sampled.data();
  float* without = with + size;
  AttentionTask task = TaskOf(layer, item);
  task.output = with;
  task.output_stride = size;
  kernels_.attention(task, thread_states_[thread].attention.data());
  task.output = without;
  DropFarKeys(head_sampling_.recent_tokens, task);
  kernels_.attention(task, thread_states_[thread].attention.data());
  double moved = 0, length = 0;
  for (int64_t i = 0; i < size; ++i) {
    moved += std::pow(double{with[i]} - without[i], 2);
    length += std::pow(double{with[i]}, 2);
  }
  return moved < length ? static_cast<float>(std::sqrt(moved / length)) : moved > 0 ? 1.0f : 0.0f;
}

void CpuRunner::SampleHeads(int layer, Member& member) {
  member.ForEach(groups_, 1, [&](int64_t first, int64_t last) {
    for (int64_t head = first; head < last; ++head) {
      AttentionItem item = *head_sample_;
      item.group = static_cast<int32_t>(head);
      const int64_t number = layer * groups_ + head;
      kernels_.far_shares(TaskOf(layer, item), head_sampling_.recent_tokens,
                          thread_states_[member.thread()].attention.data(),
                          &result_.head_sample.shares[number]);
      // Where a layer's own window hides far keys, they have none.
      if (result_.head_sample.shares[number] == 0) continue;
      result_.head_sample.effects[number] = EffectOfFarKeys(layer, item, member.thread());
    }
  });
}

void CpuRunner::RunAttention(int layer, Member& member) {
  const LayerPlacement& at = layout_.layers[layer];
  ProjectNormalized({kernels_.project, at.qkv, at.qkv_bias},
                    {at.attention_norm, at.attention_norm_bias, {}, rows()}, qkv_, qkv_stride_,
                    member);
  if (!rotate_in_attention_) {
    member.ForEach(rows(), 1, [&](int64_t first, int64_t last) {
      for (int64_t row = first; row < last; ++row) {
        for (int32_t h = 0; h < config_.num_kv_heads; ++h) RotateAndStore(layer, row, h);
      }
    });
  }
  member.ForEach(std::ssize(items_), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) {
      const AttentionItem& item = items_[i];
      for (int32_t t = 0; rotate_in_attention_ && t < item.tokens; ++t) {
        for (int32_t h = 0; h < item.groups; ++h) {
          RotateAndStore(layer, item.first_row + t, item.group + h);
        }
      }
      Attend(layer, item, member.thread());
    }
  });
  if (head_sample_.has_value()) SampleHeads(layer, member);
}

void CpuRunner::StoreLatent(int layer, int64_t row) {
  const LayerPlacement& at = layout_.layers[layer];
  const LatentAttention& latent = *config_.latent;
  const int64_t half = std::ssize(frequencies_);
  float* queries = qkv_.data() + row * qkv_stride_;
  NormalizeHead(at.q_norm, queries);
  float* cached = queries + at.qkv.rows - latent.cache_width();
  NormalizeHead(at.k_norm, cached);
  kernels_.rotate(cached + latent.kv_lora_rank, cosines_.data() + row * half,
                  sines_.data() + row * half, half);
  const int64_t slot = rows_[row].position % block_tokens_;
  std::byte* to = CacheOf(row) + (int64_t{layer} * block_tokens_ + slot) * token_bytes_;
  kernels_.to_bf16(cached, latent.cache_width(), reinterpret_cast<uint16_t*>(to));
}

void CpuRunner::AbsorbQueries(int layer, const float* query, int64_t query_stride, int64_t head,
                              int64_t first, int64_t last) {
  const LatentAttention& latent = *config_.latent;
  const int64_t half = std::ssize(frequencies_), width = latent.cache_width();
  const VectorPlacement no_bias;
  Projection projection = MakeProjection({kernels_.project, layout_.layers[layer].k_up, no_bias},
                                         absorbed_, absorbed_stride_);
  projection.weights += PackedMatrixBytes(head * latent.kv_lora_rank, projection.cols).count();
  projection.rows = latent.kv_lora_rank;
  projection.input = query + head * config_.head_dim;
  projection.input_stride = query_stride;
  projection.output += head * width;
  kernels_.project(projection, first, last);
  if (first > 0) return;
  for (int64_t row = 0; row < rows(); ++row) {
    const float* from = projection.input + row * query_stride + latent.qk_nope_head_dim;
    float* to = projection.output + row * absorbed_stride_ + latent.kv_lora_rank;
    std::copy_n(from, 2 * half, to);
    kernels_.rotate(to, cosines_.data() + row * half, sines_.data() + row * half, half);
  }
}

void CpuRunner::ProjectValues(int layer, int64_t head, int64_t first, int64_t last) {
  const LatentAttention& latent = *config_.latent;
  const VectorPlacement no_bias;
  Projection projection = MakeProjection({kernels_.project, layout_.layers[layer].v_up, no_bias},
                                         attention_, attention_stride_);
  projection.weights += PackedMatrixBytes(head * latent.v_head_dim, projection.cols).count();
  projection.rows = latent.v_head_dim;
  projection.input = latents_.data() + head * latent.kv_lora_rank;
  projection.input_stride = latent_stride_;
  projection.output += head * latent.v_head_dim;
  kernels_.project(projection, first, last);
}

void CpuRunner::RunLatentAttention(int layer, Member& member) {
  const LayerPlacement& at = layout_.layers[layer];
  const LatentAttention& latent = *config_.latent;
  const VectorPlacement no_bias;
  ProjectNormalized({kernels_.project, at.qkv, no_bias},
                    {at.attention_norm, at.attention_norm_bias, {}, rows()}, qkv_, qkv_stride_,
                    member);
  member.ForEach(rows(), 1, [&](int64_t first, int64_t last) {
    for (int64_t row = first; row < last; ++row) StoreLatent(layer, row);
  });
  const float* queries = qkv_.data();
  int64_t query_stride = qkv_stride_;
  if (latent.q_lora_rank > 0) {
    query_stride = int64_t{config_.num_heads} * config_.head_dim;
    queries = queries_.data();
    Projection projection =
        MakeProjection({kernels_.project, at.q_up, no_bias}, queries_, query_stride);
    projection.input = qkv_.data();
    projection.input_stride = qkv_stride_;
    member.ForEach(PanelCount(at.q_up.rows), 1,
                   [&](int64_t first, int64_t last) { kernels_.project(projection, first, last); });
  }
  // Units of work are the panels of one head after another's.
  const auto for_each_head = [&](int64_t panels, auto&& work) {
    member.ForEach(config_.num_heads * panels, 1, [&](int64_t first, int64_t last) {
      while (first < last) {
        const int64_t head = first / panels, end = std::min(last, (head + 1) * panels);
        work(head, first - head * panels, end - head * panels);
        first = end;
      }
    });
  };
  for_each_head(PanelCount(latent.kv_lora_rank), [&](int64_t head, int64_t first, int64_t last) {
    AbsorbQueries(layer, queries, query_stride, head, first, last);
  });
  member.ForEach(std::ssize(items_), 1, [&](int64_t first, int64_t last) {
    for (int64_t i = first; i < last; ++i) Attend(layer, items_[i], member.thread());
  });
  for_each_head(PanelCount(latent.v_head_dim), [&](int64_t head, int64_t first, int64_t last) {
    ProjectValues(layer, head, first, last);
  });
}

}  // namespace palimpsest
