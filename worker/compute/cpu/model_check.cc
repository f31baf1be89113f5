#include "worker/compute/cpu/model_check.h"

#include <cstdint>

#include "absl/strings/str_cat.h"
#include "worker/compute/cpu/kernels.h"
#include "worker/compute/cpu/packing.h"

namespace palimpsest {
namespace {

absl::Status CheckMultiple(const char* what, int64_t value, int64_t factor) {
  if (value > 0 && value % factor == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the CPU kernels need ", what,
                                                 " to be a positive multiple of ", factor,
                                                 ", the model has ", value));
}

absl::Status CheckHeadShape(const ModelConfig& config) {
  absl::Status status;
  int32_t width = config.head_dim;
  if (config.latent.has_value()) {
    const LatentAttention& latent = *config.latent;
    width = latent.cache_width();
    status.Update(CheckMultiple("kv_lora_rank", latent.kv_lora_rank, kPanelRows));
    status.Update(CheckMultiple("v_head_dim", latent.v_head_dim, kPanelRows));
    status.Update(CheckMultiple("qk_rope_head_dim", latent.qk_rope_head_dim, 16));
    if (latent.q_lora_rank > 0) {
      status.Update(CheckMultiple("q_lora_rank", latent.q_lora_rank, 16));
    }
  } else {
    status.Update(CheckMultiple("head_dim", config.head_dim, 16));
    status.Update(CheckMultiple("num_attention_heads", config.num_heads, config.num_kv_heads));
  }
  if (status.ok() && width > kMaxHeadDim) {
    return absl::InvalidArgumentError(absl::StrCat("the CPU kernels take keys of up to ",
                                                   kMaxHeadDim, " numbers a head (head_dim), the ",
                                                   "model has ", width));
  }
  return status;
}

}  // namespace

absl::Status CheckModel(const ModelConfig& config, const ImageLayout& layout) {
  absl::Status status = CheckMultiple("hidden_size", config.hidden_size, kPanelRows);
  status.Update(CheckMultiple("intermediate_size", config.intermediate_size, kPanelRows));
  status.Update(CheckHeadShape(config));
  if (!status.ok()) return status;
  if (config.latent.has_value() && config.kv_dtype != KvDtype::kBf16) {
    return absl::InvalidArgumentError(
        absl::StrCat("latent vectors are stored as bf16, the model's kv_dtype is ",
                     KvDtypeName(config.kv_dtype)));
  }
  if (layout.layers.size() != static_cast<size_t>(config.num_layers)) {
    return absl::InvalidArgumentError(absl::StrCat("the image layout has ", layout.layers.size(),
                                                   " layers, the model has ", config.num_layers));
  }
  return absl::OkStatus();
}

absl::Status CheckHeads(const ModelConfig& config, const HeadSampling& sampling,
                        const LossyHeads& lossy) {
  if (sampling.every < 0 || sampling.recent_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("samples of heads: expected every so many steps, 0 or more, and recent_tokens "
                     "above 0, got ",
                     sampling.every, " and ", sampling.recent_tokens));
  }
  if (config.latent.has_value() && (sampling.every > 0 || lossy.any())) {
    return absl::InvalidArgumentError(
        "latent attention has one vector for all heads: there are no KV heads to sample or drop");
  }
  if (!lossy.any()) return absl::OkStatus();
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    if (config.WindowOf(layer) == INT32_MAX) continue;
    return absl::InvalidArgumentError(absl::StrCat("lossy heads: expected full attention, layer ",
                                                   layer, " of the model has a sliding window of ",
                                                   config.WindowOf(layer), " tokens"));
  }
  const int64_t heads = int64_t{config.num_layers} * config.num_kv_heads;
  if (std::ssize(lossy.dropped) != heads || lossy.recent_tokens < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("lossy heads: expected ", heads, " heads and recent_tokens above 0, got ",
                     lossy.dropped.size(), " and ", lossy.recent_tokens));
  }
  return absl::OkStatus();
}

}  // namespace palimpsest
