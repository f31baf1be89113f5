#include "worker/compute/cpu/test_model.h"

#include <sys/mman.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <cstring>

#include "worker/compute/cpu/packing.h"

namespace palimpsest {
namespace {

uint16_t RoundToBf16(float x) {
  const auto bits = std::bit_cast<uint32_t>(x);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
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

ModelConfig RandomConfig(TestFamily family, std::mt19937& random) {
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  ModelConfig c = RandomConfig(random);
  switch (family) {
    case TestFamily::kLlama:
      break;
    case TestFamily::kQwen3:
      c.architecture = "Qwen3ForCausalLM";
      c.qk_norm = true;
      c.rope_scaling = RopeScaling{.kind = RopeScaling::Kind::kYarn,
                                   .factor = 4.0,
                                   .original_max_position = 64,
                                   .magnitude = 1.1};
      break;
    case TestFamily::kGemma2:
      c.architecture = "Gemma2ForCausalLM";
      c.norm_weight_offset = 1.0f;
      c.post_norms = true;
      c.activation = Activation::kGeluTanhGated;
      c.embedding_scale = std::sqrt(static_cast<float>(c.hidden_size));
      c.logit_softcap = static_cast<float>(pick(2, 10));
      c.attention_softcap = static_cast<float>(pick(1, 5));
      c.query_scalar = static_cast<float>(pick(8, 100));
      c.num_layers = pick(2, 3);
      c.sliding_window.reset();
      for (int i = 0; i < c.num_layers; ++i) {
        c.layer_windows.push_back(i % 2 == 0 ? pick(1, 150) : 0);
      }
      break;
    case TestFamily::kOpt:
      c.architecture = "OPTForCausalLM";
      c.norm = NormKind::kLayer;
      c.activation = Activation::kRelu;
      c.position_table_offset = 2;
      c.max_position = 400;
      c.num_heads = c.num_kv_heads;
      c.rope_scaling.reset();
      c.sliding_window.reset();
      break;
    case TestFamily::kEightBitKv:
      c.kv_dtype = KvDtype::kFp8E4m3;
      break;
    case TestFamily::kLatent:
      c.architecture = "DeepseekV3ForCausalLM";
      c.latent = LatentAttention{.q_lora_rank = pick(0, 1) * 16 * pick(1, 5),
                                 .kv_lora_rank = 32 * pick(1, 4),
                                 .qk_nope_head_dim = 16 * pick(1, 4),
                                 .qk_rope_head_dim = 16 * pick(1, 2),
                                 .v_head_dim = 32 * pick(1, 2)};
      c.num_kv_heads = 1;
      c.head_dim = c.latent->qk_nope_head_dim + c.latent->qk_rope_head_dim;
      c.qkv_bias = false;
      c.sliding_window.reset();
      break;
  }
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

TestModel::TestModel(const ModelConfig& config, uint32_t seed, Bytes slab)
    : config_(config), layout_(LayOutImage(config, slab).value()), image_(layout_.total.count()) {
  std::mt19937 random(seed);
  FillMatrix(layout_.embed, random);
  FillMatrix(layout_.positions, random);
  for (const LayerPlacement& layer : layout_.layers) {
    for (const VectorPlacement& norm :
         {layer.attention_norm, layer.q_norm, layer.k_norm, layer.post_attention_norm,
          layer.mlp_norm, layer.post_mlp_norm}) {
      FillNorm(norm, random);
    }
    for (const MatrixPlacement& matrix :
         {layer.qkv, layer.q_up, layer.k_up, layer.v_up, layer.o, layer.gate_up, layer.down}) {
      FillMatrix(matrix, random);
    }
    for (const VectorPlacement& bias : {layer.attention_norm_bias, layer.qkv_bias, layer.o_bias,
                                        layer.mlp_norm_bias, layer.gate_up_bias, layer.down_bias}) {
      FillVector(bias, 0.0f, 0.5f, random);
    }
  }
  FillNorm(layout_.final_norm, random);
  FillVector(layout_.final_norm_bias, 0.0f, 0.5f, random);
  if (!config.tie_word_embeddings) FillMatrix(layout_.lm_head, random);
}

void TestModel::FillNorm(const VectorPlacement& at, std::mt19937& random) {
  FillVector(at, 1.0f - config_.norm_weight_offset, 0.3f, random);
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

TestKv::TestKv(const ModelConfig& config, int32_t block_tokens, int64_t blocks)
    : block_bytes_(config.KvBytes(block_tokens)), region_(block_bytes_.count() * blocks) {
  std::memset(region_.data(), 0xff, region_.size());
}

}  // namespace palimpsest
