#include "worker/model/image_builder.h"

#include <algorithm>
#include <filesystem>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/compute/cpu/packing.h"
#include "worker/model/dummy_weights.h"
#include "worker/model/image_builder_fixture.h"
#include "worker/model/testing.h"

namespace palimpsest {
namespace {

using ::testing::HasSubstr;

class ImageBuilderTest : public ImageTest {
 protected:
  std::vector<std::byte> Build(const ModelConfig& config, const RandomModelOptions& options = {},
                               WeightFormat format = WeightFormat::kCpuPanels) {
    std::filesystem::remove_all(folder_);
    std::filesystem::create_directory(folder_);
    EXPECT_TRUE(WriteRandomModel(folder_, config, options).ok());
    auto checkpoint = Checkpoint::Open(folder_);
    EXPECT_TRUE(checkpoint.ok()) << checkpoint.status();
    auto layout = LayOutImage(config, kSlab, format);
    Image image(layout->total);
    const absl::Status status = BuildImage(*checkpoint, config, *layout, image.span());
    EXPECT_TRUE(status.ok()) << status;
    return image.copy();
  }
};

// Looks tensors up in an image by name, independently of the builder.
class Reader {
 public:
  Reader(const ModelConfig& config, WeightFormat format, const std::vector<std::byte>& image)
      : config_(config), layout_(*LayOutImage(config, kSlab, format)), image_(Bytes(image.size())) {
    std::copy(image.begin(), image.end(), image_.span().begin());
  }

  std::vector<float> Rows(const MatrixPlacement& m, int64_t first, int64_t count) const {
    if (layout_.format == WeightFormat::kRowMajor) {
      return Bf16(m.offset, first * m.cols, count * m.cols);
    }
    std::vector<float> out(static_cast<size_t>(count * m.cols));
    for (int64_t i = 0; i < count; ++i) {
      UnpackRow(image_.at(m.offset), first + i, m.cols, out.data() + i * m.cols);
    }
    return out;
  }
  std::vector<float> Floats(const VectorPlacement& v, int64_t first, int64_t count) const {
    if (layout_.format == WeightFormat::kRowMajor) return Bf16(v.offset, first, count);
    const auto* from = reinterpret_cast<const float*>(image_.at(v.offset)) + first;
    return {from, from + count};
  }

  std::vector<float> Tensor(const RandomTensor& tensor) const {
    const std::string& name = tensor.name;
    const int64_t n = tensor.shape[0];
    if (name == "model.embed_tokens.weight") return Rows(layout_.embed, 0, n);
    if (name == "lm_head.weight") return Rows(layout_.lm_head, 0, n);
    if (name == "model.norm.weight") return Floats(layout_.final_norm, 0, n);
    const size_t dot = name.find('.', sizeof("model.layers.") - 1);
    const int layer = std::stoi(name.substr(sizeof("model.layers.") - 1));
    return LayerTensor(layout_.layers[layer], name.substr(dot + 1), n);
  }

 private:
  std::vector<float> Bf16(Bytes offset, int64_t first, int64_t count) const {
    std::vector<float> out(static_cast<size_t>(count));
    const auto* from = reinterpret_cast<const uint16_t*>(image_.at(offset)) + first;
    for (float& value : out) value = std::bit_cast<float>(uint32_t{*from++} << 16);
    return out;
  }
  std::vector<float> LayerTensor(const LayerPlacement& layer, const std::string& name,
                                 int64_t n) const {
    const int64_t q = config_.num_heads * config_.head_dim;
    const int64_t kv = config_.num_kv_heads * config_.head_dim;
    const int64_t inner = config_.intermediate_size;
    if (name == "input_layernorm.weight") return Floats(layer.attention_norm, 0, n);
    if (name == "post_attention_layernorm.weight") return Floats(layer.mlp_norm, 0, n);
    if (name == "self_attn.q_proj.weight") return Rows(layer.qkv, 0, n);
    if (name == "self_attn.k_proj.weight") return Rows(layer.qkv, q, n);
    if (name == "self_attn.v_proj.weight") return Rows(layer.qkv, q + kv, n);
    if (name == "self_attn.q_proj.bias") return Floats(layer.qkv_bias, 0, n);
    if (name == "self_attn.k_proj.bias") return Floats(layer.qkv_bias, q, n);
    if (name == "self_attn.v_proj.bias") return Floats(layer.qkv_bias, q + kv, n);
    if (name == "self_attn.o_proj.weight") return Rows(layer.o, 0, n);
    if (name == "self_attn.o_proj.bias") return Floats(layer.o_bias, 0, n);
    if (name == "mlp.gate_proj.weight") return Rows(layer.gate_up, 0, n);
    if (name == "mlp.up_proj.weight") return Rows(layer.gate_up, inner, n);
    if (name == "mlp.gate_proj.bias") return Floats(layer.gate_up_bias, 0, n);
    if (name == "mlp.up_proj.bias") return Floats(layer.gate_up_bias, inner, n);
    if (name == "mlp.down_proj.weight") return Rows(layer.down, 0, n);
    if (name == "mlp.down_proj.bias") return Floats(layer.down_bias, 0, n);
    ADD_FAILURE() << name;
    return {};
  }

  const ModelConfig& config_;
  const ImageLayout layout_;
  Image image_;
};

TEST_F(ImageBuilderTest, HoldsEverySourceTensor) {
  ModelConfig llama = TinyModelConfig();
  llama.qkv_bias = llama.o_bias = llama.mlp_bias = true;
  ModelConfig qwen = TinyModelConfig();
  qwen.architecture = "Qwen2ForCausalLM";
  qwen.qkv_bias = qwen.tie_word_embeddings = true;
  ModelConfig odd = TinyModelConfig();
  odd.vocab_size = 259;  // neither rows nor parts end with a panel
  odd.head_dim = 6;
  odd.intermediate_size = 77;
  odd.hidden_size = 50;
  for (const ModelConfig& config : {TinyModelConfig(), llama, qwen, odd}) {
    for (const WeightFormat format : {WeightFormat::kCpuPanels, WeightFormat::kRowMajor}) {
      const Reader reader(config, format, Build(config, {.seed = 7}, format));
      for (const RandomTensor& tensor : RandomTensors(config, 7)) {
        EXPECT_EQ(reader.Tensor(tensor), tensor.values) << config.architecture << tensor.name;
      }
    }
  }
}

TEST_F(ImageBuilderTest, IsTheSameForAllTypesAndShards) {
  const ModelConfig config = TinyModelConfig();
  const std::vector<std::byte> image = Build(config);
  EXPECT_EQ(Build(config, {.dtype = "F16"}), image);
  EXPECT_EQ(Build(config, {.dtype = "F32"}), image);
  EXPECT_EQ(Build(config, {.shards = 5}), image);
  EXPECT_NE(Build(config, {.seed = 2}), image);
}

TEST_F(ImageBuilderTest, ReportsProgressUpToTheEnd) {
  const ModelConfig config = TinyModelConfig();
  ASSERT_TRUE(WriteRandomModel(folder_, config).ok());
  auto checkpoint = Checkpoint::Open(folder_);
  auto layout = LayOutImage(config, kSlab);
  Image image(layout->total);
  Bytes last;
  Bytes all;
  ASSERT_TRUE(BuildImage(*checkpoint, config, *layout, image.span(), [&](Bytes done, Bytes total) {
                EXPECT_GT(done, last);
                last = done;
                all = total;
              }).ok());
  EXPECT_EQ(last, all);
  EXPECT_GT(last, Bytes(0));
}

TEST_F(ImageBuilderTest, NamesMissingTensors) {
  const ModelConfig config = TinyModelConfig();
  const std::vector<RandomTensor> tensors = RandomTensors(config, 1);
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::vector<RandomTensor> fewer = tensors;
    fewer.erase(fewer.begin() + static_cast<int64_t>(i));
    EXPECT_EQ(Check(config, fewer), "the model folder lacks tensors: " + tensors[i].name);
  }
  EXPECT_THAT(Check(config, {}), HasSubstr("and 13 more"));
}

TEST_F(ImageBuilderTest, NamesTensorsOfTheWrongShape) {
  const ModelConfig config = TinyModelConfig();
  const std::vector<RandomTensor> tensors = RandomTensors(config, 1);
  for (size_t i = 0; i < tensors.size(); ++i) {
    std::vector<RandomTensor> wrong = tensors;
    wrong[i].shape.push_back(1);
    EXPECT_THAT(Check(config, wrong), HasSubstr("tensor " + tensors[i].name + ": expected shape"));
  }
  std::vector<RandomTensor> transposed = tensors;
  std::swap(transposed[0].shape[0], transposed[0].shape[1]);
  EXPECT_THAT(Check(config, transposed), HasSubstr("expected shape [320, 64]"));
}

TEST_F(ImageBuilderTest, RefusesTensorsItDoesNotKnow) {
  ModelConfig config = TinyModelConfig();
  std::vector<RandomTensor> tensors = RandomTensors(config, 1);
  tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", {2}, {1.0f, 0.5f}});
  EXPECT_EQ(Check(config, tensors), "accepted");
  tensors.push_back({"model.layers.0.self_attn.q_norm.weight", {1}, {1.0f}});
  EXPECT_THAT(Check(config, tensors), HasSubstr("model.layers.0.self_attn.q_norm.weight"));
}

TEST_F(ImageBuilderTest, RefusesBiasesThatTheConfigDenies) {
  ModelConfig config = TinyModelConfig();
  config.qkv_bias = true;
  const std::vector<RandomTensor> tensors = RandomTensors(config, 1);
  config.qkv_bias = false;
  EXPECT_THAT(Check(config, tensors), HasSubstr("k_proj.bias"));
}

TEST_F(ImageBuilderTest, ToleratesTheSecondCopyOfTiedEmbeddings) {
  ModelConfig config = TinyModelConfig();
  const std::vector<RandomTensor> tensors = RandomTensors(config, 1);
  config.tie_word_embeddings = true;
  EXPECT_EQ(Check(config, tensors), "accepted");
}

TEST(LatentImage, RowsAreWhereTheLayoutSays) {
  ModelConfig config = TinyModelConfig();
  config.num_layers = 1;
  config.num_kv_heads = 1;
  config.latent = LatentAttention{.q_lora_rank = 32,
                                  .kv_lora_rank = 64,
                                  .qk_nope_head_dim = 16,
                                  .qk_rope_head_dim = 8,
                                  .v_head_dim = 12};
  config.head_dim = 24;
  const ImageLayout layout = *LayOutImage(config, kSlab, WeightFormat::kRowMajor);
  Image image(layout.total);
  ASSERT_TRUE(BuildDummyImage(1, config, layout, image.span()).ok());
  const LayerPlacement& at = layout.layers[0];
  const auto placed = [&](const MatrixPlacement& m, int64_t row, int64_t col) {
    return reinterpret_cast<const uint16_t*>(image.at(m.offset))[row * m.cols + col];
  };
  const auto source = [](const std::string& name, int64_t cols, int64_t row, int64_t col) {
    uint16_t number;
    DummyTensor(1, "model.layers.0.self_attn." + name, cols, 0)
        .ReadBf16(row * cols + col, absl::MakeSpan(&number, 1));
    return number;
  };
  const std::vector<int64_t> halves = {0, 2, 4, 6, 1, 3, 5, 7};
  for (int64_t c = 0; c < 32; ++c) {
    for (int64_t r = 0; r < 32; ++r) {
      EXPECT_EQ(placed(at.qkv, r, c), source("q_a_proj.weight", 64, r, c));
    }
    for (int64_t r = 0; r < 64; ++r) {
      EXPECT_EQ(placed(at.qkv, 32 + r, c), source("kv_a_proj_with_mqa.weight", 64, r, c));
    }
    for (int64_t r = 0; r < 8; ++r) {
      EXPECT_EQ(placed(at.qkv, 96 + r, c),
                source("kv_a_proj_with_mqa.weight", 64, 64 + halves[r], c));
    }
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t r = 0; r < 24; ++r) {
        const int64_t from = r < 16 ? r : 16 + halves[r - 16];
        EXPECT_EQ(placed(at.q_up, h * 24 + r, c), source("q_b_proj.weight", 32, h * 24 + from, c));
      }
      for (int64_t r = 0; r < 12; ++r) {
        EXPECT_EQ(placed(at.v_up, h * 12 + r, c),
                  source("kv_b_proj.weight", 64, h * 28 + 16 + r, c));
      }
      for (int64_t r = 0; r < 64; ++r) {
        EXPECT_EQ(placed(at.k_up, h * 64 + r, c % 16),
                  source("kv_b_proj.weight", 64, h * 28 + c % 16, r));
      }
    }
  }
}

TEST(ModelConfigJson, IsReadBack) {
  ModelConfig config = TinyModelConfig();
  config.qkv_bias = config.o_bias = config.mlp_bias = true;
  config.rope_scaling = RopeScaling{.kind = RopeScaling::Kind::kLlama3, .factor = 4.0};
  config.eos_token_ids = {3, 4};
  config.bos_token_id = 1;
  auto back = ParseModelConfig(ModelConfigJson(config), "");
  ASSERT_TRUE(back.ok()) << back.status();
  EXPECT_EQ(ModelConfigJson(*back), ModelConfigJson(config));
  EXPECT_TRUE(back->qkv_bias && back->mlp_bias);
  for (const char* architecture : {"Qwen2ForCausalLM", "MistralForCausalLM"}) {
    ModelConfig windowed = TinyModelConfig();
    windowed.architecture = architecture;
    windowed.sliding_window = 17;
    auto parsed = ParseModelConfig(ModelConfigJson(windowed), "");
    ASSERT_TRUE(parsed.ok()) << parsed.status();
    EXPECT_EQ(parsed->sliding_window, 17);
    windowed.sliding_window.reset();
    EXPECT_EQ(ParseModelConfig(ModelConfigJson(windowed), "")->sliding_window, std::nullopt);
  }
}

}  // namespace
}  // namespace palimpsest
