#include "worker/compute/cuda/model_check.h"

#include "absl/strings/str_cat.h"
#include "worker/compute/cuda/latent_attention.h"
#include "worker/compute/cuda/latent_plan.h"
#include "worker/compute/cuda/sampler.h"

namespace palimpsest::cuda {
namespace {

absl::Status CheckMultiple(const char* what, int64_t value, int64_t factor) {
  if (value > 0 && value % factor == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("the GPU kernels need ", what,
                                                 " to be a positive multiple of ", factor,
                                                 ", the model has ", value));
}

absl::Status CheckLatent(const ModelConfig& config) {
  if (config.kv_dtype != KvDtype::kBf16) {
    return absl::InvalidArgumentError(
        absl::StrCat("latent vectors are stored as bf16, the model's kv_dtype is ",
                     KvDtypeName(config.kv_dtype)));
  }
  const LatentAttention& latent = *config.latent;
  if (latent.kv_lora_rank != kLatentRank || latent.qk_rope_head_dim != kLatentRotary) {
    return absl::InvalidArgumentError(
        absl::StrCat("the GPU kernels take latent attention with kv_lora_rank ", kLatentRank,
                     " and qk_rope_head_dim ", kLatentRotary, ", the model has ",
                     latent.kv_lora_rank, " and ", latent.qk_rope_head_dim));
  }
  if (!TakesLatentHeads(config.num_heads)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the GPU kernels take latent attention with 1, 2, 4 ... 128 heads, the model "
                     "has ",
                     config.num_heads));
  }
  if (config.sliding_window.has_value()) {
    return absl::InvalidArgumentError("the GPU kernels take no window with latent attention");
  }
  absl::Status status = CheckMultiple("qk_nope_head_dim", latent.qk_nope_head_dim, 8);
  status.Update(CheckMultiple("v_head_dim", latent.v_head_dim, 8));
  if (latent.q_lora_rank > 0) status.Update(CheckMultiple("q_lora_rank", latent.q_lora_rank, 8));
  return status;
}

absl::Status CheckHeads(const ModelConfig& config) {
  if (config.latent.has_value()) return CheckLatent(config);
  const bool capped = config.attention_softcap > 0;
  if (config.head_dim != 128 && config.head_dim != 256 && (config.head_dim != 64 || capped)) {
    return absl::InvalidArgumentError(
        absl::StrCat("the GPU kernels take head_dim ",
                     capped ? "128 and 256 with a soft cap of scores" : "64, 128 and 256",
                     ", the model has ", config.head_dim));
  }
  if (config.kv_dtype == KvDtype::kFp8E4m3 && (config.head_dim == 256 || capped)) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the GPU kernels take kv_dtype fp8_e4m3 with head_dim 64 and 128 and without a soft cap of "
        "scores; set the tenant's kv_dtype: bf16 for this ",
        config.architecture));
  }
  return CheckMultiple("num_attention_heads", config.num_heads, config.num_kv_heads);
}

}  // namespace

absl::Status CheckModel(const ModelConfig& config, const ImageLayout& layout, int ranks) {
  absl::Status status = CheckMultiple("hidden_size", config.hidden_size, 8);
  status.Update(CheckMultiple("intermediate_size", config.intermediate_size, 8));
  status.Update(CheckHeads(config));
  if (!status.ok()) return status;
  if (config.hidden_size > 32768 || config.vocab_size > kMaxVocabulary) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the GPU kernels take hidden_size up to 32768 and vocab_size up to ", kMaxVocabulary,
        ", the model has ", config.hidden_size, " and ", config.vocab_size));
  }
  if (layout.format != WeightFormat::kRowMajor) {
    return absl::InvalidArgumentError(
        "the GPU runner needs a row-major image; is the broker's pool one of GPU memory?");
  }
  if (config.ranks != ranks) {
    return absl::InvalidArgumentError(
        absl::StrCat("a model cut for ", config.ranks, " GPUs cannot run on ", ranks));
  }
  if (layout.layers.size() != static_cast<size_t>(config.num_layers)) {
    return absl::InvalidArgumentError(absl::StrCat("the image layout has ", layout.layers.size(),
                                                   " layers, the model has ", config.num_layers));
  }
  return absl::OkStatus();
}

}  // namespace palimpsest::cuda
