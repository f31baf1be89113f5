#include "worker/compute/cuda/kernel_choice.h"

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "worker/compute/cuda/attention.h"
#include "worker/compute/cuda/decode_plan.h"
#include "worker/compute/cuda/fused_decode.h"
#include "worker/compute/cuda/head_sample.h"
#include "worker/compute/cuda/latent_plan.h"
#include "worker/compute/cuda/skinny_gemm.h"

namespace palimpsest::cuda {
namespace {

constexpr int64_t kMaxHistoryInts = int64_t{4} << 20;
constexpr int32_t kTensorCoreGroup = 4;

void ChooseDecodeKernels(const ModelConfig& config, PackerOptions& packer) {
  if (config.latent.has_value()) {
    packer.latent_heads = config.num_heads;
    packer.tensor_cores = false;
    return;
  }
  const int32_t group = config.num_heads / config.num_kv_heads;
  const auto has = [&](DecodeKernel kernel) {
    return HasDecodeKernel(kernel, config.head_dim, group);
  };
  const bool capped = config.attention_softcap > 0;
  const bool masked_alone = capped || config.kv_dtype == KvDtype::kFp8E4m3;
  packer.cuda_cores = !masked_alone && has(DecodeKernel::kCudaCores);
  // A tile has 16 rows: with few heads per KV head most of it would be padding.
  packer.tensor_cores = !masked_alone && has(DecodeKernel::kTensorCores) &&
                        (group >= kTensorCoreGroup || !packer.cuda_cores);
  const bool plain = packer.cuda_cores || packer.tensor_cores;
  packer.masked =
      has(DecodeKernel::kMasked) && (!plain || packer.windowless_tokens < config.max_position);
}

}  // namespace

std::vector<int32_t> DecodeLadder(int32_t max_sequences) {
  std::vector<int32_t> ladder;
  for (const int32_t rows : {1, 2, 4, 8, 16, 24, 32, 48, 64}) ladder.push_back(rows);
  while (ladder.back() < max_sequences) ladder.push_back(ladder.back() + 32);
  while (ladder.size() > 1 && ladder[ladder.size() - 2] >= max_sequences) ladder.pop_back();
  ladder.back() = std::min(ladder.back(), max_sequences);
  return ladder;
}

bool CanFuseDecode(const ModelConfig& config, const CudaRunnerOptions& options) {
  return options.fused_decode && !config.latent.has_value() && config.attention_softcap == 0 &&
         config.kv_dtype == KvDtype::kBf16 &&
         HasFusedDecode(config.head_dim, config.num_heads / config.num_kv_heads,
                        options.block_tokens, options.max_sequences);
}

PackerOptions MakePackerOptions(const ModelConfig& config, Bytes kv_block_bytes,
                                const CudaRunnerOptions& options) {
  PackerOptions packer;
  packer.vocab_size = config.vocab_size;
  packer.max_position = config.max_position;
  packer.block_tokens = options.block_tokens;
  const int64_t number = KvElementBytes(config.kv_dtype);
  packer.block_elements = kv_block_bytes.count() / number;
  packer.token_elements = config.KvTokenBytes().count() / (config.latent ? 1 : 2) / number;
  packer.kv_heads = config.num_kv_heads;
  packer.window = config.sliding_window.value_or(0);
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    packer.windowless_tokens = std::min(packer.windowless_tokens, config.WindowOf(layer));
  }
  ChooseDecodeKernels(config, packer);
  packer.tensor_core_tokens = options.tensor_core_tokens;
  packer.max_rows = options.max_step_tokens;
  packer.max_sequences = options.max_sequences;
  const int64_t positions = int64_t{options.max_sequences} * config.max_position;
  packer.max_ints = positions / options.block_tokens + 2 * int64_t{options.max_sequences} +
                    std::min(positions, kMaxHistoryInts);
  return packer;
}

ForwardOptions MakeForwardOptions(const ModelConfig& config, const PackerOptions& packer,
                                  const CudaRunnerOptions& options, bool hopper) {
  const bool fusible = hopper && config.hidden_size % 64 == 0 &&
                       config.intermediate_size % 64 == 0 &&
                       config.num_heads * config.value_dim() % 64 == 0 &&
                       (!config.latent.has_value() || config.latent->q_lora_rank % 64 == 0);
  ForwardOptions forward;
  forward.block_tokens = options.block_tokens;
  forward.max_rows = options.max_step_tokens;
  forward.max_sequences = options.max_sequences;
  forward.staging_bytes = MaxStagingBytes(packer);
  forward.hopper = hopper;
  if (config.latent.has_value()) {
    forward.latent_partial_rows = LatentPartialRows(packer.multiprocessors);
  }
  forward.null_block = packer.null_block;
  forward.fused_decode = packer.fused_decode;
  forward.multiprocessors = packer.multiprocessors;
  forward.decode_rows = DecodeLadder(options.max_sequences);
  forward.gemm_cache_file = options.gemm_cache_file;
  forward.overlap_launches = options.overlap_launches;
  forward.collective = options.collective;
  forward.sampled_recent_tokens = options.head_sampling.recent_tokens;
  if (packer.cuda_cores) forward.decode_kernels.push_back(DecodeKernel::kCudaCores);
  if (packer.tensor_cores) forward.decode_kernels.push_back(DecodeKernel::kTensorCores);
  if (packer.masked) forward.decode_kernels.push_back(DecodeKernel::kMasked);
  forward.max_fused_rows = fusible ? std::min(options.max_fused_rows, kSkinnyGemmMaxTokens) : 0;
  return forward;
}

absl::Status CheckHeadSampling(const ModelConfig& config, const HeadSampling& sampling) {
  if (sampling.every == 0) return absl::OkStatus();
  bool windows = false;
  for (int32_t layer = 0; layer < config.num_layers; ++layer) {
    windows = windows || config.WindowOf(layer) != INT32_MAX;
  }
  if (sampling.every > 0 && sampling.recent_tokens > 0 && !config.latent.has_value() && !windows &&
      config.head_dim % 32 == 0 && config.head_dim <= kMostSampledHeadDim) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      "samples of heads on a GPU: expected every so many steps and recent tokens above 0, full "
      "attention without latents or sliding windows, and heads of a multiple of 32 up to ",
      kMostSampledHeadDim, "; got every ", sampling.every, " steps and ", sampling.recent_tokens,
      " tokens of a model with ",
      config.latent.has_value() ? "latents"
      : windows                 ? "windows"
                                : "full attention",
      " and heads of ", config.head_dim));
}

int32_t MaxTiles(const PackerOptions& packer) {
  if (packer.latent_heads > 0) return 0;
  return MaxDecodeTiles(packer.max_sequences, packer.kv_heads, packer.multiprocessors);
}

}  // namespace palimpsest::cuda
